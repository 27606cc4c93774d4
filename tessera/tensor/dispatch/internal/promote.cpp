#include "tessera/tensor/dispatch/internal/promote.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>

#include "tessera/base/hash.h"
#include "tessera/base/host_lock.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/comm/group/internal/call_origin.h"
#include "tessera/comm/job/internal/failures.h"
#include "tessera/gradient/internal/announce.h"
#include "tessera/tensor/dispatch/detail/promote_view.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/internal/boxes.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Compares a plain tensor over the ranks of a mesh; says what is wrong if their values differ.
// Collective.
std::optional<std::string> differs_by_rank(const at::Tensor& plain, const Group& all) {
  const WithoutHostLock released;
  const auto hashes = agree::all<std::uint64_t>(
      all, "promotion",
      [&] {
        Hash hash;
        hash.number(static_cast<std::uint64_t>(plain.scalar_type()));
        for (const auto n : plain.sizes()) hash.number(static_cast<std::uint64_t>(n));
        const at::Tensor values = plain.cpu().contiguous();
        return hash.bytes(values.const_data_ptr(), values.nbytes()).value();
      },
      {.name = "promotion"});
  for (std::size_t r = 1; r < hashes.size(); ++r) {
    if (hashes[r] == hashes[0]) continue;
    return concat("a plain tensor of shape ", plain.sizes(), " meets sharded ones, but ranks ",
                  all.ranks()[0], " and ", all.ranks()[r],
                  " hold different values: it stands for one replicated value. "
                  "Distribute it (tessera::from_local) or make it the same.");
  }
  return std::nullopt;
}

// A plain tensor stands for the same value on every rank. With CheckLevel::collective this is
// compared.
void require_equal(const at::Tensor& plain, const MeshContext& context) {
  if (context.mesh.mesh().size() < 2) return;
  const Group all = context.mesh.all();
  if (all.check_level() != CheckLevel::collective) return;
  if (const auto differs = differs_by_rank(plain, all)) throw MismatchError(*differs);
}

// True if the elements lie in memory that this thread may read: not those of a tensor of zeros
// without memory, of a meta tensor, or of a wrapper (vmap, fake tensors).
bool readable(const at::Tensor& t) {
  if (t.layout() != c10::kStrided || t.is_quantized() || t.is_nested() || !t.has_storage())
    return false;
  return t.numel() == 0 || t.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
}

// What the operator was given has no meaning: it writes to all elements.
bool overwrites(const OpInfo& info) {
  return info.out_variant || info.name == "aten::copy_" || info.name == "aten::_foreach_copy_";
}

// Policies::plain_values. The ranks agree on what has been compared: it follows from their calls.
void compare_once(const OpInfo& info, const at::Tensor& plain, const MeshContext& context) {
  RankState& state = *context.state;
  Policy policy;
  {
    const std::lock_guard lock(state.mutex);
    policy = state.policies.plain_values;
  }
  const std::vector<int>& ranks = context.mesh.mesh().ranks();
  if (policy == Policy::allow || ranks.size() < 2) return;
  Hash what;
  what.number(static_cast<std::uint64_t>(info.id) << 8 |
              static_cast<std::uint64_t>(plain.scalar_type()));
  Hash any_shape = what;
  const std::uint64_t told = any_shape.text("any shape").value();
  for (const auto n : plain.sizes()) what.number(static_cast<std::uint64_t>(n));
  const std::uint64_t failures = failures_of(context.mesh);
  // Ranks that have been told to differ, in their shapes perhaps, would not go on to compare alike.
  if (state.compared.contains(ranks, failures, told) ||
      state.compared.contains(ranks, failures, what.value()))
    return;
  if (policy == Policy::warn && state.compared.full(ranks, failures)) return;
  const Group all = context.mesh.all();
  if (all.check_level() == CheckLevel::collective || !readable(plain)) return;
  const LocalCallGuard guard;
  const auto origin = std::make_shared<const CallOrigin>(concat("a plain tensor in ", info.name));
  const OriginScope scope(origin);
  const auto differs = differs_by_rank(plain.detach().resolve_conj().resolve_neg(), all);
  if (differs && policy == Policy::error) throw MismatchError(info.name, ": ", *differs);
  state.compared.add(ranks, failures, differs ? told : what.value());
  if (differs && all.rank() == 0) TORCH_WARN(info.name, ": ", *differs);
}

}  // namespace

at::Tensor wrap_plain(const at::Tensor& plain, const std::shared_ptr<MeshContext>& context) {
  if (plain.layout() != c10::kStrided || plain.is_quantized() || plain.is_nested()) {
    throw ShardingError("a ", plain.toString(),
                        " tensor cannot become a replicated ShardTensor: sparse, quantized "
                        "and nested tensors are not supported");
  }
  const LocalCallGuard guard;
  // Backward formulas make zeros without memory, which libtorch's kernels treat in a special way.
  at::Tensor local =
      plain._is_zerotensor() ? at::zeros(plain.sizes(), plain.options()) : plain.detach();
  if (local.is_conj() || local.is_neg()) local = local.resolve_conj().resolve_neg();
  require_equal(local, *context);
  auto layout = replicated_layout(context, local);
  return wrap(std::move(local), std::move(layout));
}

namespace {

// Each is the other's derivative, so that second derivatives exist.
struct Promote : torch::autograd::Function<Promote> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& plain,
                            const std::shared_ptr<MeshContext>& context) {
    ctx->set_materialize_grads(false);  // no gradient stays no gradient, as without promotion
    return wrap_plain(plain, context);
  }
  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    if (const ShardMeta* meta = gradients[0].defined() ? meta_of(gradients[0]) : nullptr)
      announce_gradient(GradientForm::complete, context_of(meta->spec())->mesh.mesh().ranks(),
                        from_sharded);
    return {gradients[0].defined() && meta_of(gradients[0]) ? demote(gradients[0]) : gradients[0],
            at::Tensor()};
  }
};

// libtorch counts references to nodes in one of two ways, depending on its version.
using NodePtr = decltype(torch::autograd::Edge::function);
template <class T>
std::weak_ptr<T> weak(const std::shared_ptr<T>& p) {
  return p;
}
template <class T>
c10::weak_intrusive_ptr<T> weak(const c10::intrusive_ptr<T>& p) {
  return c10::weak_intrusive_ptr<T>(p);
}
using WeakNode = decltype(weak(std::declval<NodePtr>()));

// The nodes that promote, keyed by the node that they lead to: a tensor that is used several times
// is promoted by one node, so that its gradients are summed before they are reduced, once.
class PromotingNodes {
 public:
  static PromotingNodes& of_thread() {
    static thread_local PromotingNodes nodes;
    return nodes;
  }

  NodePtr find(const torch::autograd::Edge& to, const std::shared_ptr<MeshContext>& context) const {
    const auto [begin, end] = nodes_.equal_range(to.function.get());
    for (auto it = begin; it != end; ++it) {
      // keeps the node that it leads to alive, so that its address is not reused
      auto node = it->second.node.lock();
      if (node && node->next_edge(0) == to && it->second.context.lock() == context) return node;
    }
    return {};
  }
  void add(const torch::autograd::Edge& to, const std::shared_ptr<MeshContext>& context,
           const NodePtr& node) {
    if (nodes_.size() >= sweep_at_) {
      std::erase_if(nodes_, [](const auto& entry) { return entry.second.node.expired(); });
      sweep_at_ = 2 * nodes_.size() + 64;
    }
    nodes_.emplace(to.function.get(), Known{context, weak(node)});
  }

 private:
  struct Known {
    std::weak_ptr<MeshContext> context;
    WeakNode node;
  };
  std::unordered_multimap<const torch::autograd::Node*, Known> nodes_;
  std::size_t sweep_at_ = 64;
};

// Hook of a plain tensor that a user's autograd::Function takes together with sharded ones: the
// gradient that its backward returns may be sharded.
struct PlainGradient {
  at::TensorBase operator()(const at::TensorBase& gradient) const {
    return gradient.defined() && meta_of(gradient) ? at::TensorBase(demote(at::Tensor(gradient)))
                                                   : gradient;
  }
};

void keep_gradient_plain(const at::Tensor& plain) {
  if (const auto* meta = torch::autograd::impl::get_autograd_meta(plain);
      meta && meta->cpp_hooks_list_) {
    for (const auto& hook : *meta->cpp_hooks_list_)
      if (hook.target<PlainGradient>()) return;
  }
  static_cast<const at::TensorBase&>(plain).register_hook(PlainGradient());
}

struct Demote : torch::autograd::Function<Demote> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& sharded) {
    const ShardMeta& meta = *meta_of(sharded);
    ctx->set_materialize_grads(false);
    // Backward runs on any thread of the engine.
    carry(ctx, context_of(meta.spec()), "mesh");
    const LocalCallGuard guard;
    const at::Tensor local =
        redistribute_local(on_device(meta), meta.spec(), replicated(meta.spec()));
    return local.is_same(meta.local) ? local.detach() : local;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const at::Tensor& g = gradients[0];
    return {g.defined() && !meta_of(g)
                ? promote(g, carried<std::shared_ptr<MeshContext>>(ctx, "mesh"))
                : g};
  }
};

// What an operator writes beside element `j` of its list `i`: the parameter to which the
// state of an optimizer belongs.
at::Tensor written_beside(const OpInfo& info, const c10::IValue* arguments, std::size_t i,
                          std::size_t j) {
  if (i == 0 || !info.written[i] || !info.written[0] || !arguments[0].isTensorList()) return {};
  const auto first = arguments[0].toListRef();
  return j < first.size() ? first[j].toTensor() : at::Tensor();
}

// A replicated tensor as a shard of it.
at::Tensor placed_as(const at::Tensor& promoted, const ShardSpec& to) {
  const ShardMeta& whole = *meta_of(promoted);
  const LocalCallGuard guard;
  const auto layout = under(*whole.layout, to);
  const at::Tensor shard = redistribute_local(whole.local, whole.spec(), to);
  return wrap(aligned(shard.clone(), *layout), layout);
}

// What was promoted, if it can lie where `beside` does: whole it could not be written to there.
at::Tensor placed_beside(const at::Tensor& promoted, const at::Tensor& beside) {
  const ShardMeta& whole = *meta_of(promoted);
  const ShardMeta* there = beside.defined() ? meta_of(beside) : nullptr;
  if (!there || promoted.grad_fn() || promoted.sizes() != beside.sizes() ||
      there->spec().has_partial() || context_of(there->spec()) != context_of(whole.spec()))
    return promoted;
  return placed_as(promoted, there->spec());
}

// What was promoted, if it has as many rows as those in scope.
at::Tensor placed_in_scope(const at::Tensor& promoted, const at::Tensor& like) {
  if (!like.defined() || promoted.grad_fn()) return promoted;
  const ShardSpec rows = spec_in_scope(context_of(meta_of(promoted)->spec()), promoted.sizes());
  return rows && meta_of(like)->spec().has_shard() ? placed_as(promoted, rows) : promoted;
}

// Converts the caller's own tensor, so that it gets the history of what is written to it. `like`:
// the value that is written, if it is sharded. `beside`: see above.
void promote_target(const at::Tensor& target, const std::shared_ptr<MeshContext>& context,
                    const OpInfo& info, bool above, const at::Tensor& like,
                    const at::Tensor& beside, PromotedTargets& targets) {
  const auto refusal = [&](const char* why) {
    return concat(info.name, " writes a sharded value into a plain tensor ", why,
                  ". Make the target sharded (tessera::distribute_tensor, or distribute_module for "
                  "parameters and buffers) or write to the local tensor.");
  };
  const auto refuse = [&](const char* why) { throw ShardingError(refusal(why)); };
  // Which other tensors use the memory may differ between ranks: the others may have continued.
  const auto refuse_here = [&](const char* why) {
    tell_ranks(info.name, *context, refusal(why));
    refuse(why);
  };
  if (target.is_leaf() && target.requires_grad()) refuse("that is a leaf and requires grad");
  if (target.is_view()) {
    const at::Tensor base(target._base());
    if (base.requires_grad() || meta_of(base))
      refuse("that is a view of one with a history of its own");
    if (base.is_view() || !target.has_storage() || target.storage().use_count() > 2)
      refuse_here("that others are views of too");
    targets.add(base);
    targets.add(target);
    if (!promote_view(target, base, like, context, above))
      refuse("that is a view of another one, and more than a slice of it");
    return;
  }
  // Aliases that autograd knows share the version counter; the outputs of an unsafe_split do not.
  if (!target.is_inference() && !target.unsafeGetTensorImpl()->unique_version())
    refuse_here("that others are views of, or that a graph has saved");
  // Memory that other tensors use without autograd knowing: a kernel's own temporary and a view of
  // it.
  if (!above && target.has_storage() && target.storage().use_count() > 1)
    refuse_here("whose memory others share");
  at::Tensor promoted = placed_beside(promote(target, context), beside);
  if (meta_of(promoted)->spec().is_replicated()) promoted = placed_in_scope(promoted, like);
  targets.add(target);
  target.unsafeGetTensorImpl()->shallow_copy_from(promoted.getIntrusivePtr());
  if (promoted.grad_fn()) torch::autograd::impl::set_gradient_edge(target, {promoted.grad_fn(), 0});
}

// The value that an operator writes to its first argument.
at::Tensor written_value(const OpInfo& info, const c10::IValue* arguments) {
  for (std::size_t i = 1; i < info.kinds.size(); ++i)
    if (info.kinds[i] == OpInfo::Kind::tensor && arguments[i].isTensor() &&
        arguments[i].toTensor().defined() && meta_of(arguments[i].toTensor()))
      return arguments[i].toTensor();
  return {};
}

void apply_policy(const OpInfo& info, const std::shared_ptr<MeshContext>& context,
                  const at::Tensor& plain) {
  RankState& state = *context->state;
  std::unique_lock lock(state.mutex);
  if (state.policies.promotion == Policy::allow) return;
  // libtorch's own formulas make such tensors from numbers.
  if (plain.dim() == 0 && plain.is_cpu() && !plain.requires_grad()) return;
  const std::string text = concat(
      info.name, ": a plain tensor of shape ", plain.sizes(),
      " meets sharded ones; it is taken as replicated, that is, equal on all ranks of the mesh");
  if (state.policies.promotion == Policy::error)
    throw ShardingError(text + ". Distribute it first, or set Policies::promotion to allow.");
  const bool first = state.warned.insert(text).second;
  lock.unlock();  // a user's handler of warnings may come here again
  if (first && context->position == 0) TORCH_WARN(text);
}

}  // namespace

bool is_plain(const at::TensorBase& t) {
  return t.defined() && !meta_of(t) && !t.unsafeGetTensorImpl()->is_wrapped_number();
}

at::Tensor promote(const at::Tensor& plain, const std::shared_ptr<MeshContext>& context) {
  if (!at::GradMode::is_enabled() || !plain.requires_grad()) return Promote::apply(plain, context);
  PromotingNodes& nodes = PromotingNodes::of_thread();
  const auto edge = torch::autograd::impl::gradient_edge(plain);
  if (const auto node = nodes.find(edge, context)) {
    at::Tensor promoted = wrap_plain(plain, context);
    torch::autograd::impl::set_gradient_edge(promoted, {node, 0});
    return promoted;
  }
  at::Tensor promoted = Promote::apply(plain, context);
  // Runs next once it is ready, whatever its age: a rank that keeps an old graph finds an old node
  // where other ranks make a new one, and all must reduce in one order.
  promoted.grad_fn()->set_sequence_nr(UINT64_MAX);
  nodes.add(edge, context, promoted.grad_fn());
  return promoted;
}
at::Tensor demote(const at::Tensor& sharded) { return Demote::apply(sharded); }

bool is_demotion(const torch::autograd::Node& node) {
  return dynamic_cast<const torch::autograd::CppNode<Demote>*>(&node);
}

void PromotedTargets::add(const at::Tensor& target) {
  const c10::TensorImpl& impl = *target.unsafeGetTensorImpl();
  targets_.push_back({target,
                      impl.shallow_copy_and_detach(impl.version_counter(), true),
                      {target.grad_fn(), static_cast<std::uint32_t>(target.output_nr())}});
}

void PromotedTargets::restore() const {
  for (const Target& t : targets_) {
    c10::TensorImpl& impl = *t.tensor.unsafeGetTensorImpl();
    impl.shallow_copy_from(t.before);
    impl.set_backend_meta({});
    if (t.tensor.grad_fn()) torch::autograd::impl::set_gradient_edge(t.tensor, t.history);
  }
}

ShardSpec& rows_in_scope() {
  static thread_local ShardSpec rows;
  return rows;
}

ShardSpec spec_in_scope(const std::shared_ptr<MeshContext>& context, at::IntArrayRef shape) {
  const ShardSpec& rows = rows_in_scope();
  if (!rows || shape.empty() || shape[0] != rows.shape()[0] || context_of(rows) != context)
    return {};
  std::vector<DimSharding> dims(shape.size());
  dims[0] = rows.dim(0);
  return make_spec(context, shape.vec(), rows.placements(), std::move(dims));
}

PromotedTargets promote_arguments(const OpInfo& info, c10::IValue* arguments,
                                  const std::shared_ptr<MeshContext>& context, bool above) {
  PromotedTargets targets;
  const auto promoted = [&](const at::Tensor& t, bool written,
                            const at::Tensor& beside = {}) -> at::Tensor {
    if (!is_plain(t)) return t;
    apply_policy(info, context, t);
    if (!(written && overwrites(info))) compare_once(info, t, *context);
    if (written) {
      promote_target(t, context, info, above, written_value(info, arguments), beside, targets);
      return t;
    }
    // This may be within a user's autograd::Function.
    if (above && t.requires_grad() && !at::GradMode::is_enabled()) keep_gradient_plain(t);
    return above ? promote(t, context) : wrap_plain(t, context);
  };
  after_promotion(targets, [&] {
    for (std::size_t i = 0; i < info.kinds.size(); ++i) {
      c10::IValue& v = arguments[i];
      if (info.kinds[i] == OpInfo::Kind::tensor) {
        if (v.isTensor() && is_plain(v.toTensor())) v = promoted(v.toTensor(), info.written[i]);
      } else if (info.kinds[i] == OpInfo::Kind::tensor_list && v.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& t : v.toTensorVector()) {
          list.push_back(
              promoted(t, info.written[i], written_beside(info, arguments, i, list.size())));
        }
        v = list;
      } else if (info.kinds[i] == OpInfo::Kind::optional_tensor_list && v.isList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const c10::IValue& t : v.toListRef())
          list.push_back(t.isTensor() ? std::optional<at::Tensor>(promoted(t.toTensor(), false))
                                      : std::nullopt);
        v = list;
      }
    }
  });
  return targets;
}

}  // namespace tessera::detail
