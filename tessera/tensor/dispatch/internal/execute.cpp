#include "tessera/tensor/dispatch/internal/dispatch.h"

#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <execinfo.h>

#include <optional>

#include "tessera/base/hash.h"
#include "tessera/base/host_lock.h"
#include "tessera/base/text.h"
#include "tessera/tensor/dispatch/detail/make_plan.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/plan_cache.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"
#include "tessera/tensor/dispatch/internal/sharded_call.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {
namespace {

// The call stack as a number: the same for every call from one place of the program, another one
// for other places.
std::uint64_t call_site() {
  void* frames[48];
  const int n = ::backtrace(frames, 48);
  Hash hash;
  for (int i = 0; i < n; ++i) hash.number(reinterpret_cast<std::uintptr_t>(frames[i]));
  return hash.value();
}

bool runs_composed(const OpInfo& info, const Scan& scan, PlanCache& cache) {
  const Layout& first = *scan.first->layout;
  const at::DeviceType device = first.device.is_meta() ? at::kCPU : first.device.type();
  if (scan.replicated || !at::autocast::is_autocast_enabled(device)) return false;
  std::optional<bool>& composed = cache.of(info).composed;
  if (!composed) {
    const auto rule = info.rule();
    composed = rule && rule->options.composed;
  }
  return *composed;
}

// The kernel of the device, which calls other operators, on the sharded tensors.
void run_composed(const OpInfo& info, const Scan& scan, torch::jit::Stack* stack) {
  const LayoutPtr first = scan.first->layout;  // the arguments leave the stack
  const BelowAutogradGuard guard;
  const auto backend = first->device.is_meta()
                           ? c10::DispatchKey::CPU
                           : c10::computeDispatchKey(at::kFloat, at::kStrided, first->device);
  info.op.redispatchBoxed(c10::DispatchKeySet(backend), stack);
  // Of tensors without elements a kernel may make its result by itself.
  for (std::size_t i = stack->size() - info.returns.size(); i < stack->size(); ++i) {
    c10::IValue& v = (*stack)[i];
    if (!v.isTensor() || !v.toTensor().defined() || meta_of(v.toTensor())) continue;
    const at::Tensor made = v.toTensor();
    v = wrap_fresh(made, replicated_layout(context_of(first->spec), made));
  }
}

}  // namespace

void check_implicit_moves(const std::string& op, const std::vector<ImplicitMove>& moves,
                          const MeshContext& context) {
  RankState& state = *context.state;
  std::unique_lock lock(state.mutex);
  if (state.policies.redistribution == Policy::allow) return;
  std::int64_t bytes = 0;
  std::string what;
  for (const ImplicitMove& move : moves) {
    if (!moves_shards(move.from, move.to)) continue;
    bytes += elements_moved(move.from, move.to) * move.element_size;
    what += concat(what.empty() ? "" : "; ", move.name, " from ", move.from, " to ", move.to);
  }
  if (what.empty()) return;
  const char* hint =
      op == "aten::bmm" ? " (an attention: scaled_dot_product_attention gathers nothing)" : "";
  const std::string text =
      concat(op, " redistributes ", what, ": this rank receives ", bytes, " bytes", hint);
  if (state.policies.redistribution == Policy::error) {
    throw ImplicitRedistributionError(
        text +
        ". Redistribute explicitly before the call, or set Policies::redistribution to allow.");
  }
  const bool first = state.warned.insert(concat(text, ' ', call_site())).second;
  lock.unlock();  // a user's handler of warnings may come here again
  // Every rank would say the same.
  if (first && context.position == 0) TORCH_WARN(text);
}

namespace {

ReadyPlan make_plan_and_key(const OpInfo& info, at::ArrayRef<c10::IValue> arguments,
                            const Scan& scan, bool numbers, Key& key) {
  bool asked_for_numbers = false;
  ReadyPlan plan = make_plan(info, arguments, scan, asked_for_numbers);
  if (asked_for_numbers && !numbers) {
    PlanCache::of_thread().of(info).numbers = true;  // plans found so far do not depend on them
    key.clear();
    make_key(info, arguments.data(), true, key);
  }
  return plan;
}

void run_by_plan(const OpInfo& info, torch::jit::Stack* stack) {
  const std::size_t n = info.kinds.size();
  const WithoutHostLock released;
  if (info.writes_many && run_one_by_one(info, stack)) return;
  c10::IValue* arguments = stack->data() + (stack->size() - n);
  PlanCache& cache = PlanCache::of_thread();
  struct Depth {
    int& depth;
    explicit Depth(int& d) : depth(d) { ++depth; }
    ~Depth() { --depth; }
  } in(cache.depth);

  const bool numbers = cache.of(info).numbers;
  Key key;
  Scan scan = make_key(info, arguments, numbers, key);
  if (!scan.first)
    throw ShardingError(info.name, " reached the kernel of sharded tensors without one");
  if (scan.plain) {
    if (run_plain_elements_apart(info, stack)) return;
    const PromotedTargets promoted =
        promote_arguments(info, arguments, context_of(scan.first->spec()), false);
    after_promotion(promoted, [&] { run_sharded(info, stack); });
    return;
  }
  // In inference mode nothing has run above.
  if (c10::InferenceMode::is_enabled() && casts_parameters(*scan.first)) {
    if (const ParameterCasts casts = cast_arguments(info, arguments); casts.any) {
      run_sharded(info, stack);
      cast_result(info, stack, casts);
      return;
    }
  }
  if (runs_composed(info, scan, cache)) {
    run_composed(info, scan, stack);
    return;
  }
  auto found = cache.of(info).plans.find(key);
  if (found == cache.of(info).plans.end()) {
    ReadyPlan plan =
        make_plan_and_key(info, at::ArrayRef<c10::IValue>(arguments, n), scan, numbers, key);
    if (plan.once) {
      ShardedCall(info, plan, stack, scan).run();
      return;
    }
    cache.make_room();
    found = cache.of(info).plans.insert_or_assign(key, std::move(plan)).first;
    cache.added();
  }
  // Entries of the map keep their addresses while others are added.
  ReadyPlan& plan = found->second;
  if (plan.mode == ReadyPlan::Mode::by_functional)
    run_by_functional(info, stack);
  else
    ShardedCall(info, plan, stack, scan).run();
}

}  // namespace

void run_sharded(const OpInfo& info, torch::jit::Stack* stack) {
  raising([&] { run_by_plan(info, stack); });
}

}  // namespace tessera::detail
