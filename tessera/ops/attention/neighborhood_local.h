#pragma once
// Neighbourhood attention of a box of queries whose keys are a box too: what one rank computes.

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "tessera/ops/attention/neighborhood.h"
#include "tessera/partition/interval.h"

namespace tessera::detail {

struct LocalNeighborhood {
  std::vector<Neighborhood> dims;
  /// Of the whole field, a number a spatial dim.
  std::vector<std::int64_t> extents;
  /// What `q`, and `k` and `v`, hold of it; a spatial dim each. Every key that a query sees is
  /// held.
  Box queries, keys;
  double scale = 1;
};

/// The keys that some query of the interval sees, as the smallest interval that holds them.
Interval seen_keys(const Neighborhood& dim, Interval queries, std::int64_t extent);

/// Differentiable once. Plain tensors.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const LocalNeighborhood& where);

/// In backward: throws NotAvailable where a graph of it is asked for.
void refuse_second_derivative();

/// The same in two halves, below autograd.
class Attention {
 public:
  explicit Attention(LocalNeighborhood where);
  const LocalNeighborhood& where() const { return where_; }

  struct Result {
    /// logs: of each query's sum of exponentials, which backward needs; undefined where it does
    /// not.
    at::Tensor value, logs;
  };
  Result forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;
  /// Gradients of q, k and v.
  std::array<at::Tensor, 3> backward(const at::Tensor& gradient, const at::Tensor& q,
                                     const at::Tensor& k, const at::Tensor& v,
                                     const Result& result) const;

 private:
  LocalNeighborhood where_;
  std::vector<std::vector<std::int64_t>> rows_;
};

}  // namespace tessera::detail
