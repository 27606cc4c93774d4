#include "tessera/nn/deferred.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/nn/detail/tape.h"

namespace tessera {

struct DeferredScope::State {
  explicit State(bool host_too)
      : tape(std::make_shared<detail::Tape>(host_too)),
        before(detail::exchange_recording(tape.get())) {}
  ~State() { detail::exchange_recording(before); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  const std::shared_ptr<detail::Tape> tape;
  detail::Tape* const before;
  const c10::impl::IncludeDispatchKeyGuard include{detail::Tape::kKey};
};

DeferredScope::DeferredScope() : DeferredScope(false) {}
DeferredScope::DeferredScope(bool host_too) {
  detail::Tape::ensure_registered();
  state_ = std::make_unique<State>(host_too);
}
DeferredScope::~DeferredScope() = default;

bool is_deferred(const at::Tensor& tensor) { return detail::recorded(tensor) != nullptr; }

void set_source(const at::Tensor& deferred, const std::string& what, DeferredSource source) {
  const detail::Recorded* is = detail::recorded(deferred);
  if (!is)
    throw InvalidArgument(concat("set_source: the tensor for ", what,
                                 " is not deferred: it has values, or was made in no "
                                 "DeferredScope"));
  const auto tape = is->tape;
  deferred.unsafeGetTensorImpl()->set_backend_meta(
      c10::make_intrusive<detail::Recorded>(tape, tape->give(is->value, what, std::move(source))));
}

void materialize(const std::vector<at::Tensor>& tensors, c10::Device device) {
  detail::require_no_scope("materialize");
  // Each once, whatever its names, recording by recording.
  std::vector<std::shared_ptr<detail::Tape>> tapes;
  std::unordered_map<const detail::Tape*, std::vector<at::Tensor>> of;
  for (const at::Tensor& t : tensors) {
    const detail::Recorded* is = detail::recorded(t);
    if (!is) continue;
    std::vector<at::Tensor>& all = of[is->tape.get()];
    if (all.empty()) tapes.push_back(is->tape);
    if (std::none_of(all.begin(), all.end(), [&](const at::Tensor& u) { return u.is_same(t); }))
      all.push_back(t);
  }
  for (const auto& tape : tapes) {
    const std::vector<at::Tensor>& all = of[tape.get()];
    std::vector<std::size_t> values;
    for (const at::Tensor& t : all) values.push_back(detail::recorded(t)->value);
    const std::vector<at::Tensor> made = tape->plain(values, device);
    for (std::size_t i = 0; i < made.size(); ++i) detail::fill_in(all[i], made[i]);
  }
}

void materialize(torch::nn::Module& module, c10::Device device) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& b : module.buffers()) tensors.push_back(b);
  materialize(tensors, device);
}

}  // namespace tessera
