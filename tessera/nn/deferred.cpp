#include "tessera/nn/deferred.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/nn/detail/tape.h"
#include "tessera/nn/distribute_module.h"

namespace tessera {

DeferredScope::DeferredScope() : DeferredScope(false) {}
DeferredScope::DeferredScope(bool host_too) {
  detail::Tape::ensure_registered();
  recording_ = std::make_unique<detail::Recording>(std::make_shared<detail::Tape>(host_too));
}
DeferredScope::~DeferredScope() = default;

bool is_deferred(const at::Tensor& tensor) { return detail::recorded(tensor) != nullptr; }

std::vector<NamedTensor> named_tensors(const torch::nn::Module& module) {
  std::vector<NamedTensor> all;
  for (const auto& p : module.named_parameters()) all.push_back({p.key(), p.value(), true});
  for (const auto& b : module.named_buffers()) all.push_back({b.key(), b.value(), false});
  return all;
}

void detail::name_deferred(const torch::nn::Module& module) {
  for (const NamedTensor& entry : named_tensors(module))
    if (const Recorded* is = recorded(entry.tensor)) is->tape->name(is->value, entry.name);
}

void require_values(const std::string& who, const std::vector<NamedTensor>& tensors,
                    bool may_be_deferred) {
  for (const auto& [name, t, parameter] : tensors) {
    if (!t.defined() || !t.is_meta() || (may_be_deferred && is_deferred(t))) continue;
    throw InvalidArgument(who, ": '", name,
                          is_deferred(t) ? "' is deferred and has no values yet: place its module "
                                           "first (fully_shard(), tensor_parallel(), "
                                           "distribute_module()), or materialize() it"
                                         : "' is on the meta device and has no values: call "
                                           "defer() on its module first");
  }
}

void set_source(const at::Tensor& deferred, const std::string& what, DeferredSource source) {
  const detail::Recorded* is = detail::recorded(deferred);
  if (!is)
    throw InvalidArgument("set_source: the tensor for ", what,
                          " is not deferred: it has values, or was made in no "
                          "DeferredScope");
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
    detail::require_said("materialize", *is);
    std::vector<at::Tensor>& all = of[is->tape.get()];
    if (all.empty()) tapes.push_back(is->tape);
    if (std::ranges::none_of(all, [&](const at::Tensor& u) { return u.is_same(t); }))
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

namespace {

// How far a rank is that has its values.
struct Filled {
  RandomState random;
  std::uint64_t tensors = 0;
};

void require_one_seed(const std::vector<Filled>& all, const std::vector<int>& ranks) {
  if (std::ranges::all_of(all, [](const Filled& f) { return f.tensors == 0; })) return;
  for (std::size_t r = 1; r < all.size(); ++r)
    if (all[r].random.seed != all[0].random.seed)
      throw MismatchError("materialize: the random numbers of sharded tensors have the seed ",
                          all[0].random.seed, " on rank ", ranks[0], " and ", all[r].random.seed,
                          " on rank ", ranks[r], ": give manual_seed() the same one on all ranks");
}

}  // namespace

void materialize(const std::vector<NamedTensor>& tensors, const DeviceMesh& mesh) {
  const DistributedManager& manager = mesh.manager();
  const at::NoGradGuard no_grad;
  const RandomState before = random_state(manager);
  std::vector<std::pair<at::Tensor, at::Tensor>> made;
  std::vector<std::shared_ptr<detail::Tape>> begun;
  std::vector<Filled> all;
  try {
    all = agree::all<Filled>(mesh.all(), "materialize", [&] {
      detail::require_no_scope("materialize");
      require_values("materialize", tensors, /*may_be_deferred=*/true);
      const DeviceMesh alone(Mesh({{"rank", 1}}, {manager.rank()}), manager);
      std::unordered_set<const void*> seen;
      for (const auto& [name, t, parameter] : tensors) {
        const detail::Recorded* is = detail::recorded(t);
        if (!is || !seen.insert(t.unsafeGetTensorImpl()).second) continue;
        detail::require_said("materialize", *is);
        if (!is->tape->begun()) begun.push_back(is->tape);
        const ShardSpec whole(alone, t.sizes().vec(), {Replicate()});
        made.emplace_back(t, to_local(is->tape->placed(is->value, whole, manager.device())));
      }
      return Filled{random_state(manager), made.size()};
    });
    require_one_seed(all, mesh.all().ranks());
  } catch (...) {
    // Other ranks may have drawn less: all are where they were.
    for (const auto& tape : begun) tape->begin_anew();
    set_random_state(manager, before);
    throw;
  }
  for (const auto& [deferred, value] : made) detail::fill_in(deferred, value.detach());
  // Ranks that have nothing to draw go on where the others do.
  const RandomState mine = random_state(manager);
  RandomState furthest = mine;
  for (const Filled& other : all) {
    if (other.random.seed != mine.seed) return;
    furthest.stream = std::max(furthest.stream, other.random.stream);
  }
  if (!(furthest == mine)) set_random_state(manager, furthest);
}

void materialize(torch::nn::Module& module, c10::Device device) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& b : module.buffers()) tensors.push_back(b);
  materialize(tensors, device);
}

}  // namespace tessera
