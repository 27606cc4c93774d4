#include "tessera/tensor/dispatch/internal/dispatch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>

#include "tessera/base/host_lock.h"
#include "tessera/base/text.h"
#include "tessera/tensor/dispatch/detail/make_plan.h"
#include "tessera/tensor/dispatch/detail/promote_view.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/errors.h"

namespace tessera::detail {
namespace {

// What takes the place of operators, by their full names: above autograd, or before their rules.
template <class Function>
std::map<std::string, Function>& replacements() {
  static std::map<std::string, Function> all;
  return all;
}
template <class Function>
Function replacement_of(const OpInfo& info) {
  const auto at = replacements<Function>().find(info.name);
  return at == replacements<Function>().end() ? nullptr : at->second;
}

struct Below final : c10::OperatorKernel {
  explicit Below(std::shared_ptr<const OpInfo> i)
      : info(std::move(i)), instead(replacement_of<BeforeRule>(*info)) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    if (instead) {
      bool done = false;
      raising([&] { done = instead(*info, stack); });
      if (done) return;
    }
    run_sharded(*info, stack);
  }
  const std::shared_ptr<const OpInfo> info;
  const BeforeRule instead;
};

struct Seen {
  const ShardMeta* sharded = nullptr;
  bool plain = false;

  void look(const c10::IValue& v) {
    if (!v.isTensor()) return;
    const auto& t = v.toTensor();
    if (!t.defined()) return;
    if (const ShardMeta* meta = meta_of(t)) {
      if (!sharded) sharded = meta;
    } else {
      plain |= !t.unsafeGetTensorImpl()->is_wrapped_number();
    }
  }
};

Seen look_at(const OpInfo& info, const c10::IValue* arguments) {
  Seen seen;
  for (std::size_t i = 0; i < info.kinds.size(); ++i) {
    if (info.kinds[i] == OpInfo::Kind::tensor) {
      seen.look(arguments[i]);
    } else if (info.kinds[i] != OpInfo::Kind::other && info.kinds[i] != OpInfo::Kind::floating &&
               arguments[i].isList()) {
      for (const c10::IValue& v : arguments[i].toListRef()) seen.look(v);
    }
  }
  return seen;
}

// Casts and promotes the arguments.
PromotedTargets prepare_above(const OpInfo& info, torch::jit::Stack* stack, ParameterCasts& casts) {
  c10::IValue* arguments = stack->data() + (stack->size() - info.kinds.size());
  Seen seen = look_at(info, arguments);
  if (seen.sharded && casts_parameters(*seen.sharded)) {
    casts = cast_arguments(info, arguments);
    if (casts.any) seen = look_at(info, arguments);
  }
  if (!seen.plain || !seen.sharded) return {};
  return promote_arguments(info, arguments, context_of(seen.sharded->spec()), true);
}

// Casts and promotes the arguments for what `onward` calls.
template <class Onward>
void run_above(const OpInfo& info, torch::jit::Stack* stack, const Onward& onward) {
  raising([&] {
    if (run_plain_elements_apart(info, stack)) return;
    ParameterCasts casts;
    const PromotedTargets promoted = prepare_above(info, stack, casts);
    after_promotion(promoted, onward);
    cast_result(info, stack, casts);
  });
}

void redispatch_below(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack) {
  op.redispatchBoxed((keys & c10::after_autograd_keyset).remove(c10::DispatchKey::ZeroTensor),
                     stack);
}

// The generated autograd kernel is registered for the alias Autograd, which our own entry hides;
// the AutogradOther slot holds the same kernel.
struct Above final : c10::OperatorKernel {
  Above(std::shared_ptr<const OpInfo> i, bool has_autograd)
      : info(std::move(i)), autograd(has_autograd), instead(replacement_of<AboveFunction>(*info)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    run_above(*info, stack, [&] {
      if (!instead || !instead(stack)) onward(op, keys, stack);
    });
  }
  void onward(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
              torch::jit::Stack* stack) const {
    if (!autograd) return redispatch_below(op, keys, stack);
    // A plain zero without memory has been promoted to one with: its kernels would return a plain
    // tensor.
    const auto rest = keys.remove(c10::DispatchKey::AutogradFunctionality)
                          .remove(c10::DispatchKey::ZeroTensor)
                          .add(c10::DispatchKey::AutogradOther);
    const ViewReplay replay(info->view);
    op.redispatchBoxed(rest, stack);
  }
  const std::shared_ptr<const OpInfo> info;
  const bool autograd;
  const AboveFunction instead;
};

// Namespaces of what is no operator on tensors, or made for other kinds of tensors; a blank on
// each side.
constexpr std::string_view kSkipped =
    " prim profiler quantized sparse mkldnn mkldnn_prepacked xnnpack prepacked _quantized "
    "static_runtime c10d _c10d_functional _c10d_functional_autograd inductor rngprims onednn "
    "symm_mem _dtensor ";

// The kernels belong to the process, like the dispatcher's table that contains them.
class Registrar {
 public:
  static Registrar& instance() {
    // never destroyed: the dispatcher may outlive static objects of this library
    static Registrar* registrar = new Registrar;
    return *registrar;
  }

  void ensure() {
    if (ready_.load(std::memory_order_acquire) && !pending_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(mutex_);
    if (!ready_) start();
    // Pending until the last one is added: another thread must not continue with half of them.
    for (;;) {
      std::deque<c10::OperatorName> fresh;
      {
        const std::lock_guard pending_lock(pending_mutex_);
        fresh.swap(queue_);
        if (fresh.empty()) {
          pending_.store(false, std::memory_order_release);
          return;
        }
      }
      for (const auto& name : fresh) add(name);
    }
  }

  // For operators that are in none of our libraries yet.
  std::shared_ptr<const OpInfo> info_of(const c10::OperatorHandle& op) {
    const std::lock_guard lock(fallback_mutex_);
    auto& info = by_name_[op.operator_name()];
    if (!info) info = std::make_shared<OpInfo>(op, next_id_++);
    return info;
  }

 private:
  // The dispatcher owns it, and holds its lock while it tells it of an operator: only the name is
  // noted.
  struct Listener final : c10::OpRegistrationListener {
    void onOperatorRegistered(const c10::OperatorHandle& op) override {
      Registrar& all = instance();
      const std::lock_guard lock(all.pending_mutex_);
      all.queue_.push_back(op.operator_name());
      all.pending_ = true;
    }
    void onOperatorDeregistered(const c10::OperatorHandle& op) override {
      Registrar& all = instance();
      const std::lock_guard lock(all.pending_mutex_);
      std::erase(all.queue_, op.operator_name());
    }
  };

  void start() {
    auto& dispatcher = c10::Dispatcher::singleton();
    const auto probe = dispatcher.findSchema({"aten::empty", "memory_format"});
    if (dispatcher.hasBackendFallbackForDispatchKey(kShardKey) ||
        (probe && probe->hasKernelForDispatchKey(kShardKey))) {
      throw NotAvailable(
          "another library in this process has registered kernels for the dispatch key "
          "PrivateUse2, which sharded tensors need: load only one of "
          "them");
    }
    fallback_below_ =
        std::make_unique<torch::Library>(torch::Library::IMPL, "_", kShardKey, __FILE__, __LINE__);
    fallback_below_->fallback(
        torch::CppFunction::makeFromBoxedFunction<&Registrar::below_fallback>());
    if (!dispatcher.hasBackendFallbackForDispatchKey(kShardAutogradKey)) {
      fallback_above_ = std::make_unique<torch::Library>(torch::Library::IMPL, "_",
                                                         kShardAutogradKey, __FILE__, __LINE__);
      fallback_above_->fallback(
          torch::CppFunction::makeFromBoxedFunction<&Registrar::above_fallback>());
    }
    for (const c10::DispatchKey key :
         {c10::DispatchKey::SparsePrivateUse2, c10::DispatchKey::SparseCsrPrivateUse2,
          c10::DispatchKey::NestedTensorPrivateUse2, c10::DispatchKey::QuantizedPrivateUse2}) {
      if (dispatcher.hasBackendFallbackForDispatchKey(key)) continue;
      refused_.push_back(
          std::make_unique<torch::Library>(torch::Library::IMPL, "_", key, __FILE__, __LINE__));
      refused_.back()->fallback(
          torch::CppFunction::makeFromBoxedFunction<&Registrar::refuse_layout>());
    }
    // The listener reports every operator that exists, then those to come.
    listening_ = dispatcher.addRegistrationListener(std::make_unique<Listener>());
    ready_.store(true, std::memory_order_release);
  }

  static void refuse_layout(const c10::OperatorHandle& op, c10::DispatchKeySet,
                            torch::jit::Stack*) {
    throw ShardingError(op.schema().name(),
                        ": sparse, nested and quantized tensors cannot be made of sharded "
                        "ones, and the sparse gradient of a sharded table knows sums and "
                        "multiples alone. Take their values first (full_tensor, to_dense, "
                        "to_local), and its norm by clip_gradients.");
  }
  static void below_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet,
                             torch::jit::Stack* stack) {
    run_sharded(*instance().info_of(op), stack);
  }
  static void above_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                             torch::jit::Stack* stack) {
    run_above(*instance().info_of(op), stack, [&] { redispatch_below(op, keys, stack); });
  }

  void add(const c10::OperatorName& name) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) return;
    const std::string space(op->schema().getNamespace().value_or(""));
    if (space.empty() || kSkipped.find(concat(' ', space, ' ')) != kSkipped.npos) return;
    const bool autograd = op->hasKernelForDispatchKey(c10::DispatchKey::Autograd);
    const bool implicit = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    if (implicit && !autograd) return;  // decomposes into operators that come here
    bool tensors = false;
    for (const auto& a : op->schema().arguments())
      tensors |= a.type()->str().find("Tensor") != std::string::npos;
    if (!tensors || registered_.contains(name)) return;
    registered_.insert(name);
    const auto info = info_of(*op);
    const std::string local = name.name.substr(space.size() + 2) +
                              (name.overload_name.empty() ? "" : "." + name.overload_name);
    auto& libraries = libraries_[space];
    if (!libraries.below) {
      libraries.below = std::make_unique<torch::Library>(torch::Library::IMPL, space, kShardKey,
                                                         __FILE__, __LINE__);
      libraries.above = std::make_unique<torch::Library>(torch::Library::IMPL, space,
                                                         kShardAutogradKey, __FILE__, __LINE__);
    }
    const std::string full = space + "::" + local;
    if (register_fast_kernels(full, info, *libraries.below, *libraries.above)) return;
    // Operators that decompose do so below autograd too.
    if (!implicit && !op->hasKernelForDispatchKey(kShardKey))
      libraries.below->impl(
          local.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Below>(info)));
    if (!op->hasKernelForDispatchKey(kShardAutogradKey)) {
      libraries.above->impl(local.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                               std::make_unique<Above>(info, autograd)));
    }
  }

  struct Libraries {
    std::unique_ptr<torch::Library> below, above;
  };
  std::mutex mutex_, pending_mutex_, fallback_mutex_;
  std::atomic<bool> ready_ = false, pending_ = false;
  std::deque<c10::OperatorName> queue_;
  std::unique_ptr<torch::Library> fallback_below_, fallback_above_;
  std::vector<std::unique_ptr<torch::Library>> refused_;
  std::map<std::string, Libraries> libraries_;
  std::unordered_map<c10::OperatorName, std::shared_ptr<const OpInfo>> by_name_;
  std::unordered_set<c10::OperatorName> registered_;
  c10::RegistrationHandleRAII listening_{[] {}};
  int next_id_ = 0;
};

}  // namespace

void register_above(const std::string& name, AboveFunction function) {
  replacements<AboveFunction>()[name] = function;
}

void register_before_rule(const std::string& name, BeforeRule function) {
  replacements<BeforeRule>()[name] = function;
}

void ensure_registered() { Registrar::instance().ensure(); }

}  // namespace tessera::detail
