#pragma once
// TapSum: the contribution of a few rows to a convolution or to its gradients, summed tap by tap.
// The thin strips of a halo need a few thousand multiplications, less than the overhead of one call
// of libtorch's convolution.
//
// A window relates an index o of one array, A (a convolution's output, a transposed one's input),
// to indices of another, B: i = o * stride - padding + k * dilation for each tap k. The weight is
// [channels of A, channels of B per group, taps].

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

#include "tessera/partition/halo.h"

namespace tessera::detail {

class TapSum {
 public:
  TapSum() = default;
  /// Finds all pairs of an o in `a` and an i in `b`, boxes of one to three spatial dims.
  TapSum(const std::vector<Window>& windows, const Box& a, const Box& b);

  std::int64_t pairs() const { return pairs_; }
  /// True if the functions below can be used with such tensors: plain memory of the CPU, float or
  /// double.
  static bool takes(const at::Tensor& t) {
    return t.device().is_cpu() && (t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble);
  }

  /// a: N x CA x box a, b: N x CB x box b, any strides, one dtype; the shape of `weight` as above.
  /// `to_a`: a[o] += weight[k] * b[i], of to = a and from = b; else b[i] += weight[k] * a[o].
  void to_values(const at::Tensor& to, const at::Tensor& from, const at::Tensor& weight,
                 std::int64_t groups, bool to_a) const;
  /// weight[k] += a[o] * b[i]
  void to_weight(const at::Tensor& weight, const at::Tensor& a, const at::Tensor& b,
                 std::int64_t groups) const;

 private:
  struct Run {
    std::int64_t tap, a, b, count;  // o = a, a + 1, ... in its box, and i = b, b + stride, ...
  };
  template <class Call>
  void with_sides(const at::Tensor& a, const at::Tensor& b, const at::Tensor& weight,
                  std::int64_t groups, const Call& call) const;

  std::array<std::vector<Run>, 3> runs_;  // by loop, the innermost last
  std::array<int, 3> dim_{-1, -1, -1};    // the spatial dim of each loop; -1: none
  std::array<std::int64_t, 3> stride_{1, 1, 1};
  std::int64_t pairs_ = 0;
};

}  // namespace tessera::detail
