#include "tessera/data/sources/safetensors_source.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "tessera/base/text.h"
#include "tessera/checkpoint/internal/torch_dtypes.h"

namespace tessera {

namespace {

// Limit of bytes read per byte needed, if a column of an array is asked for.
constexpr double kMostOverRead = 16;

}  // namespace

struct SafetensorsSource::File {
  explicit File(const std::string& path) : file(path), header(read_safetensors_header(file)) {}

  ReadFile file;
  SafetensorsHeader header;
  // In the file, of each variable.
  std::vector<std::uint64_t> begins;
};

SafetensorsSource::SafetensorsSource(const std::string& path)
    : ListedSource(path, "tensor"), file_(std::make_unique<File>(path)) {
  const SafetensorsHeader& header = file_->header;
  for (const std::size_t i : safetensors_data_order(header.tensors)) {
    const SafetensorsTensor& t = header.tensors[i];
    const auto layout = torch_layout(t);
    if (!layout) continue;
    VariableInfo info{t.name, {}, layout->shape, layout->dtype, {}};
    for (std::size_t d = 0; d < layout->shape.size(); ++d) info.dims.push_back(concat("dim", d));
    add(std::move(info));
    file_->begins.push_back(header.data + t.begin);
  }
}
SafetensorsSource::~SafetensorsSource() = default;

const VariableInfo& SafetensorsSource::info(const std::string& variable) const {
  try {
    return ListedSource::info(variable);
  } catch (const VariableError&) {
    // Of a dtype that libtorch does not have.
    if (const SafetensorsTensor* t = file_->header.find(variable)) need_torch_layout(*t, path_);
    throw;
  }
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
                       file_->begins[place(variable.name)], variable.shape, box, kMostOverRead);
  return stored.to(options.dtype);
}

}  // namespace tessera
