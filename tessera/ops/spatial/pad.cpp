// pad in every mode: padding is a halo that exists at the array's edges alone. Each shard keeps its
// elements; the first and the last get the edges. One exchange serves constant (also with negative
// widths, which crop), reflect, replicate and circular; the gradient is its adjoint.

#include <limits>

#include "tessera/ops/halo/halo.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/partition/internal/window_call.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail::pad_rules {
namespace {

struct Padding {
  Padding(const ShardSpec& spec, const std::vector<std::int64_t>& pads, Edge edge_)
      : input(without_partial(spec)), edge(edge_) {
    const int n = input.dims();
    if (pads.size() % 2 != 0 || static_cast<int>(pads.size() / 2) > n)
      throw ShardingError("pad of ", list(pads), " for a tensor of ", n,
                          " dims: give two numbers per dim, from the last dim on");
    before.assign(n, 0);
    std::vector<std::int64_t> shape = input.shape();
    std::vector<std::pair<int, Partition>> parts;
    for (std::size_t i = 0; i < pads.size() / 2; ++i) {
      const int d = n - 1 - static_cast<int>(i);
      const std::int64_t first = pads[2 * i], last = pads[2 * i + 1], size = shape[d];
      const std::int64_t limit = edge == Edge::reflect    ? size - 1
                                 : edge == Edge::circular ? size
                                                          : std::max(first, last);
      if (size + first + last < 0 || first > limit || last > limit ||
          (edge == Edge::replicate && size == 0 && first + last > 0))
        throw ShardingError(
            "pad of ", first, " and ", last, " in dim ", d, " of a tensor of shape ", list(shape),
            edge == Edge::zero ? ": nothing would be left"
                               : ": it reaches beyond what there is to take values from");
      before[d] = first;
      shape[d] = size + first + last;
      padded |= (first != 0 || last != 0) && is_distributed(input, d);
      if (input.is_sharded(d))
        parts.emplace_back(d, output_partition(input.dim(d).partition, {1, 1, first, 1}, shape[d]));
    }
    output = mapped_spec(input, shape, all_labels(n), false, parts);
  }

  Halo halo() const {
    return Halo(input, std::vector<Edge>(input.dims(), edge),
                [before = before, to = output.sharding()](int position) {
                  Box box = to.box(position);
                  for (std::size_t d = 0; d < box.size(); ++d) box[d] = box[d].shifted(-before[d]);
                  return box;
                });
  }

  ShardSpec input, output;
  Edge edge;
  std::vector<std::int64_t> before;
  bool padded = false;  // in a dim that is sharded
};

Plan constant(const OpCall& call) {
  const TensorInfo& x = call.tensor(0);
  const Padding p(x.spec, call.integers("pad"), Edge::zero);
  Plan plan{.inputs = {p.input}, .outputs = {{p.output}}};
  if (!p.padded) return plan;
  plan.local = [halo = p.halo(), shape = p.input.shape()](const OperatorHandle&, Stack arguments) {
    const at::Tensor y = halo.exchange(arguments[0].toTensor());
    const c10::Scalar value = arguments[2].toScalar();
    if (!value.equal(0)) {
      Box inside(shape.size());
      for (std::size_t d = 0; d < shape.size(); ++d) inside[d] = {0, shape[d]};
      for (const Box& strip : difference(halo.needed(), inside))
        slice(y, halo.needed(), strip).fill_(value);
    }
    return Stack{y};
  };
  return plan;
}

template <Edge edge>
Plan continued(const OpCall& call) {
  if (const auto type = call.find("self")->dtype; type == at::kBool)
    throw InvalidArgument(call.name(), " of ", c10::toString(type), " values: convert them");
  const Padding p(call.find("self")->spec, call.integers("padding"), edge);
  Plan plan{.inputs = {p.input}, .outputs = {{p.output}}};
  if (p.padded || p.output.local_numel() == 0)
    plan.local = [halo = p.halo()](const OperatorHandle&, Stack arguments) {
      return Stack{halo.exchange(arguments[0].toTensor())};
    };
  return plan;
}

template <Edge edge>
Plan continued_backward(const OpCall& call) {
  const TensorInfo &g = *call.find("grad_output"), &x = *call.find("self");
  const Padding p(x.spec, call.integers("padding"), edge);
  Plan plan;
  plan.inputs.resize(2);
  plan.inputs[call.index_of(g)] = p.output;
  plan.inputs[call.index_of(x)] = p.input;
  plan.outputs = {{p.input, x.strides}};
  if (p.padded || p.output.local_numel() == 0)
    plan.local = [halo = p.halo()](const OperatorHandle&, Stack arguments) {
      return Stack{halo.sum(arguments[0].toTensor())};
    };
  return plan;
}

// For plain tensors libtorch writes to slices; here it is a halo around the global field, wrapped
// again.
at::Tensor circular(const at::Tensor& self, c10::SymIntArrayRef pad) {
  std::vector<std::int64_t> pads;
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();  // no sum overflows
  for (const auto& n : pad) {
    pads.push_back(n.expect_int());
    if (pads.back() > most || pads.back() < -most)
      throw InvalidArgument("circular pad of ", pads.back(), "; at most ", most);
  }
  at::Tensor x = self;
  for (std::size_t i = 0; i < pads.size() / 2 && static_cast<std::int64_t>(i) < self.dim(); ++i) {
    const std::int64_t dim = self.dim() - 1 - static_cast<std::int64_t>(i);
    if (self.size(dim) + pads[2 * i] + pads[2 * i + 1] < 0)
      throw InvalidArgument("circular pad of ", pads[2 * i], " and ", pads[2 * i + 1], " in dim ",
                            dim, " of a tensor of shape ", self.sizes(),
                            ": it crops more than there is");
  }
  // What a negative width crops does not come back around: the rest is continued.
  for (std::size_t i = 0; i + 1 < pads.size(); i += 2) {
    const std::int64_t dim = self.dim() - 1 - static_cast<std::int64_t>(i / 2),
                       before = std::max<std::int64_t>(-pads[i], 0),
                       after = std::max<std::int64_t>(-pads[i + 1], 0);
    if (before + after > 0) x = x.slice(dim, before, x.size(dim) - after);
    pads[i] = std::max<std::int64_t>(pads[i], 0);
    pads[i + 1] = std::max<std::int64_t>(pads[i + 1], 0);
  }
  const Padding p(spec(x), pads, Edge::circular);
  return from_local(halo_exchange(x, p.halo()), p.output);
}

const AtStart registered([] {
  register_rule("aten::constant_pad_nd", constant);
  for (const char* dims : {"1d", "2d", "3d"}) {
    register_rule(concat("aten::reflection_pad", dims), continued<Edge::reflect>);
    register_rule(concat("aten::reflection_pad", dims, "_backward"),
                  continued_backward<Edge::reflect>);
    register_rule(concat("aten::replication_pad", dims), continued<Edge::replicate>);
    register_rule(concat("aten::replication_pad", dims, "_backward"),
                  continued_backward<Edge::replicate>);
  }
  register_decomposition("_pad_circular", circular);
});

}  // namespace
}  // namespace tessera::detail::pad_rules
