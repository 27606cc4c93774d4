#include "tessera/data/sources/safetensors_source.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/internal/torch_dtypes.h"

namespace tessera {

namespace {

// Limit of bytes read per byte needed, if a column of an array is asked for.
constexpr double kMostOverRead = 16;

}  // namespace

struct SafetensorsSource::File {
  struct Entry {
    VariableInfo info;
    std::uint64_t begin;
  };

  explicit File(const std::string& path) : file(path), header(read_safetensors_header(file)) {
    for (const std::size_t i : safetensors_data_order(header.tensors)) {
      const SafetensorsTensor& t = header.tensors[i];
      const auto layout = torch_layout(t);
      if (!layout) continue;
      VariableInfo info{t.name, {}, layout->shape, layout->dtype, {}};
      for (std::size_t d = 0; d < layout->shape.size(); ++d) info.dims.push_back(concat("dim", d));
      places.emplace(t.name, entries.size());
      entries.push_back({std::move(info), header.data + t.begin});
    }
  }

  const Entry& entry(const std::string& name) const {
    if (const auto found = places.find(name); found != places.end()) return entries[found->second];
    if (const SafetensorsTensor* t = header.find(name)) need_torch_layout(*t, file.path());
    std::vector<std::string> known;
    for (const Entry& e : entries) known.push_back(printable(e.info.name));
    throw VariableError(file.path(), " has no tensor ", name, "; it has ", list(known));
  }

  ReadFile file;
  SafetensorsHeader header;
  std::vector<Entry> entries;
  std::map<std::string, std::size_t> places;
};

SafetensorsSource::SafetensorsSource(const std::string& path)
    : file_(std::make_unique<File>(path)) {}
SafetensorsSource::~SafetensorsSource() = default;

std::string SafetensorsSource::name() const { return file_->file.path(); }

std::vector<std::string> SafetensorsSource::variables() const {
  std::vector<std::string> names;
  for (const auto& e : file_->entries) names.push_back(e.info.name);
  return names;
}

const VariableInfo& SafetensorsSource::info(const std::string& variable) const {
  return file_->entry(variable).info;
}
const std::map<std::string, std::string>& SafetensorsSource::metadata() const {
  return file_->header.metadata;
}

at::Tensor SafetensorsSource::read_box(const VariableInfo& variable, const Hyperslab& slab,
                                       const ReadOptions& options) const {
  const at::Tensor stored = at::empty(slab.count, variable.stored);
  std::vector<ReadFile::Range> box;
  for (std::size_t d = 0; d < slab.start.size(); ++d)
    box.push_back({slab.start[d], slab.count[d], slab.stride[d]});
  file_->file.read_box(stored.mutable_data_ptr(), stored.element_size(),
                       file_->entry(variable.name).begin, variable.shape, box, kMostOverRead);
  return stored.to(options.dtype);
}

}  // namespace tessera
