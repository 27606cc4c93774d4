#include "tessera/data/sources/safetensors_source.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "tessera/base/text.h"
#include "tessera/data/sources/detail/mapped_file.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kLongestHeader = 100'000'000;  // as the format's own reader

std::optional<at::ScalarType> dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> known{{"BOOL", at::kBool},
                                                           {"U8", at::kByte},
                                                           {"I8", at::kChar},
                                                           {"I16", at::kShort},
                                                           {"U16", at::kUInt16},
                                                           {"F16", at::kHalf},
                                                           {"BF16", at::kBFloat16},
                                                           {"I32", at::kInt},
                                                           {"U32", at::kUInt32},
                                                           {"F32", at::kFloat},
                                                           {"I64", at::kLong},
                                                           {"U64", at::kUInt64},
                                                           {"F64", at::kDouble},
                                                           {"F8_E4M3", at::kFloat8_e4m3fn},
                                                           {"F8_E5M2", at::kFloat8_e5m2}};
  const auto found = known.find(name);
  return found == known.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace

struct SafetensorsSource::File {
  struct Entry {
    VariableInfo info;
    std::uint64_t begin;
  };

  explicit File(const std::string& path) : map(path) {
    auto refuse = [&](const std::string& why) {
      throw FileError(concat("'", path, "' is no safetensors file, or a damaged one: ", why));
    };
    if (map.size() < 8)
      refuse(concat("it has ", map.size(), " bytes, fewer than the eight of the header's length"));
    std::uint64_t length = 0;
    for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(map.data()[i]);
    if (length > map.size() - 8 || length > kLongestHeader)
      refuse(concat("a header of ", length, " bytes in a file of ", map.size(), " (at most ",
                    kLongestHeader, ")"));
    data = map.data() + 8 + length;
    const std::uint64_t bytes = map.size() - 8 - length;
    const Json header =
        Json::parse(map.data() + 8, map.data() + 8 + length, nullptr, /*allow_exceptions=*/false);
    if (!header.is_object()) refuse("its header is no JSON object");
    for (const auto& [name, about] : header.items()) {
      try {
        if (name == "__metadata__") {
          metadata = about.get<std::map<std::string, std::string>>();
          continue;
        }
        const auto dtype = dtype_of(about.at("dtype").get<std::string>());
        if (!dtype)
          refuse(concat("tensor ", name, " has the unknown dtype ",
                        about.at("dtype").get<std::string>()));
        const auto shape = about.at("shape").get<std::vector<std::uint64_t>>(),
                   range = about.at("data_offsets").get<std::vector<std::uint64_t>>();
        // JSON numbers below zero would wrap round.
        for (const char* list : {"shape", "data_offsets"})
          for (const Json& number : about.at(list))
            if (!number.is_number_unsigned())
              refuse(concat("tensor ", name, " has a number in ", list, " that is none from 0 on"));
        if (range.size() != 2 || range[0] > range[1] || range[1] > bytes)
          refuse(concat("tensor ", name, " lies at ", list(range), ", the file holds ", bytes,
                        " bytes of data"));
        std::uint64_t size = c10::elementSize(*dtype);
        VariableInfo info{name, {}, {}, *dtype, {}};
        for (const std::uint64_t n : shape) {
          if (n != 0 && size > (std::uint64_t{1} << 62) / n)
            refuse(concat("tensor ", name, " of shape ", list(shape), " is too large"));
          size *= n;
          info.dims.push_back(concat("dim", info.dims.size()));
          info.shape.push_back(static_cast<std::int64_t>(n));
        }
        if (size != range[1] - range[0])
          refuse(concat("tensor ", name, " of shape ", list(shape), " takes ", size,
                        " bytes, its data_offsets hold ", range[1] - range[0]));
        entries.push_back({std::move(info), range[0]});
      } catch (const Json::exception& e) {
        refuse(concat("the entry of ", name, ": ", e.what()));
      }
    }
    std::stable_sort(entries.begin(), entries.end(),
                     [](const Entry& a, const Entry& b) { return a.begin < b.begin; });
  }

  const Entry& entry(const std::string& name) const {
    for (const Entry& e : entries)
      if (e.info.name == name) return e;
    std::vector<std::string> known;
    for (const Entry& e : entries) known.push_back(e.info.name);
    throw VariableError(concat(map.path(), " has no tensor ", name, "; it has ", list(known)));
  }

  detail::MappedFile map;
  const char* data = nullptr;
  std::vector<Entry> entries;
  std::map<std::string, std::string> metadata;
};

SafetensorsSource::SafetensorsSource(const std::string& path)
    : file_(std::make_unique<File>(path)) {}
SafetensorsSource::~SafetensorsSource() = default;

std::string SafetensorsSource::name() const { return file_->map.path(); }

std::vector<std::string> SafetensorsSource::variables() const {
  std::vector<std::string> names;
  for (const auto& e : file_->entries) names.push_back(e.info.name);
  return names;
}

const VariableInfo& SafetensorsSource::info(const std::string& variable) const {
  return file_->entry(variable).info;
}
const std::map<std::string, std::string>& SafetensorsSource::metadata() const {
  return file_->metadata;
}

at::Tensor SafetensorsSource::read_box(const VariableInfo& variable, const Hyperslab& slab,
                                       const ReadOptions& options) const {
  const char* bytes = file_->data + file_->entry(variable.name).begin;
  at::Tensor whole;
  if (reinterpret_cast<std::uintptr_t>(bytes) % c10::elementSize(variable.stored) == 0) {
    // read only, and not kept
    whole =
        at::from_blob(const_cast<char*>(bytes), variable.shape, at::TensorOptions(variable.stored));
    // a header of odd length
  } else {
    whole = at::empty(variable.shape, variable.stored);
    std::memcpy(whole.mutable_data_ptr(), bytes, whole.nbytes());
  }
  for (std::size_t d = 0; d < slab.start.size(); ++d)
    whole = whole.slice(static_cast<std::int64_t>(d), slab.start[d],
                        slab.start[d] + (slab.count[d] - 1) * slab.stride[d] + 1, slab.stride[d]);
  return whole.to(options.dtype, /*non_blocking=*/false, /*copy=*/true,
                  at::MemoryFormat::Contiguous);
}

}  // namespace tessera
