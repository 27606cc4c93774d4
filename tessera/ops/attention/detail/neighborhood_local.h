#pragma once
// Neighbourhood attention of a box of queries and a box of keys: what one rank computes.

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "tessera/ops/attention/neighborhood.h"
#include "tessera/partition/interval.h"

namespace tessera::detail {

struct LocalNeighborhood {
  std::vector<Neighborhood> dims;
  /// Extents of the whole field, one per spatial dim.
  std::vector<std::int64_t> extents;
  /// The boxes of it that `q`, and `k` and `v`, hold, one interval per spatial dim. They contain
  /// every key that a query sees.
  Box queries, keys;
  double scale = 1;
};

/// The smallest interval that contains the keys that some query of `queries` sees.
Interval seen_keys(const Neighborhood& dim, Interval queries, std::int64_t extent);

/// Neighbourhood attention of plain tensors. Differentiable any number of times.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const LocalNeighborhood& where);

/// The gradients of q, k and v in attend(), composed of libtorch's operators: differentiable in all
/// four tensors any number of times. It gathers the keys and values of every query.
std::array<at::Tensor, 3> differentiable_gradients(const at::Tensor& gradient, const at::Tensor& q,
                                                   const at::Tensor& k, const at::Tensor& v,
                                                   const LocalNeighborhood& where);

/// Forward and backward of attend(), below autograd: by a kernel of the device (on CUDA in
/// libtessera_cuda.so), or where it has none composed of libtorch's operators.
class Attention {
 public:
  explicit Attention(LocalNeighborhood where);
  const LocalNeighborhood& where() const { return where_; }

  struct Result {
    /// logs: the logarithm of each query's sum of exponentials, which backward needs.
    at::Tensor value, logs;
  };
  Result forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;
  /// Gradients of q, k and v.
  std::array<at::Tensor, 3> backward(const at::Tensor& gradient, const at::Tensor& q,
                                     const at::Tensor& k, const at::Tensor& v,
                                     const Result& result) const;

 private:
  LocalNeighborhood where_;
  std::vector<std::int64_t> windows_;
};

}  // namespace tessera::detail
