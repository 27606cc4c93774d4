#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "tessera/base/internal/vector.h"
#include "tessera/c/detail/arrays.h"

namespace tessera::c {
namespace {

// Below it products and sums of sizes in bytes stay within 64 bits.
constexpr std::int64_t kMostElements = std::int64_t{1} << 58;

std::int64_t bounded(std::int64_t a, std::int64_t b) {
  if (a != 0 && b > kMostElements / a) refuse("the array is larger than memory");
  return a * b;
}

// Distinct indices give distinct elements if, from the smallest stride on, each stride reaches
// beyond all that the dims before it span. Dims that interlock otherwise are refused too.
void require_apart(const std::vector<std::int64_t>& shape,
                   const std::vector<std::int64_t>& strides) {
  if (std::ranges::find(shape, 0) != shape.end()) return;
  auto dims = numbers_below(shape.size(), [&](std::size_t d) { return shape[d] > 1; });
  std::ranges::sort(dims, [&](std::size_t a, std::size_t b) { return strides[a] < strides[b]; });
  std::int64_t span = 1;
  for (const std::size_t d : dims) {
    if (strides[d] < span)
      refuse("elements overlap: of shape ", list(shape), " with strides ", list(strides), " dim ",
             d, " needs a stride of at least ", span);
    span += bounded(shape[d] - 1, strides[d]);
    if (span > kMostElements) refuse("the array is larger than memory");
  }
}

std::vector<std::int64_t> shape_of(const tessera_array& array) {
  if (array.dims < 0 || array.dims > TESSERA_MAX_DIMS)
    refuse("dims is ", array.dims, ": an array has 0 to ", static_cast<int>(TESSERA_MAX_DIMS));
  if (array.dims == 0) return {};
  std::vector<std::int64_t> shape(need(array.shape, "shape"), array.shape + array.dims);
  for (const std::int64_t n : shape)
    if (n < 0 || n > kMostElements)
      refuse("the shape is ", list(shape), ": sizes are at least 0, and what memory could hold");
  return shape;
}

constexpr std::pair<tessera_dtype, at::ScalarType> kDtypes[] = {{TESSERA_FLOAT32, at::kFloat},
                                                                {TESSERA_FLOAT64, at::kDouble},
                                                                {TESSERA_INT32, at::kInt},
                                                                {TESSERA_INT64, at::kLong}};

}  // namespace

at::ScalarType dtype_of(tessera_dtype dtype) {
  for (const auto& [given, its] : kDtypes)
    if (given == dtype) return its;
  refuse("dtype is ", static_cast<int>(dtype),
         ": give TESSERA_FLOAT32, TESSERA_FLOAT64, TESSERA_INT32 or TESSERA_INT64");
}

tessera_dtype dtype_of(at::ScalarType dtype) {
  for (const auto& [its, given] : kDtypes)
    if (given == dtype) return its;
  refuse("a tensor of ", toString(dtype), ", for which C has no tessera_dtype");
}

std::vector<std::int64_t> strides_of(const tessera_array& array) {
  const auto shape = shape_of(array);
  const std::size_t dims = shape.size();
  std::vector<std::int64_t> strides(dims);
  if (array.strides) {
    std::copy_n(array.strides, dims, strides.begin());
  } else {
    if (array.order != TESSERA_ROW_MAJOR && array.order != TESSERA_COLUMN_MAJOR)
      refuse("order is ", static_cast<int>(array.order), ", which is no tessera_order");
    std::int64_t next = 1;
    for (std::size_t i = 0; i < dims; ++i) {
      const std::size_t d = array.order == TESSERA_COLUMN_MAJOR ? i : dims - 1 - i;
      strides[d] = next;
      next = bounded(std::max<std::int64_t>(shape[d], 1), next);
    }
  }
  require_apart(shape, strides);
  return strides;
}

at::Tensor tensor_over(const tessera_array* array, const char* name) {
  need(array, name);
  const auto dtype = dtype_of(array->dtype);
  const auto strides = strides_of(*array);
  const auto shape = shape_of(*array);
  const bool empty = std::ranges::find(shape, 0) != shape.end();
  if (!array->data && !empty) refuse(name, " has the shape ", list(shape), " and no memory");
  try {
    return at::from_blob(array->data, shape, strides, at::TensorOptions(dtype));
  } catch (const c10::Error& error) {
    refuse(name, " has the shape ", list(shape), ": ", error.what_without_backtrace());
  }
}

}  // namespace tessera::c
