#include "tessera/ops/matmul/sequence_linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/ops/matmul/contract.h"
#include "tessera/tensor/dispatch/carry.h"
#include "tessera/tensor/dispatch/layout.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/mesh_context.h"

namespace tessera::detail {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

ShardSpec with_axis(const ShardSpec& spec, int axis, Placement placement) {
  auto placements = spec.placements();
  placements[axis] = placement;
  return spec.with_placements(placements);
}

// The input that several layers share: gathered by the first of them that runs backward, kept for
// the others.
struct SharedInput {
  int layers = 0, done = 0;
  at::Tensor gathered;
};

// A node of a graph is counted by one kind of pointer or another, as libtorch's version has it.
template <class Node>
c10::weak_intrusive_ptr<Node> weak(const c10::intrusive_ptr<Node>& node) {
  return c10::weak_intrusive_ptr<Node>(node);
}
template <class Node>
std::weak_ptr<Node> weak(const std::shared_ptr<Node>& node) {
  return node;
}
template <class Pointer>
using Weak = decltype(weak(std::declval<const Pointer&>()));
using NodePointer = std::remove_cvref_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

// What was gathered last on this thread, until a layer is given something else. The value alone is
// kept: a graph would live on with it.
struct LastGathered {
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> of;
  std::uint32_t version = 0;
  at::Tensor local;
  std::optional<Weak<NodePointer>> node;
  std::shared_ptr<SharedInput> shared;

  static LastGathered& of_thread() {
    static thread_local LastGathered last;
    return last;
  }
  static void clear() { of_thread() = {}; }
};

LayoutPtr layout_of(const at::Tensor& x, const ShardSpec& to) {
  const Layout& layout = *meta_of(x)->layout;
  return make_layout(to, layout.dtype, layout.device);
}

// The gathered copy of x that the layer before this one used, as a tensor of the same graph.
std::optional<at::Tensor> gathered_before(const at::Tensor& x, const ShardSpec& to) {
  const LastGathered& last = LastGathered::of_thread();
  if (!last.local.defined()) return std::nullopt;
  const auto of = last.of->lock();
  if (of.get() != x.unsafeGetTensorImpl() || last.version != x._version() ||
      last.node.has_value() != (at::GradMode::is_enabled() && x.requires_grad()) ||
      last.local.sizes() != at::IntArrayRef(to.local_shape()))
    return std::nullopt;
  const NodePointer node = last.node ? last.node->lock() : NodePointer();
  if (last.node && !node) return std::nullopt;
  at::Tensor again = wrap(last.local, layout_of(x, to));
  if (node) torch::autograd::impl::set_gradient_edge(again, torch::autograd::Edge(node, 0));
  return again;
}

at::Tensor gather(const at::Tensor& x, const ShardSpec& to) {
  LastGathered& last = LastGathered::of_thread();
  if (x.is_inference()) {  // nobody counts the writes to it
    last = {};
    last.shared = std::make_shared<SharedInput>();
    return redistribute(x, to);
  }
  if (auto before = gathered_before(x, to)) return *before;
  last = {};
  // in row-major order, whatever that of x
  const at::Tensor whole = redistribute(x, to).contiguous();
  last.of.emplace(x.getIntrusivePtr());
  last.version = x._version();
  last.local = meta_of(whole)->local;
  if (const NodePointer node = whole.grad_fn()) last.node.emplace(weak(node));
  last.shared = std::make_shared<SharedInput>();
  return whole;
}

at::Tensor gradient_of_weight(const at::Tensor& gy, const at::Tensor& x) {
  const std::int64_t n = x.dim();
  if (n == 2) return at::mm(gy.t(), x);
  std::vector<std::int64_t> of_g, of_x;
  for (std::int64_t d = 0; d + 1 < n; ++d) of_g.push_back(d), of_x.push_back(d);
  of_g.push_back(n);
  of_x.push_back(n - 1);
  return contract(gy, x, of_g, of_x, {n, n - 1});
}

at::Tensor gradient_of_bias(const at::Tensor& gy) {
  std::vector<std::int64_t> rows;
  for (std::int64_t d = 0; d + 1 < gy.dim(); ++d) rows.push_back(d);
  return gy.sum(rows);
}

// linear() of a gathered input that saves the shard in place of it.
struct LinearOfGathered : torch::autograd::Function<LinearOfGathered> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gathered, const at::Tensor& x,
                            const at::Tensor& w, const std::optional<at::Tensor>& bias,
                            const std::shared_ptr<SharedInput>& shared) {
    ctx->save_for_backward({x, w});
    ctx->set_materialize_grads(false);
    carry(ctx, spec(gathered), "gathered");
    ctx->saved_data["shared"] = c10::IValue::make_capsule(c10::make_intrusive<Held>(shared));
    ctx->saved_data["bias"] = bias && bias->defined();
    ++shared->layers;
    const at::Tensor y = linear_of_shards(gathered, w, bias);
    carry(ctx, gradient_spec(spec(y)));
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    LastGathered::clear();
    variable_list result(5);
    if (!g[0].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &w = saved[1];
    const ShardSpec to = carried(ctx, "gathered"), of_result = carried(ctx);
    const auto shared =
        c10::static_intrusive_pointer_cast<Held>(ctx->saved_data["shared"].toCapsule())->shared;
    const bool keeps = !at::GradMode::is_enabled(), for_weight = ctx->needs_input_grad(2);
    // under way while the input's gradient is computed
    Pending<at::Tensor> arriving;
    if (for_weight && !(keeps && shared->gathered.defined()))
      arriving = keeps ? start_redistribute(x, to) : Pending<at::Tensor>(redistribute(x, to));
    const at::Tensor gy = redistribute(sharded_gradient(g[0], of_result), of_result);
    if (ctx->needs_input_grad(0)) result[0] = at::matmul(gy, w.conj());
    if (for_weight) {
      at::Tensor whole = keeps ? shared->gathered : at::Tensor();
      if (!whole.defined()) whole = arriving.wait();
      result[2] = gradient_of_weight(gy, whole.conj());
      if (keeps) shared->gathered = std::move(whole);
    }
    if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(3))
      result[3] = gradient_of_bias(gy);
    if (keeps && ++shared->done >= shared->layers) {
      shared->gathered.reset();
      shared->done = 0;
    }
    return result;
  }

  struct Held : torch::CustomClassHolder {
    explicit Held(std::shared_ptr<SharedInput> s) : shared(std::move(s)) {}
    const std::shared_ptr<SharedInput> shared;
  };
};

}  // namespace

std::optional<at::Tensor> sequence_linear(const at::Tensor& x, const at::Tensor& w,
                                          const std::optional<at::Tensor>& bias) {
  const ShardMeta* weight = meta_of(w);
  if (!weight || !weight->layout->sequence || w.dim() != 2) return std::nullopt;
  const SequenceSharding where = weight->layout->sequence;
  const ShardMeta* data = meta_of(x);
  if (!data || context_of(data->spec()) != context_of(weight->spec()) || where.dim + 1 >= x.dim())
    return std::nullopt;
  const Placement of_weight = weight->spec().placements()[where.axis],
                  of_data = data->spec().placements()[where.axis];
  if (of_weight.is_shard(0) && of_data.is_shard(where.dim)) {
    const ShardSpec to = with_axis(data->spec(), where.axis, Replicate());
    const at::Tensor whole = gather(x, to);
    return LinearOfGathered::apply(whole, x, w, bias, LastGathered::of_thread().shared);
  }
  LastGathered::clear();
  if (of_weight.is_shard(1) && of_data.is_shard(static_cast<int>(x.dim()) - 1)) {
    const at::Tensor y = linear_of_shards(x, w, bias);
    const ShardSpec made = spec(y);
    if (!made.placements()[where.axis].is_partial()) return y;
    return redistribute(y, with_axis(made, where.axis, Shard(where.dim)));
  }
  return std::nullopt;
}

}  // namespace tessera::detail
