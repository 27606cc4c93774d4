#pragma once
// One convolution of a field that is cut in space, made ready to run on this rank: below autograd, on locals.

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "tessera/ops/halo.h"
#include "tessera/partition/window_call.h"
#include "tessera/tensor/halo_policy.h"
#include "tessera/tensor/spec.h"

namespace tessera::detail {

struct ConvolutionArguments {
  std::vector<Window> windows;  // one a spatial dim
  std::vector<std::int64_t> output_padding;
  bool transposed = false;
  std::int64_t groups = 1;  // on this rank
};

class ConvolutionHalo {
 public:
  /// x: N x Cin x spatial, y: N x Cout x spatial; samples and channels of either may be cut too, spatial dims over the same axes in both. `backward`:
  /// prepares for backward() instead of forward(). Collective over the mesh.
  ConvolutionHalo(ConvolutionArguments arguments, ShardSpec x, ShardSpec y, bool backward);

  at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);
  /// Gradients of input, weight and bias, of those in the mask; the latter two are this rank's terms.
  std::array<at::Tensor, 3> backward(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight, std::array<bool, 3> mask);

 private:
  struct Dim {
    Window window;
    bool cut;
    std::int64_t in_extent, out_extent;
    Interval in, out;  // this rank's
  };
  /// An operator's call: a box of inputs, a box of outputs, padding a dim.
  struct Call {
    Box in, out;
    std::vector<std::int64_t> padding, output_padding;
  };

  HaloPolicy policy() const;
  bool interior_first(HaloPolicy::Order order) const;
  Call whole_dims() const;
  Call forward_call(const Box& outputs) const;
  Call backward_call(const Box& inputs) const;
  std::optional<Call> aligned() const;
  Box spatial(const Box& box) const { return Box(box.begin() + 2, box.end()); }
  at::Tensor convolve(const Call& call, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) const;
  std::array<at::Tensor, 3> gradients(const Call& call, const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
                                      std::array<bool, 3> mask) const;
  at::Tensor compute(HaloRequest& request, const Box& outputs, const at::Tensor& weight, const std::optional<at::Tensor>& bias) const;
  std::array<at::Tensor, 3> backward_by_sum(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight, std::array<bool, 3> mask);
  NeededBox needed_inputs() const;
  NeededBox needed_gradients() const;

  ConvolutionArguments arguments_;
  ShardSpec x_, y_;
  std::vector<Dim> dims_;
  std::vector<std::int64_t> stride_, dilation_;
  Box in_, out_;                 // this rank's, all dims
  std::optional<Call> aligned_;  // the operator on this rank's inputs alone, computing its outputs
  Box interior_;                 // outputs that the aligned call gets right
  Halo inputs_, gradients_;      // inputs_ in backward: made when first asked for
};

}  // namespace tessera::detail
