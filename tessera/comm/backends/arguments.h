#pragma once
// Checks of the tensors that c10d passes to Tessera's own backends, and lists of tensors packed
// into one.

#include <ATen/ATen.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/comm/group/types.h"

namespace tessera::detail {

inline void require_cpu(const char* name, const at::Tensor& tensor) {
  if (!tensor.defined()) throw InvalidArgument(concat(name, ": a tensor is undefined"));
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided)
    throw InvalidArgument(
        concat(name, ": this backend moves dense CPU tensors, and this one is ", tensor.toString(),
               "; copy it to the CPU, or give the group a backend for its device"));
}

inline const at::Tensor& only(const char* name, const std::vector<at::Tensor>& tensors) {
  if (tensors.size() != 1)
    throw InvalidArgument(concat(name, " takes one tensor a call, and got ", tensors.size()));
  require_cpu(name, tensors.front());
  return tensors.front();
}

inline void require_same_type(const char* name, const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type())
    throw InvalidArgument(concat(name, ": input is ", c10::toString(a.scalar_type()),
                                 " and output ", c10::toString(b.scalar_type()),
                                 "; they must be the same"));
}

inline void require_numel(const char* name, const char* which, const at::Tensor& tensor,
                          std::int64_t expected) {
  if (tensor.numel() != expected)
    throw InvalidArgument(concat(name, ": the ", which, " holds ", tensor.numel(),
                                 " elements, and ", expected, " are needed"));
}

/// Converts rows to elements; a row of `like` has the elements of its dims after the first. Throws
/// InvalidArgument if the sums overflow.
inline std::vector<std::int64_t> elements_of(const std::vector<std::int64_t>& rows,
                                             const at::Tensor& like) {
  std::int64_t row = 1;
  for (std::int64_t d = 1; d < like.dim(); ++d) row *= like.size(d);
  std::vector<std::int64_t> result = rows;
  std::int64_t sum = 0;
  for (auto& n : result)
    // A product that wrapped around would pass for the size of a small tensor.
    if (__builtin_mul_overflow(n, row, &n) || __builtin_add_overflow(sum, n, &sum))
      throw InvalidArgument(concat("sizes ", list(rows), " of rows of ", row,
                                   " elements are more than any tensor has"));
  return result;
}

inline std::int64_t total_of(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

inline std::vector<std::int64_t> numels(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> result;
  for (const auto& t : tensors) result.push_back(t.numel());
  return result;
}

/// One flat tensor (`whole`) with the elements of several, and views of it shaped like each.
struct Flat {
  at::Tensor whole;
  std::vector<at::Tensor> parts;
};

inline Flat flattened(const std::vector<at::Tensor>& tensors) {
  Flat result;
  const auto counts = numels(tensors);
  result.whole = at::empty({total_of(counts)},
                           tensors.front().options().memory_format(at::MemoryFormat::Contiguous));
  std::int64_t start = 0;
  for (const auto& t : tensors) {
    result.parts.push_back(result.whole.narrow(0, start, t.numel()).view(t.sizes()));
    start += t.numel();
  }
  return result;
}

}  // namespace tessera::detail
