#include <ATen/TensorOperators.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/base/internal/vector.h"
#include "tessera/comm/job/internal/failures.h"
#include "tessera/ops/matmul/detail/contract.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/sharded_call.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The input that several layers share: one gathered copy of it. The graph of the layers owns it, so
// that nothing outlives them.
struct SharedInput {
  int layers = 0, done = 0;
  /// The backward that `done` and `backward` belong to: what an exception left of another one is
  /// not used.
  int task = -1;
  /// For the layers that run forward one after the other, until something else is gathered.
  at::Tensor forward;
  /// Gathered by the first of them that runs backward, kept for the others.
  at::Tensor backward;
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

// What was gathered last on this thread, kept until something else is, or until backward: if it
// went with the graph, a rank that keeps a result longer than the others would gather less often.
struct LastGathered {
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> of;
  std::uint32_t version = 0;
  std::uint64_t failures = 0;  // since one, another rank may not have gathered it
  std::optional<Weak<NodePointer>> node;
  /// Of the node that gathered it. Backward goes by these numbers.
  std::uint64_t sequence = 0;
  std::shared_ptr<SharedInput> shared;

  static LastGathered& of_thread() {
    static thread_local LastGathered last;
    return last;
  }
  static void clear() {
    LastGathered& last = of_thread();
    if (last.shared) last.shared->forward.reset();
    last = {};
  }
};

LayoutPtr layout_of(const at::Tensor& x, const ShardSpec& to) {
  const Layout& layout = *meta_of(x)->layout;
  return make_layout(to, layout.dtype, layout.device);
}

struct Gathered {
  at::Tensor value;
  std::shared_ptr<SharedInput> shared;
};

// A copy that was gathered before as a result of x, for a graph of its own.
struct GatheredAgain : torch::autograd::Function<GatheredAgain> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const ShardSpec& to,
                            const std::shared_ptr<SharedInput>& shared) {
    carry(ctx, gradient_spec(spec(x)));
    ctx->set_materialize_grads(false);
    return wrap(shared->forward, layout_of(x, to));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    variable_list gradients(3);
    if (!g[0].defined()) return gradients;
    const ShardSpec of_input = carried(ctx);
    gradients[0] = redistribute(sharded_gradient(g[0], of_input), of_input);
    return gradients;
  }
};

// The gathered copy of x that the layer before this one used, as a tensor of the same graph while
// that is there.
std::optional<Gathered> gathered_before(const at::Tensor& x, const ShardSpec& to) {
  LastGathered& last = LastGathered::of_thread();
  const std::shared_ptr<SharedInput> shared = last.shared;
  if (!shared || !shared->forward.defined() || x.is_inference() || !at::GradMode::is_enabled())
    return std::nullopt;
  const auto of = last.of->lock();
  if (of.get() != x.unsafeGetTensorImpl() || last.version != x._version() ||
      last.failures != failures_of(context_of(to)->mesh) ||
      shared->forward.sizes() != at::IntArrayRef(to.local_shape()))
    return std::nullopt;
  if (const NodePointer node = last.node->lock()) {
    at::Tensor again = wrap(shared->forward, layout_of(x, to));
    torch::autograd::impl::set_gradient_edge(again, torch::autograd::Edge(node, 0));
    return Gathered{std::move(again), shared};
  }
  Gathered again{GatheredAgain::apply(x, to, shared), shared};
  if (const NodePointer node = again.value.grad_fn()) {
    // Where a rank keeps the first graph its node is that one: both stand at one place of backward.
    node->set_sequence_nr(last.sequence);
    last.node.emplace(weak(node));
  }
  return again;
}

Gathered gather(const at::Tensor& x, const ShardSpec& to) {
  if (auto before = gathered_before(x, to)) return *before;
  LastGathered::clear();
  // in row-major order, whatever that of x
  const Gathered made{redistribute(x, to).contiguous(), std::make_shared<SharedInput>()};
  if (const NodePointer node = made.value.grad_fn()) {
    LastGathered& last = LastGathered::of_thread();
    last.of.emplace(x.getIntrusivePtr());
    last.version = x._version();
    last.failures = failures_of(context_of(to)->mesh);
    last.node.emplace(weak(node));
    last.sequence = node->sequence_nr();
    last.shared = made.shared;
    made.shared->forward = meta_of(made.value)->local;
  }
  return made;
}

// Of a weight [out, in], or [in, out] if it is transposed.
at::Tensor gradient_of_weight(const at::Tensor& gy, const at::Tensor& x, bool transposed) {
  const std::int64_t n = x.dim();
  if (n == 2) return transposed ? at::mm(x.t(), gy) : at::mm(gy.t(), x);
  const auto of_x = numbers_below(n);
  auto of_g = of_x;
  of_g.back() = n;
  return transposed ? contract(x, gy, of_x, of_g, {n - 1, n})
                    : contract(gy, x, of_g, of_x, {n, n - 1});
}

// A weight [out, in] as linear() takes it, or, transposed, [in, out] as matmul() does.
at::Tensor product(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
                   bool transposed) {
  return transposed ? matmul_of_shards(x, w) : linear_of_shards(x, w, bias);
}

// The layer on a gathered input, that saves the shard in place of it.
struct LinearOfGathered : torch::autograd::Function<LinearOfGathered> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gathered, const at::Tensor& x,
                            const at::Tensor& w, const std::optional<at::Tensor>& bias,
                            bool transposed, const std::shared_ptr<SharedInput>& shared) {
    ctx->save_for_backward({x, w});
    ctx->set_materialize_grads(false);
    carry(ctx, spec(gathered), "gathered");
    carry(ctx, shared, "shared");
    ctx->saved_data["bias"] = bias && bias->defined();
    ctx->saved_data["transposed"] = transposed;
    ++shared->layers;
    const at::Tensor y = product(gathered, w, bias, transposed);
    carry(ctx, gradient_spec(spec(y)));
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    LastGathered::clear();
    variable_list result(6);
    const auto shared = carried<std::shared_ptr<SharedInput>>(ctx, "shared");
    const bool keeps = !at::GradMode::is_enabled();
    const int task = torch::autograd::get_current_graph_task_id();
    if (shared->task != task) {
      shared->backward.reset();
      shared->done = 0;
      shared->task = task;
    }
    if (g[0].defined()) {
      const bool transposed = ctx->saved_data["transposed"].toBool(),
                 for_weight = ctx->needs_input_grad(2);
      const auto saved = ctx->get_saved_variables();
      const at::Tensor &x = saved[0], &w = saved[1];
      const ShardSpec to = carried(ctx, "gathered"), of_result = carried(ctx);
      // under way while the input's gradient is computed
      Pending<at::Tensor> arriving;
      if (for_weight && !(keeps && shared->backward.defined()))
        arriving = keeps ? start_redistribute(x, to) : Pending<at::Tensor>(redistribute(x, to));
      const at::Tensor gy = redistribute(sharded_gradient(g[0], of_result), of_result);
      if (ctx->needs_input_grad(0))
        result[0] = matmul_of_shards(gy, transposed ? w.conj().t() : w.conj());
      if (for_weight) {
        at::Tensor whole = keeps ? shared->backward : at::Tensor();
        if (!whole.defined()) whole = arriving.wait();
        result[2] = gradient_of_weight(gy, whole.conj(), transposed);
        if (keeps) shared->backward = std::move(whole);
      }
      if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(3))
        result[3] = gy.sum(numbers_below(gy.dim() - 1));
    }
    if (keeps && ++shared->done >= shared->layers) {
      shared->backward.reset();
      shared->done = 0;
    }
    return result;
  }
};

// What the layer above leaves Partial over the axis is reduced once: the weight's gradient, the
// input's and whatever else the result was added to need it so.
at::Tensor reduced_gradient(const at::Tensor& gradient, int axis) {
  const ShardMeta* meta = gradient.defined() ? meta_of(gradient) : nullptr;
  if (!meta || axis >= meta->spec().mesh_dims() || !meta->spec().placements()[axis].is_partial())
    return {};
  if (!at::GradMode::is_enabled() && reduce_intermediate(gradient)) return gradient;
  return redistribute(gradient, meta->spec().with_placement(axis, Replicate()));
}

// A row layer of a tensor-parallel plan whose data are replicated between layers.
std::optional<at::Tensor> between_replicated(const at::Tensor& x, const at::Tensor& w,
                                             const std::optional<at::Tensor>& bias, bool transposed,
                                             int axis) {
  const int out = transposed ? 1 : 0;
  if (!meta_of(w)->spec().placements()[axis].is_shard(1 - out) ||
      !meta_of(x)->spec().placements()[axis].is_shard(static_cast<int>(x.dim()) - 1))
    return std::nullopt;
  at::Tensor y = product(x, w, bias, transposed);
  if (y.requires_grad())
    y.register_hook([axis](const at::Tensor& g) { return reduced_gradient(g, axis); });
  return y;
}

}  // namespace

std::optional<at::Tensor> sequence_linear(const at::Tensor& x, const at::Tensor& w,
                                          const std::optional<at::Tensor>& bias, bool transposed) {
  const ShardMeta* weight = meta_of(w);
  if (!weight || !weight->layout->sequence || w.dim() != 2) return std::nullopt;
  const SequenceSharding where = weight->layout->sequence;
  const ShardMeta* data = meta_of(x);
  if (!data || context_of(data->spec()) != context_of(weight->spec()) || where.dim + 1 >= x.dim())
    return std::nullopt;
  if (where.dim < 0) return between_replicated(x, w, bias, transposed, where.axis);
  const Placement of_weight = weight->spec().placements()[where.axis],
                  of_data = data->spec().placements()[where.axis];
  const int out = transposed ? 1 : 0;
  if (of_weight.is_shard(out) && of_data.is_shard(where.dim)) {
    const Gathered in = gather(x, data->spec().with_placement(where.axis, Replicate()));
    return LinearOfGathered::apply(in.value, x, w, bias, transposed, in.shared);
  }
  LastGathered::clear();
  if (of_weight.is_shard(1 - out) && of_data.is_shard(static_cast<int>(x.dim()) - 1)) {
    at::Tensor y = product(x, w, bias, transposed);
    const ShardSpec made = spec(y);
    if (!made.placements()[where.axis].is_partial()) return y;
    return redistribute(y, made.with_placement(where.axis, Shard(where.dim)));
  }
  return std::nullopt;
}

}  // namespace tessera::detail
