#include "tessera/tensor/dispatch/execute.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <execinfo.h>

#include <algorithm>

#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/tensor/dispatch/failure.h"
#include "tessera/tensor/dispatch/gathered_parameters.h"
#include "tessera/tensor/dispatch/layout.h"
#include "tessera/tensor/dispatch/no_dispatch.h"
#include "tessera/tensor/dispatch/plan_cache.h"
#include "tessera/tensor/dispatch/promote.h"
#include "tessera/tensor/dispatch/redistribute.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/rank_state.h"

namespace tessera::detail {

namespace {

std::string describe_inputs(const OpCall& call) {
  std::string text;
  for (const TensorInfo& t : call.tensors()) {
    text += concat(text.empty() ? "" : "; ", call.schema().arguments()[t.argument].name(),
                   t.element >= 0 ? concat("[", t.element, "]") : "", " ", t.spec);
  }
  return text;
}

[[noreturn]] void throw_no_rule(const OpCall& call) {
  throw NoRuleError(
      concat("no sharding rule for ", call.name(), " with inputs ", describe_inputs(call),
             ". Either redistribute the inputs to Replicate first (tessera::redistribute), or "
             "register a rule (tessera::register_rule)."));
}

// Below autograd, but on sharded tensors: what a kernel calls on them must not be recorded again.
struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard exclude{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                             c10::autocast_dispatch_keyset};
};

// The way that led here, as a number: the same for every call from one place of the program,
// another one for other places.
std::uint64_t call_site() {
  void* frames[48];
  const int n = ::backtrace(frames, 48);
  Hash hash;
  for (int i = 0; i < n; ++i) hash.number(reinterpret_cast<std::uintptr_t>(frames[i]));
  return hash.value();
}

void check_redistribution_policy(const OpInfo& info, const ReadyPlan& plan,
                                 const c10::IValue* arguments, const MeshContext& context) {
  if (context.state->policies.redistribution == Policy::allow) return;
  std::vector<ImplicitMove> moves;
  for (const auto& move : plan.moves) {
    if (!move.announced) continue;
    const c10::IValue& v = arguments[move.argument];
    const at::Tensor t = move.element < 0 ? v.toTensor() : v.toListRef()[move.element].toTensor();
    moves.push_back(
        {info.op.schema().arguments()[move.argument].name(), move.from, move.to, t.element_size()});
  }
  check_implicit_moves(info.name, moves, context);
}

// The same value without partial axes.
ShardSpec partial_reduced(const ShardSpec& spec) {
  auto placements = spec.placements();
  for (Placement& p : placements) {
    if (p.is_partial()) p = Replicate();
  }
  return spec.with_placements(placements);
}

// `to` is `from` with some of its partial axes reduced.
bool only_reduces(const ShardSpec& from, const ShardSpec& to) {
  auto placements = from.placements();
  for (std::size_t a = 0; a < placements.size(); ++a) {
    if (placements[a].is_partial() && to.placements()[a].is_replicate())
      placements[a] = Replicate();
  }
  return from.with_placements(placements) == to;
}

void reduce_target(const OpInfo& info, const at::Tensor& target, const ShardSpec& from,
                   const ShardSpec& to) {
  const ShardMeta& meta = *meta_of(target);
  if (meta.copy)
    throw ShardingError(concat(info.name, " writes to a view of a partial tensor ", from,
                               " that had to be copied. Redistribute it first."));
  // A copy such as .data shares the meta, and would keep the terms.
  if (target.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr().use_count() > 2) {
    throw ShardingError(
        concat(info.name, " writes to a partial tensor ", from,
               " that another one (.data, detach) is a copy of. Redistribute it first."));
  }
  if (!target.is_inference() && !target.unsafeGetTensorImpl()->unique_version()) {
    throw ShardingError(concat(info.name, " writes to a partial tensor ", from,
                               " that has views or is saved in a graph. Redistribute it first."));
  }
  auto layout = make_layout(to, meta.layout->strides, meta.layout->offset, meta.layout->dtype,
                            meta.layout->device);
  at::Tensor local = aligned(redistribute_local(meta.local, from, to), *layout);
  install(target, std::move(local), std::move(layout));
}

// An intermediate result that had to be reduced is so from now on: what backward saved of it, and
// its next use, need not reduce it again.
void keep_reduced(const at::Tensor& t, const ShardSpec& from, const ShardSpec& to,
                  const at::Tensor& local) {
  if (!from.has_partial() || !(to == partial_reduced(from)) || !t.grad_fn() || t.is_view() ||
      !t.unsafeGetTensorImpl()->unique_version())
    return;
  const ShardMeta& meta = *meta_of(t);
  auto layout = make_layout(to, meta.layout->strides, meta.layout->offset, meta.layout->dtype,
                            meta.layout->device);
  at::Tensor own = aligned(local, *layout);
  install(t, std::move(own), std::move(layout));
}

void add_layout(const c10::IValue& v, std::vector<LayoutPtr>& all) {
  if (!v.isTensor() || !v.toTensor().defined()) return;
  if (const auto* meta = meta_of(v.toTensor())) all.push_back(meta->layout);
}

// Where this rank's part of every result is empty the operator has nothing to compute, and some
// kernels refuse to.
void skip_if_nothing(ReadyPlan& ready) {
  std::vector<LayoutPtr> results;
  for (const ReadyPlan::Output& o : ready.outputs) {
    if (!o.layout || o.layout->spec.local_numel() > 0) return;
    results.push_back(o.layout);
  }
  if (results.empty()) return;
  ready.local = [results = std::move(results)](const c10::OperatorHandle&,
                                               const torch::jit::Stack&) {
    torch::jit::Stack made;
    for (const LayoutPtr& l : results)
      made.emplace_back(
          at::empty(l->spec.local_shape(), at::TensorOptions(l->dtype).device(l->device)));
    return made;
  };
}

ReadyPlan make_plan(const OpInfo& info, at::ArrayRef<c10::IValue> arguments, const Scan& scan,
                    bool& asked_for_numbers) {
  ReadyPlan ready;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (info.kinds[i] == OpInfo::Kind::tensor) add_layout(arguments[i], ready.inputs);
    if ((info.kinds[i] == OpInfo::Kind::tensor_list ||
         info.kinds[i] == OpInfo::Kind::optional_tensor_list) &&
        arguments[i].isList()) {
      for (const c10::IValue& v : arguments[i].toListRef()) add_layout(v, ready.inputs);
    }
  }
  if (info.in_place_view) {
    // on the locals it would change shapes that their wrappers still show
    if (!info.functional) throw_no_rule(OpCall(info, arguments));
    ready.mode = ReadyPlan::Mode::by_functional;
    return ready;
  }
  const auto rule = info.rule();
  if (scan.replicated && !(rule && rule->options.for_replicated)) {
    if (info.random && context_of(scan.first->spec())->mesh.layout().size() > 1) {
      // each rank's own generator would give each rank other numbers
      throw_no_rule(OpCall(info, arguments));
    }
    return ready;
  }
  if (info.out_variant && info.functional && !scan.replicated) {
    ready.mode = ReadyPlan::Mode::by_functional;
    return ready;
  }
  const OpCall call(info, arguments);
  if (!rule) throw_no_rule(call);
  Plan plan = rule->rule(call);
  asked_for_numbers = call.asked_for_numbers();
  if (plan.whole) {
    plan.inputs.clear();
    for (const TensorInfo& t : call.tensors())
      plan.inputs.push_back(
          t.spec.with_placements(std::vector<Placement>(t.spec.placements().size())));
  }
  ready.mode = plan.whole ? ReadyPlan::Mode::replicated : ReadyPlan::Mode::ruled;
  ready.arguments = std::move(plan.arguments);
  if (ready.arguments.size() == 1 && ready.arguments[0].second.isIntList())
    ready.local_sizes = ready.arguments[0].second.toIntVector();
  ready.local = std::move(plan.local);
  ready.view_copied = plan.view_copied;
  if (plan.inputs.size() > call.tensors().size())
    throw RuleError(concat("the rule of ", info.name, " plans ", plan.inputs.size(), " inputs of ",
                           call.tensors().size()));
  for (std::size_t i = 0; i < plan.inputs.size(); ++i) {
    const TensorInfo& t = call.tensor(i);
    if (!plan.inputs[i] || *plan.inputs[i] == t.spec) continue;
    if (t.written && !only_reduces(t.spec, *plan.inputs[i])) {
      throw ShardingError(concat(
          info.name, " would change the placement of what it writes to, from ", t.spec, " to ",
          *plan.inputs[i], ". Inputs: ", describe_inputs(call), ". Redistribute it first."));
    }
    const bool announced = !t.parameter && moves_shards(t.spec, *plan.inputs[i]);
    ready.moves.push_back({t.argument, t.element, t.spec, *plan.inputs[i], announced});
    ready.moves_shards |= announced;
  }
  if (plan.whole) return ready;
  if (call.in_place()) {
    // A rule of the functional form says where the result lies; written in place it must lie where
    // the target does.
    const ShardSpec target =
        !plan.inputs.empty() && plan.inputs[0] ? *plan.inputs[0] : call.tensor(0).spec;
    if (!plan.outputs.empty() && plan.outputs[0].spec && !(plan.outputs[0].spec == target)) {
      throw ShardingError(concat(info.name,
                                 " would change the placement of what it writes to, from ",
                                 call.tensor(0).spec, " to ", plan.outputs[0].spec,
                                 ". Inputs: ", describe_inputs(call), ". Redistribute it first."));
    }
    plan.outputs.clear();
  }
  const c10::Device device = scan.first->layout->device;
  const bool stays_parameter =
      scan.first->layout->parameter && (info.view || info.name == "aten::_to_copy");
  std::size_t k = 0;
  for (Plan::Output& out : plan.outputs) {
    ReadyPlan::Output o{nullptr, out.spec, std::move(out.strides)};
    if (out.spec) {
      const auto* inferred = call.outputs();
      if (inferred && k < inferred->size() && (*inferred)[k].defined) {
        const OutputInfo& is = (*inferred)[k];
        // a rule that gives strides as well knows better
        if (is.shape != out.spec.shape() && !o.strides) {
          throw RuleError(concat("the rule of ", info.name, " says that the result has shape ",
                                 list(out.spec.shape()), ", the operator makes ", list(is.shape)));
        }
        o.layout =
            make_layout(out.spec, o.strides ? *o.strides : is.strides, is.offset, is.dtype, device);
        if (stays_parameter) o.layout = as_parameter(o.layout);
      }
    }
    ++k;
    ready.outputs.push_back(std::move(o));
  }
  const bool lists =
      std::any_of(info.returns.begin(), info.returns.end(), [](const auto& r) { return r.list; });
  if (!ready.local && !info.writes && !info.view && !info.random && !lists) skip_if_nothing(ready);
  return ready;
}

// Results of the functional form become the values of the arguments that are written.
void run_by_functional(const OpInfo& info, torch::jit::Stack* stack) {
  const std::size_t n = info.kinds.size(), first = stack->size() - n;
  std::vector<at::Tensor> targets;
  torch::jit::Stack inputs;
  for (std::size_t i = 0; i < n; ++i) {
    if (info.written[i]) targets.push_back((*stack)[first + i].toTensor());
    if (!(info.out_variant && info.written[i])) inputs.push_back((*stack)[first + i]);
  }
  const BelowAutograd guard;
  info.functional->callBoxed(&inputs);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const at::Tensor result = inputs[inputs.size() - targets.size() + i].toTensor();
    const ShardMeta* made = meta_of(result);
    if (info.out_variant && targets[i].sizes() == result.sizes()) {
      targets[i].copy_(result);
    } else if (info.out_variant && targets[i].scalar_type() != result.scalar_type()) {
      throw ShardingError(concat(info.name, ": the result is ", toString(result.scalar_type()),
                                 ", out is ", toString(targets[i].scalar_type())));
    } else {
      install(targets[i], made->local, made->layout, made->copy);
    }
  }
  stack->resize(first);
  for (const at::Tensor& t : targets) stack->emplace_back(t);
}

const at::Tensor* moved_local(const std::vector<std::pair<std::pair<int, int>, at::Tensor>>& moved,
                              int argument, int element) {
  for (const auto& [where, local] : moved) {
    if (where.first == argument && where.second == element) return &local;
  }
  return nullptr;
}

// Everything that the specs alone decide has been decided, and has thrown on every rank or on none.
// What fails from here on may fail on this rank only.
void run_local(const OpInfo& info, ReadyPlan& plan, torch::jit::Stack* stack, std::size_t first,
               const c10::SmallVector<c10::IValue, 2>& targets, const LayoutPtr& like,
               const std::shared_ptr<ViewCopy>& view_copy, bool of_normal);

// What a view that had to gather its base first stands on. `whole` gets the memory order of the
// base, so that views of it have the strides expected.
std::shared_ptr<ViewCopy> make_view_copy(const at::Tensor& base, const ShardSpec& to,
                                         at::Tensor& whole) {
  const ShardMeta& meta = *meta_of(base);
  const auto layout = make_layout(to, meta.layout->strides, meta.layout->offset, meta.layout->dtype,
                                  meta.layout->device);
  whole = layout->dense ? aligned(std::move(whole), *layout) : whole.contiguous();
  auto copy = std::make_shared<ViewCopy>(ViewCopy{whole, to, meta.local, meta.spec(), meta.copy,
                                                  base.unsafeGetTensorImpl()->version_counter()});
  if (copy->version.enabled()) copy->seen = copy->version.current_version();
  return copy;
}

void execute(const OpInfo& info, ReadyPlan& plan, torch::jit::Stack* stack, const Scan& scan) {
  const std::size_t n = info.kinds.size(), first = stack->size() - n;
  c10::IValue* arguments = stack->data() + first;
  MeshContext& context = *context_of(scan.first->spec());
  const auto keep_alive = scan.first->layout;  // the arguments leave the stack
  if (plan.moves_shards) check_redistribution_policy(info, plan, arguments, context);

  // Views of normal tensors are normal ones in inference mode too: autograd keeps a record of them.
  const bool of_normal = info.view && c10::InferenceMode::is_enabled() && arguments[0].isTensor() &&
                         !arguments[0].toTensor().is_inference();
  std::vector<std::pair<std::pair<int, int>, at::Tensor>> moved;
  std::vector<std::pair<at::Tensor, const ReadyPlan::Move*>> reduced;
  std::shared_ptr<ViewCopy> view_copy = info.view ? scan.first->copy : nullptr;
  for (const auto& move : plan.moves) {
    const c10::IValue& v = arguments[move.argument];
    const at::Tensor t = move.element < 0 ? v.toTensor() : v.toListRef()[move.element].toTensor();
    if (info.written[move.argument]) {
      reduce_target(info, t, move.from, move.to);
      continue;
    }
    const ShardMeta& meta = *meta_of(t);
    if (meta.spec() == move.to) {  // written in another argument, and reduced for that
      moved.push_back({{move.argument, move.element}, meta.local});
      continue;
    }
    const auto before = std::find_if(reduced.begin(), reduced.end(), [&](const auto& r) {
      return r.first.is_same(t) && r.second->to == move.to;
    });
    if (before != reduced.end()) {  // one tensor in two arguments
      moved.push_back({{move.argument, move.element},
                       *moved_local(moved, before->second->argument, before->second->element)});
      continue;
    }
    // Laid out in memory as the global tensor is, like every local: kernels and views decide by
    // strides.
    const Layout& l = *meta.layout;
    GatheredParameters* kept = plan.view_copied ? nullptr : GatheredParameters::current();
    at::Tensor local = kept ? kept->find(t, move.to) : at::Tensor();
    if (!local.defined()) {
      local = aligned(redistribute_local(meta.local, move.from, move.to),
                      *make_layout(move.to, l.strides, l.offset, l.dtype, l.device));
      if (kept) kept->add(t, move.to, local);
    }
    if (plan.view_copied && info.view && move.argument == 0)
      view_copy = make_view_copy(t, move.to, local);
    moved.emplace_back(std::pair(move.argument, move.element), std::move(local));
    reduced.emplace_back(t, &move);
  }

  // Targets that may change shape get a fresh alias: the local of the old meta is shared by whoever
  // copied the tensor.
  const bool alias_targets = info.out_variant || info.resizes;
  c10::SmallVector<c10::IValue, 2> targets(info.writes ? n : 0);
  const auto local_of = [&](const at::Tensor& t, int argument, int element) -> at::Tensor {
    const ShardMeta* meta = t.defined() ? meta_of(t) : nullptr;
    if (!meta) return t;
    if (meta->copy) meta->copy->require_fresh(info.name);
    if (info.written[argument] && alias_targets) return meta->local.detach();
    if (const at::Tensor* m = moved_local(moved, argument, element)) return *m;
    return meta->local;
  };
  {
    const LocalCallGuard guard;
    for (std::size_t i = 0; i < n; ++i) {
      c10::IValue& v = arguments[i];
      if (info.writes && info.written[i]) targets[i] = v;
      if (info.kinds[i] == OpInfo::Kind::tensor) {
        if (v.isTensor()) {
          at::Tensor local = local_of(v.toTensor(), static_cast<int>(i), -1);
          v = std::move(local);
        }
      } else if (info.kinds[i] == OpInfo::Kind::tensor_list && v.isList()) {
        c10::List<at::Tensor> list;
        int j = 0;
        for (const c10::IValue& t : v.toListRef())
          list.push_back(local_of(t.toTensor(), static_cast<int>(i), j++));
        v = std::move(list);
      } else if (info.kinds[i] == OpInfo::Kind::optional_tensor_list && v.isList()) {
        c10::List<std::optional<at::Tensor>> list;
        int j = 0;
        for (const c10::IValue& t : v.toListRef()) {
          list.push_back(t.isTensor() ? std::optional<at::Tensor>(
                                            local_of(t.toTensor(), static_cast<int>(i), j))
                                      : std::nullopt);
          ++j;
        }
        v = std::move(list);
      }
    }
  }
  // Not before: an operator may need a tensor reduced in one argument and take it as it is in
  // another.
  for (const auto& [t, move] : reduced)
    keep_reduced(t, move->from, move->to, *moved_local(moved, move->argument, move->element));
  if (plan.mode == ReadyPlan::Mode::replicated) {
    // the same on all ranks, also where it fails
    run_local(info, plan, stack, first, targets, keep_alive, view_copy, of_normal);
  } else {
    try {
      run_local(info, plan, stack, first, targets, keep_alive, view_copy, of_normal);
    } catch (...) {
      rethrow_to_all(info.name, context);
    }
  }
  const auto write_back = [](const c10::IValue& v) {
    const ShardMeta* meta =
        v.isTensor() && v.toTensor().defined() ? meta_of(v.toTensor()) : nullptr;
    if (meta && meta->copy) meta->copy->write_back();
  };
  for (const c10::IValue& target : targets) {
    write_back(target);
    if (target.isTensorList()) {
      for (const c10::IValue& t : target.toListRef()) write_back(t);
    }
  }
}

void run_local(const OpInfo& info, ReadyPlan& plan, torch::jit::Stack* stack, std::size_t first,
               const c10::SmallVector<c10::IValue, 2>& targets, const LayoutPtr& like,
               const std::shared_ptr<ViewCopy>& view_copy, bool of_normal) {
  const std::size_t n = info.kinds.size();
  c10::IValue* arguments = stack->data() + first;
  {
    const LocalCallGuard guard;
    for (const auto& [i, value] : plan.arguments) arguments[i] = value;

    if (plan.local) {
      torch::jit::Stack given(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
      stack->resize(first);
      torch::jit::Stack made = plan.local(info.op, std::move(given));
      stack->insert(stack->end(), std::make_move_iterator(made.begin()),
                    std::make_move_iterator(made.end()));
      if (stack->size() != first + info.returns.size()) {
        throw RuleError(concat("the local function of the rule of ", info.name, " returns ",
                               stack->size() - first, " values, the operator ",
                               info.returns.size()));
      }
    } else {
      if (info.out_variant || info.resizes) {
        // Read back what the call made of the aliases.
        std::vector<std::pair<at::Tensor, at::Tensor>> aliases;
        for (std::size_t i = 0; i < n; ++i) {
          if (info.written[i] && targets[i].isTensor() && targets[i].toTensor().defined())
            aliases.emplace_back(targets[i].toTensor(), arguments[i].toTensor());
        }
        info.op.callBoxed(stack);
        for (const auto& [target, alias] : aliases) {
          if (meta_of(target))
            install(target, alias, replicated_layout(context_of(like->spec), alias));
        }
      } else {
        info.op.callBoxed(stack);
      }
    }
  }

  std::size_t k = 0;
  const auto wrapped = [&](at::Tensor local, bool view) -> at::Tensor {
    if (!local.defined()) {
      ++k;
      return local;
    }
    if (plan.mode == ReadyPlan::Mode::replicated) {
      if (!view && (local.is_conj() || local.is_neg())) {
        const LocalCallGuard guard;
        local = local.resolve_conj().resolve_neg();
      }
      if (k >= plan.outputs.size()) plan.outputs.resize(k + 1);
      LayoutPtr& known = plan.outputs[k++].layout;
      if (!known || local.sizes() != at::IntArrayRef(known->sizes()) ||
          local.strides() != at::IntArrayRef(known->strides) ||
          local.storage_offset() != known->offset || local.scalar_type() != known->dtype ||
          local.device() != known->device) {
        known = replicated_layout(context_of(like->spec), local);
      }
      at::Tensor t = wrap(std::move(local), known);
      if (view) meta_of(t)->copy = view_copy;
      if (view && of_normal) as_view_of_normal(t);
      return t;
    }
    if (k >= plan.outputs.size())
      throw RuleError(concat("the rule of ", info.name, " plans ", plan.outputs.size(),
                             " outputs, the operator makes more"));
    ReadyPlan::Output& out = plan.outputs[k++];
    if (!out.layout) {
      if (!out.spec)
        throw RuleError(concat("the rule of ", info.name, " gives no spec for result ", k - 1));
      out.layout =
          make_layout(out.spec, out.strides ? *out.strides : contiguous_strides(out.spec.shape()),
                      0, local.scalar_type(), local.device());
    }
    if (!view) return wrap_fresh(std::move(local), out.layout);
    at::Tensor t = wrap(std::move(local), out.layout);
    meta_of(t)->copy = view_copy;
    if (of_normal) as_view_of_normal(t);
    return t;
  };
  for (std::size_t i = 0; i < info.returns.size(); ++i) {
    c10::IValue& v = (*stack)[stack->size() - info.returns.size() + i];
    const OpInfo::Return& r = info.returns[i];
    if (r.argument >= 0) {
      v = targets[r.argument];
    } else if (r.tensor) {
      if (v.isTensor()) v = wrapped(std::move(v).toTensor(), r.view);
    } else if (r.list) {
      c10::List<at::Tensor> list;
      for (const c10::IValue& t : v.toListRef()) list.push_back(wrapped(t.toTensor(), r.view));
      v = std::move(list);
    }
  }
}

}  // namespace

void check_implicit_moves(const std::string& op, const std::vector<ImplicitMove>& moves,
                          const MeshContext& context) {
  RankState& state = *context.state;
  const std::lock_guard lock(state.mutex);
  if (state.policies.redistribution == Policy::allow) return;
  std::int64_t bytes = 0;
  std::string what;
  for (const ImplicitMove& move : moves) {
    if (!moves_shards(move.from, move.to)) continue;
    bytes += elements_moved(move.from, move.to) * move.element_size;
    what += concat(what.empty() ? "" : "; ", move.name, " from ", move.from, " to ", move.to);
  }
  if (what.empty()) return;
  const std::string text =
      concat(op, " redistributes ", what, ": this rank receives ", bytes, " bytes");
  if (state.policies.redistribution == Policy::error) {
    throw ImplicitRedistributionError(
        text +
        ". Redistribute explicitly before the call, or set Policies::redistribution to allow.");
  }
  if (state.warned.insert(concat(text, ' ', call_site())).second) TORCH_WARN(text);
}

void run_sharded(const OpInfo& info, torch::jit::Stack* stack) {
  const std::size_t n = info.kinds.size();
  c10::IValue* arguments = stack->data() + (stack->size() - n);
  PlanCache& cache = PlanCache::of_thread();
  struct Depth {
    int& depth;
    explicit Depth(int& d) : depth(d) { ++depth; }
    ~Depth() { --depth; }
  } in(cache.depth);

  bool numbers = cache.of(info).numbers;
  Key key;
  Scan scan = make_key(info, arguments, numbers, key);
  if (!scan.first)
    throw ShardingError(concat(info.name, " reached the kernel of sharded tensors without one"));
  if (scan.plain) {
    promote_arguments(info, arguments, context_of(scan.first->spec()), false);
    key.clear();
    scan = make_key(info, arguments, numbers, key);
  }
  auto found = cache.of(info).plans.find(key);
  if (found == cache.of(info).plans.end()) {
    bool asked_for_numbers = false;
    ReadyPlan plan =
        make_plan(info, at::ArrayRef<c10::IValue>(arguments, n), scan, asked_for_numbers);
    if (asked_for_numbers && !numbers) {
      cache.of(info).numbers = true;  // plans found so far do not depend on them
      key.clear();
      make_key(info, arguments, true, key);
    }
    cache.make_room();
    found = cache.of(info).plans.insert_or_assign(key, std::move(plan)).first;
    cache.added();
  }
  // Entries of the map stay where they are while others are added.
  ReadyPlan& plan = found->second;
  if (plan.mode == ReadyPlan::Mode::by_functional) {
    run_by_functional(info, stack);
  } else {
    execute(info, plan, stack, scan);
  }
}

}  // namespace tessera::detail
