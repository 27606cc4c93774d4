#include "tessera/ops/spatial/detail/convolution_halo.h"

#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {
namespace {

// The gradient of a bias: everything but channels is summed.
at::Tensor bias_gradient(const at::Tensor& gradient) {
  auto dims = numbers_below(gradient.dim());
  dims.erase(dims.begin() + 1);
  return gradient.sum(dims);
}

}  // namespace

ConvolutionHalo::ConvolutionHalo(ConvolutionArguments arguments, ShardSpec x, ShardSpec y,
                                 bool backward)
    : arguments_(std::move(arguments)), x_(std::move(x)), y_(std::move(y)) {
  const int position = context_of(x_)->position;
  in_ = x_.sharding().box(position);
  out_ = y_.sharding().box(position);
  interior_ = out_;
  for (int d = 2; d < x_.dims(); ++d) {
    const Window& w = arguments_.windows[d - 2];
    dims_.push_back({w, is_distributed(x_, d), x_.shape()[d], y_.shape()[d]});
    if (dims_.back().distributed)
      interior_[d] = interior(w, in_[d], out_[d], x_.shape()[d], arguments_.transposed);
    stride_.push_back(w.stride);
    dilation_.push_back(w.dilation);
  }
  aligned_ = aligned();
  (backward ? gradients_ : inputs_) = halo_of(backward);
  if (aligned_) find_strips(backward);
}

void ConvolutionHalo::find_strips(bool backward) {
  const auto spatial = [](const Box& box) { return Box(box.begin() + 2, box.end()); };
  // The window relates A, a convolution's outputs and a transposed one's inputs, to B.
  const bool halo_is_a = backward != arguments_.transposed;
  const Box own = spatial(backward ? in_ : out_);
  Box needed = backward ? gradients_.needed() : inputs_.needed();
  for (std::size_t i = 0; i < dims_.size(); ++i)
    needed[i + 2] =
        intersect(needed[i + 2], {0, backward ? dims_[i].out_extent : dims_[i].in_extent});
  for (const Box& box : difference(needed, backward ? out_ : in_)) {
    Strip strip{
        box,
        TapSum(arguments_.windows, halo_is_a ? spatial(box) : own, halo_is_a ? own : spatial(box)),
        {},
        {},
        {}};
    tap_work_ += strip.taps.pairs() * in_[0].size() * in_[1].size() * out_[1].size() /
                 arguments_.groups * (backward ? 2 : 1);
    if (backward) {
      strip.own = in_;
      for (std::size_t i = 0; i < dims_.size(); ++i) {
        const Window& w = dims_[i].window;
        if (dims_[i].distributed)
          strip.own[i + 2] =
              intersect(in_[i + 2], arguments_.transposed ? w.transposed_inputs(box[i + 2])
                                                          : w.inputs(box[i + 2]));
      }
      if (volume(strip.own) == 0) continue;
      strip.call = backward_call(strip.own);
      strip.inside = intersect(box, strip.call.out);
      if (volume(strip.inside) == 0) continue;
    }
    halo_.push_back(std::move(strip));
  }
  if (backward) return;
  for (const Box& box : difference(out_, interior_))
    outer_.push_back({box, {}, {}, {}, forward_call(box)});
}

// A few multiplications take less time than the setup of an operator's call; from some number on
// its kernels are faster.
bool ConvolutionHalo::by_taps(const at::Tensor& x, const at::Tensor& weight) const {
  constexpr std::int64_t kMost = 1 << 18;
  return aligned_ && tap_work_ <= kMost && TapSum::takes(x) &&
         weight.scalar_type() == x.scalar_type() && x.numel() > 0 && weight.numel() > 0;
}

// The inputs that a rank's outputs read or, for backward, the outputs to which its inputs
// contribute.
Halo ConvolutionHalo::halo_of(bool backward) const {
  const bool by_window = backward == arguments_.transposed;
  return halo_of_windows(backward ? y_ : x_, backward ? x_ : y_, dims_.size(),
                         [dims = dims_, backward, by_window](std::size_t i, const Interval& own) {
                           const Dim& d = dims[i];
                           const Interval all{0, backward ? d.out_extent : d.in_extent};
                           if (!d.distributed) return all;
                           const Interval read =
                               by_window ? d.window.inputs(own) : d.window.transposed_inputs(own);
                           return backward ? intersect(read, all) : read;
                         });
}

ConvolutionHalo::Call ConvolutionHalo::whole_dims() const {
  Call call{in_, out_, {}, {}};
  for (std::size_t i = 0; i < dims_.size(); ++i) {
    call.padding.push_back(dims_[i].window.padding);
    call.output_padding.push_back(arguments_.transposed ? arguments_.output_padding[i] : 0);
  }
  return call;
}

ConvolutionHalo::Call ConvolutionHalo::call_for(const Box& box,
                                                BoxCall (*of_dim)(const Window&, Interval,
                                                                  bool)) const {
  Call call = whole_dims();
  for (std::size_t i = 0; i < dims_.size(); ++i) {
    if (!dims_[i].distributed) continue;
    const BoxCall one = of_dim(dims_[i].window, box[i + 2], arguments_.transposed);
    call.in[i + 2] = one.inputs;
    call.out[i + 2] = one.outputs;
    call.padding[i] = one.padding;
    call.output_padding[i] = 0;
  }
  return call;
}

std::optional<ConvolutionHalo::Call> ConvolutionHalo::aligned() const {
  if (volume(in_) == 0 || volume(out_) == 0) return std::nullopt;
  Call call = whole_dims();
  for (std::size_t i = 0; i < dims_.size(); ++i) {
    const Dim& d = dims_[i];
    if (!d.distributed) continue;
    const auto one = aligned_call(d.window, in_[i + 2], out_[i + 2], arguments_.transposed);
    if (!one) return std::nullopt;
    call.padding[i] = one->padding;
    call.output_padding[i] = one->output_padding;
  }
  return call;
}

at::Tensor ConvolutionHalo::convolve(const Call& call, const at::Tensor& x,
                                     const at::Tensor& weight,
                                     const std::optional<at::Tensor>& bias) const {
  if (x.numel() > 0 && weight.numel() > 0) {
    return at::convolution(x, weight, bias, stride_, call.padding, dilation_, arguments_.transposed,
                           call.output_padding, arguments_.groups);
  }
  // No samples, or channels that are on other ranks.
  const at::Tensor y = at::zeros(shape_of(call.out), x.options());
  return bias && bias->defined() ? y.add_(as_dim(*bias, 1, y.dim())) : y;
}

std::array<at::Tensor, 3> ConvolutionHalo::gradients(const Call& call, const at::Tensor& gradient,
                                                     const at::Tensor& x, const at::Tensor& weight,
                                                     std::array<bool, 3> mask) const {
  std::array<at::Tensor, 3> result;
  if (gradient.numel() > 0 && x.numel() > 0 && weight.numel() > 0) {
    const std::vector<std::int64_t> bias{gradient.size(1)};
    // With one spatial dim libtorch takes one channel in another order for channels-last, and then
    // refuses the gradient that it has made itself.
    const bool one_dim = arguments_.transposed && weight.dim() == 3;
    std::tie(result[0], result[1], result[2]) = at::convolution_backward(
        gradient, one_dim ? x.contiguous() : x, one_dim ? weight.contiguous() : weight,
        mask[2] ? at::OptionalIntArrayRef(bias) : std::nullopt, stride_, call.padding, dilation_,
        arguments_.transposed, call.output_padding, arguments_.groups, mask);
    return result;
  }
  if (mask[0]) result[0] = at::zeros_like(x, at::MemoryFormat::Contiguous);
  if (mask[1]) result[1] = at::zeros_like(weight, at::MemoryFormat::Contiguous);
  if (mask[2]) result[2] = bias_gradient(gradient);
  return result;
}

at::Tensor ConvolutionHalo::forward(const at::Tensor& x, const at::Tensor& weight,
                                    const std::optional<at::Tensor>& bias) {
  const HaloPolicy::Order order = context_of(x_)->state->halo_policy.load().order;
  const bool splits = interior_first(order, volume(in_), HaloPolicy::kInteriorElements);
  HaloValues values = inputs_.start_exchange(x);
  if (volume(out_) == 0) return at::zeros(shape_of(out_), x.options());
  // Without a halo to wait for, the call on the shard alone computes everything.
  const bool complete = aligned_ && interior_ == out_;
  const bool taps = order != HaloPolicy::Order::assemble && by_taps(x, weight);
  // Given outputs of this rank, once the halo is there.
  const auto compute = [&](const Box& outputs, const Call& call) {
    return slice(convolve(call, values.assemble(call.in), weight, bias), call.out, outputs);
  };
  if (!complete && !taps && !(aligned_ && volume(interior_) > 0 && splits))
    return compute(out_, forward_call(out_));
  if (order == HaloPolicy::Order::wait_first) values.arrival().wait();
  at::Tensor y = convolve(*aligned_, x, weight, bias);
  if (complete) return y;
  if (taps) {
    for (const Strip& strip : halo_)
      strip.taps.to_values(y, values.assemble(strip.box), weight, arguments_.groups,
                           !arguments_.transposed);
    return y;
  }
  for (const Strip& strip : outer_) slice(y, out_, strip.box).copy_(compute(strip.box, strip.call));
  return y;
}

std::array<at::Tensor, 3> ConvolutionHalo::backward(const at::Tensor& gradient, const at::Tensor& x,
                                                    const at::Tensor& weight,
                                                    std::array<bool, 3> mask) {
  const HaloPolicy policy = context_of(x_)->state->halo_policy;
  const bool splits = interior_first(policy.order, volume(in_), HaloPolicy::kInteriorElements);
  if (policy.backward == HaloPolicy::Backward::sum)
    return backward_by_sum(gradient, x, weight, mask);
  HaloValues values = gradients_.start_exchange(gradient);
  // If x has no elements: zeros, except for the bias.
  if (volume(in_) == 0) return gradients(whole_dims(), gradient, x, weight, mask);
  const bool complete = aligned_ && gradients_.needed() == out_;
  const bool taps = policy.order != HaloPolicy::Order::assemble && by_taps(x, weight) &&
                    gradient.scalar_type() == x.scalar_type();
  if (!complete && !taps && !(aligned_ && splits)) {
    at::Tensor of_bias = mask[2] ? bias_gradient(gradient) : at::Tensor();
    const Call call = backward_call(in_);
    auto result = gradients(call, values.assemble(call.out), x, weight, {mask[0], mask[1], false});
    result[2] = of_bias;
    return result;
  }
  if (policy.order == HaloPolicy::Order::wait_first) values.arrival().wait();
  auto result = gradients(*aligned_, gradient, x, weight, mask);
  // The outputs of other ranks add to what this rank's own gave: each strip of them to the inputs
  // that contribute to it.
  for (const Strip& strip : halo_) {
    if (taps) {
      const at::Tensor box = values.assemble(strip.box);
      const bool transposed = arguments_.transposed;
      if (mask[0]) strip.taps.to_values(result[0], box, weight, arguments_.groups, transposed);
      if (mask[1])
        strip.taps.to_weight(result[1], transposed ? x : box, transposed ? box : x,
                             arguments_.groups);
      continue;
    }
    const at::Tensor box = embedded(values.assemble(strip.inside), strip.inside, strip.call.out);
    const auto more =
        gradients(strip.call, box, slice(x, in_, strip.own), weight, {mask[0], mask[1], false});
    if (mask[0]) slice(result[0], in_, strip.own).add_(more[0]);
    if (mask[1]) result[1].add_(more[1]);
  }
  return result;
}

std::array<at::Tensor, 3> ConvolutionHalo::backward_by_sum(const at::Tensor& gradient,
                                                           const at::Tensor& x,
                                                           const at::Tensor& weight,
                                                           std::array<bool, 3> mask) {
  if (!inputs_) inputs_ = halo_of(false);
  std::array<at::Tensor, 3> result;
  at::Tensor of_needed = at::zeros(shape_of(inputs_.needed()), x.options());
  HaloValues values = mask[1] ? inputs_.start_exchange(x) : HaloValues();
  if (volume(out_) == 0) {
    result = gradients(whole_dims(), gradient, x, weight, mask);
  } else {
    // The gradients of the box of inputs of given outputs; outputs that the call computes beyond
    // them have none.
    const Call call = forward_call(out_);
    const at::Tensor inputs =
        mask[1] ? values.assemble(call.in) : at::zeros(shape_of(call.in), x.options());
    result = gradients(call, embedded(gradient, out_, call.out), inputs, weight,
                       {mask[0], mask[1], false});
    if (mask[2]) result[2] = bias_gradient(gradient);
    const Box inside = intersect(call.in, inputs_.needed());
    if (mask[0])
      slice(of_needed, inputs_.needed(), inside).copy_(slice(result[0], call.in, inside));
  }
  if (mask[0]) result[0] = inputs_.sum(of_needed);
  return result;
}

}  // namespace tessera::detail
