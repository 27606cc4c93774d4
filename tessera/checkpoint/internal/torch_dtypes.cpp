#include "tessera/checkpoint/internal/torch_dtypes.h"

#include <array>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

using DtypePair = std::pair<const char*, at::ScalarType>;

constexpr std::array<DtypePair, 20> kTorchDtypes = {{{"F64", at::kDouble},
                                                     {"F32", at::kFloat},
                                                     {"F16", at::kHalf},
                                                     {"BF16", at::kBFloat16},
                                                     {"F8_E5M2", at::kFloat8_e5m2},
                                                     {"F8_E4M3", at::kFloat8_e4m3fn},
                                                     {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
                                                     {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
                                                     {"F8_E8M0", at::kFloat8_e8m0fnu},
                                                     {"F4", at::ScalarType::Float4_e2m1fn_x2},
                                                     {"I64", at::kLong},
                                                     {"I32", at::kInt},
                                                     {"I16", at::kShort},
                                                     {"I8", at::kChar},
                                                     {"U64", at::kUInt64},
                                                     {"U32", at::kUInt32},
                                                     {"U16", at::kUInt16},
                                                     {"U8", at::kByte},
                                                     {"BOOL", at::kBool},
                                                     {"C64", at::kComplexFloat}}};

}  // namespace

SafetensorsTensor safetensors_tensor(const std::string& name, at::ScalarType dtype,
                                     const std::vector<std::int64_t>& shape) {
  for (const auto& [text, type] : kTorchDtypes) {
    if (type != dtype) continue;
    SafetensorsTensor t{name, text, shape, 0, 0};
    if (dtype == at::ScalarType::Float4_e2m1fn_x2) {
      if (shape.empty()) t.shape.push_back(1);
      t.shape.back() *= 2;
    }
    return t;
  }
  throw InvalidArgument("tensor '", name, "' is ", c10::toString(dtype),
                        ", which the safetensors format does not have; save it as "
                        "at::view_as_real of it, or convert it");
}

std::optional<TorchLayout> torch_layout(const SafetensorsTensor& tensor) {
  for (const auto& [text, type] : kTorchDtypes) {
    if (tensor.dtype != text) continue;
    TorchLayout layout{type, tensor.shape};
    if (type == at::ScalarType::Float4_e2m1fn_x2) {
      if (layout.shape.empty() || layout.shape.back() % 2 != 0) return std::nullopt;
      layout.shape.back() /= 2;
    }
    return layout;
  }
  return std::nullopt;
}

TorchLayout need_torch_layout(const SafetensorsTensor& tensor, const std::string& path) {
  const auto layout = torch_layout(tensor);
  if (!layout)
    throw FileError("'", path, "': tensor '", printable(tensor.name), "' of shape ",
                    list(tensor.shape), " is ", printable(tensor.dtype),
                    ", which libtorch cannot hold; the file's other tensors can be read");
  return *layout;
}

}  // namespace tessera
