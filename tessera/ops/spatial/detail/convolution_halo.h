#pragma once
// ConvolutionHalo: one convolution of a field that is sharded in space, prepared for this rank. It
// runs below autograd on local tensors.

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <vector>

#include "tessera/ops/halo/detail/field_halo.h"
#include "tessera/ops/spatial/detail/tap_sum.h"
#include "tessera/partition/internal/window_call.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

struct ConvolutionArguments {
  std::vector<Window> windows;  // one per spatial dim
  std::vector<std::int64_t> output_padding;
  bool transposed = false;
  std::int64_t groups = 1;  // on this rank
};

class ConvolutionHalo {
 public:
  /// x: N x Cin x spatial, y: N x Cout x spatial; samples and channels of either may be sharded
  /// too, spatial dims over the same axes in both. `backward`: prepares for backward() instead of
  /// forward(). Collective over the mesh.
  ConvolutionHalo(ConvolutionArguments arguments, ShardSpec x, ShardSpec y, bool backward);

  at::Tensor forward(const at::Tensor& x, const at::Tensor& weight,
                     const std::optional<at::Tensor>& bias);
  /// The gradients in the mask of input, weight and bias; those of weight and bias are Partial
  /// sums, of which this is the local tensor.
  std::array<at::Tensor, 3> backward(const at::Tensor& gradient, const at::Tensor& x,
                                     const at::Tensor& weight, std::array<bool, 3> mask);

 private:
  struct Dim {
    Window window;
    bool distributed;
    std::int64_t in_extent, out_extent;
  };
  /// One call of the operator: a box of inputs, a box of outputs, padding per dim.
  struct Call {
    Box in, out;
    std::vector<std::int64_t> padding, output_padding;
  };

  /// A box that other ranks hold and this rank receives, and how its contribution is added to that
  /// of this rank's own values.
  struct Strip {
    Box box;
    TapSum taps;
    // If there are too many taps, by calls of the operator. Forward: the outputs that need the box,
    // computed anew. Backward: the inputs that the box contributes to, none if there are none, and
    // the box that the call takes.
    Box own, inside;
    Call call;
  };

  bool by_taps(const at::Tensor& x, const at::Tensor& weight) const;
  void find_strips(bool backward);
  Call whole_dims() const;
  Call call_for(const Box& box, BoxCall (*of_dim)(const Window&, Interval, bool)) const;
  Call forward_call(const Box& outputs) const { return call_for(outputs, tessera::forward_call); }
  Call backward_call(const Box& inputs) const { return call_for(inputs, tessera::backward_call); }
  std::optional<Call> aligned() const;
  at::Tensor convolve(const Call& call, const at::Tensor& x, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias) const;
  std::array<at::Tensor, 3> gradients(const Call& call, const at::Tensor& gradient,
                                      const at::Tensor& x, const at::Tensor& weight,
                                      std::array<bool, 3> mask) const;
  std::array<at::Tensor, 3> backward_by_sum(const at::Tensor& gradient, const at::Tensor& x,
                                            const at::Tensor& weight, std::array<bool, 3> mask);
  Halo halo_of(bool backward) const;

  ConvolutionArguments arguments_;
  ShardSpec x_, y_;
  std::vector<Dim> dims_;
  std::vector<std::int64_t> stride_, dilation_;
  Box in_, out_;                 // this rank's boxes, all dims
  std::optional<Call> aligned_;  // the operator on this rank's inputs alone, computing its outputs
  Box interior_;                 // outputs that the aligned call computes correctly
  std::vector<Strip> halo_;      // of inputs_ or gradients_
  std::vector<Strip> outer_;     // forward: outputs outside the interior; uses box and call alone
  std::int64_t tap_work_ = 0;    // multiplications of all taps of halo_
  Halo inputs_, gradients_;      // inputs_ in backward: made when first asked for
};

}  // namespace tessera::detail
