// Gradients of interpolation that are called directly, of images [samples, channels, ...] or
// [channels, ...]; interpolation above autograd (interpolation.cpp) has gradients of its own.

#include <vector>

#include "tessera/base/text.h"
#include "tessera/ops/rules/detail/empty_shards.h"
#include "tessera/ops/rules/detail/labels.h"
#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail::upsample_backward_rules {

namespace {

// The size of the input is an argument.
template <int inner>
Plan upsample_backward(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  Shape size = call.integers("input_size");
  LabelProblem p(call);
  p.inputs = {last_dims_unsharded(n, inner)};
  p.outputs = p.inputs;
  p.output_shapes = {size};
  Plan plan = solve(p);
  for (int d = 0; d < n - inner; ++d) size[d] = plan.inputs[0]->local_shape()[d];
  plan.arguments = {{call.argument("input_size"), c10::IValue(c10::List<std::int64_t>(size))}};
  plan.outputs[0].strides = std::nullopt;
  return plan;
}

const AtStart registered([] {
  for (const char* op : {"upsample_nearest1d_backward", "_upsample_nearest_exact1d_backward",
                         "upsample_linear1d_backward"})
    register_rule(concat("aten::", op), guarded(upsample_backward<1>));
  for (const char* op : {"upsample_nearest2d_backward", "_upsample_nearest_exact2d_backward",
                         "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
                         "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward",
                         "_upsample_lanczos2d_aa_backward"})
    register_rule(concat("aten::", op), guarded(upsample_backward<2>));
  for (const char* op : {"upsample_nearest3d_backward", "_upsample_nearest_exact3d_backward",
                         "upsample_trilinear3d_backward"})
    register_rule(concat("aten::", op), guarded(upsample_backward<3>));
});

}  // namespace

}  // namespace tessera::detail::upsample_backward_rules
