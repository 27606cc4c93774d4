#include "tessera/nn/sharded_optimizer.h"

#include <ATen/ops/empty.h>
#include <torch/optim/adagrad.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/nn/detail/flat_plan.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera {

ShardedStates::~ShardedStates() = default;

namespace detail {

namespace {

bool is_shardable(const at::Tensor& p) {
  return p.defined() && !meta_of(p) && p.layout() == at::kStrided && p.dim() > 0 && p.numel() > 0 &&
         p.is_contiguous();
}

}  // namespace

struct OptimizerShards::State {
  // Parameters of one dtype and device that are gathered in one message.
  struct Chunk {
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> parameters;
    FlatPlan plan;
  };

  std::shared_ptr<MeshContext> context;
  std::vector<int> axes;
  std::int64_t chunk_bytes;
  // The specs of the states of parameters in chunks.
  std::unordered_map<const void*, ShardSpec> shards;
  // Of those that are no longer, the address may be another's.
  std::unordered_map<const void*, c10::weak_intrusive_ptr<c10::TensorImpl>> known;
  std::vector<Chunk> chunks;

  // Asked for anew each time: a failure ends the groups there are.
  Group ranks() const { return context->mesh.group(axes); }
  bool knows(const at::Tensor& p) const {
    const auto at = known.find(p.unsafeGetTensorImpl());
    return at != known.end() && !at->second.expired();
  }
  void add_chunk(const std::vector<at::Tensor>& parameters);
  at::Tensor rows_of(const at::Tensor& parameter, const at::Tensor& of) const;
  at::Tensor shard(const at::Tensor& parameter, const at::Tensor& of) const;
  at::Tensor with_gradient(const at::Tensor& parameter) const;
  bool shards_of(const at::Tensor& p) const { return shards.contains(p.unsafeGetTensorImpl()); }
  void gather();
};

void OptimizerShards::State::add_chunk(const std::vector<at::Tensor>& parameters) {
  Chunk chunk;
  std::vector<FlatRows> rows;
  for (const at::Tensor& p : parameters) rows.push_back({p.size(0), p.numel() / p.size(0)});
  chunk.plan = plan_flat(rows, context->mesh.mesh().size());
  const std::vector<Placement> placements(context->sizes.size(), Shard(0));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& p = parameters[i];
    shards[p.unsafeGetTensorImpl()] =
        ShardSpec(context->mesh, p.sizes().vec(), placements, {{0, chunk.plan.rows[i]}});
    chunk.parameters.emplace_back(p.getIntrusivePtr());
  }
  chunks.push_back(std::move(chunk));
}

// The rows of this rank: of a parameter itself or of its gradient.
at::Tensor OptimizerShards::State::rows_of(const at::Tensor& parameter,
                                           const at::Tensor& of) const {
  const ShardSpec& spec = shards.at(parameter.unsafeGetTensorImpl());
  return of.detach().narrow(0, spec.local_offset()[0], spec.local_shape()[0]);
}

at::Tensor OptimizerShards::State::shard(const at::Tensor& parameter, const at::Tensor& of) const {
  const ShardSpec& spec = shards.at(parameter.unsafeGetTensorImpl());
  return wrap(rows_of(parameter, of), make_layout(spec, of.scalar_type(), of.device()));
}

at::Tensor OptimizerShards::State::with_gradient(const at::Tensor& parameter) const {
  at::Tensor made = shard(parameter, parameter);
  const at::Tensor& grad = parameter.grad();
  if (!grad.defined()) return made;
  if (grad.layout() != at::kStrided || meta_of(grad) || grad.sizes() != parameter.sizes() ||
      grad.scalar_type() != parameter.scalar_type())
    throw InvalidArgument("ShardedOptimizer: the gradient of a parameter of shape ",
                          parameter.sizes(), " and dtype ", toString(parameter.scalar_type()),
                          " is ", grad.sizes(), ", ", toString(grad.scalar_type()),
                          ", and must be dense, plain, and like the parameter");
  made.mutable_grad() = shard(parameter, grad.contiguous());
  return made;
}

// What every rank has updated, for all of them: one chunk travels while another is packed.
void OptimizerShards::State::gather() {
  struct Traveling {
    const Chunk* chunk;
    std::vector<at::Tensor> parameters;
    at::Tensor sent, flat;
    Request request;
  };
  const Group ranks = this->ranks();
  const int me = ranks.rank();
  const auto arrive = [&](Traveling& t) {
    t.request.wait();
    for (std::size_t i = 0; i < t.parameters.size(); ++i) {
      const at::Tensor& p = t.parameters[i];
      p.detach().copy_(t.flat.narrow(0, t.chunk->plan.offset[i], p.numel()).view(p.sizes()));
    }
  };
  std::optional<Traveling> before;
  for (const Chunk& chunk : chunks) {
    Traveling now{&chunk, {}, {}, {}, {}};
    for (const auto& weak : chunk.parameters) {
      const auto impl = weak.lock();
      if (!impl)
        throw InvalidArgument(
            "ShardedOptimizer: a parameter that it was given is gone, and what the others share "
            "with it cannot be gathered: make the optimizer again");
      now.parameters.emplace_back(impl);
    }
    const Sizes sizes = chunk.plan.sizes();
    const at::TensorOptions options = now.parameters.front().options().requires_grad(false);
    now.sent = at::empty({sizes[me]}, options);
    now.flat = at::empty({chunk.plan.numel()}, options);
    for (std::size_t i = 0; i < now.parameters.size(); ++i) {
      const at::Tensor rows = rows_of(now.parameters[i], now.parameters[i]);
      if (rows.numel() == 0) continue;
      const std::int64_t at = std::max<std::int64_t>(chunk.plan.offset[i] - chunk.plan.cuts[me], 0);
      now.sent.narrow(0, at, rows.numel()).copy_(rows.reshape({-1}));
    }
    now.request =
        ranks.started().all_gather(now.flat, now.sent, sizes, {.name = "updated parameters"});
    if (before) arrive(*before);
    before = std::move(now);
  }
  if (before) arrive(*before);
}

OptimizerShards::OptimizerShards(const DeviceMesh& mesh, std::int64_t chunk_bytes)
    : state_(std::make_shared<State>()) {
  ensure_registered();
  state_->context = MeshContext::of(mesh);
  state_->axes = numbers_below<int>(state_->context->sizes.size());
  state_->chunk_bytes = chunk_bytes;
}

std::vector<at::Tensor> OptimizerShards::plan(const std::vector<at::Tensor>& parameters) {
  State& s = *state_;
  std::vector<at::Tensor> unknown;
  std::string text, without;
  for (const at::Tensor& p : parameters) {
    if (!p.defined() || s.knows(p)) continue;
    unknown.push_back(p);
    if (p.is_meta()) without = concat(p.sizes());
    text += concat("parameter of shape ", p.sizes(), ", ", toString(p.scalar_type()),
                   is_shardable(p) ? "" : ", not sharded", p.is_meta() ? ", no values" : "", "\n");
  }
  if (unknown.empty()) return {};
  const Group ranks = s.ranks();
  if (ranks.size() > 1) agree::same(ranks, "the parameters of a ShardedOptimizer", text);
  if (!without.empty())
    throw InvalidArgument("ShardedOptimizer: a parameter of shape ", without,
                          " has no values yet: place or materialize() its module first");
  // Known on all ranks or on none, so that a second call asks the others again.
  std::vector<at::Tensor> fresh;
  for (const at::Tensor& p : unknown) {
    if (s.knows(p)) continue;  // given twice
    s.known.insert_or_assign(p.unsafeGetTensorImpl(),
                             c10::weak_intrusive_ptr<c10::TensorImpl>(p.getIntrusivePtr()));
    s.shards.erase(p.unsafeGetTensorImpl());
    if (is_shardable(p)) fresh.push_back(p);
  }
  if (ranks.size() == 1) return {};
  std::vector<at::Tensor> chunk;
  std::int64_t bytes = 0;
  const auto close = [&] {
    if (!chunk.empty()) s.add_chunk(chunk);
    chunk.clear();
    bytes = 0;
  };
  for (const at::Tensor& p : fresh) {
    const auto size = static_cast<std::int64_t>(p.nbytes());
    if (!chunk.empty() &&
        (bytes + size > s.chunk_bytes || chunk.front().scalar_type() != p.scalar_type() ||
         chunk.front().device() != p.device()))
      close();
    chunk.push_back(p);
    bytes += size;
  }
  close();
  return fresh;
}

void OptimizerShards::plan(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  for (const at::Tensor& p : plan(parameters)) {
    // What an optimizer has made of a whole parameter before its first step: Adagrad does so when
    // it is made.
    const auto made = optimizer.state().find(p.unsafeGetTensorImpl());
    if (made == optimizer.state().end()) continue;
    auto* const adagrad = dynamic_cast<torch::optim::AdagradParamState*>(made->second.get());
    if (adagrad && adagrad->sum().defined() && !meta_of(adagrad->sum()))
      adagrad->sum(shard_state(p, adagrad->sum()));
  }
}

at::Tensor OptimizerShards::like(const at::Tensor& parameter) const {
  return state_->shards_of(parameter) ? state_->shard(parameter, parameter) : parameter;
}

std::vector<at::Tensor> OptimizerShards::shards(const std::vector<at::Tensor>& parameters) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> made;
  for (const at::Tensor& p : parameters)
    made.push_back(state_->shards_of(p) ? state_->with_gradient(p) : p);
  return made;
}

at::Tensor OptimizerShards::shard_state(const at::Tensor& parameter,
                                        const at::Tensor& state) const {
  const at::NoGradGuard no_grad;
  return state_->shards_of(parameter) ? state_->shard(parameter, state).clone() : state;
}

void OptimizerShards::gather() {
  const at::NoGradGuard no_grad;
  try {
    state_->gather();
  } catch (...) {
    rethrow_to_all("ShardedOptimizer::step", *state_->context);
  }
}

void OptimizerShards::step(torch::optim::Optimizer& optimizer,
                           const std::function<void()>& update) {
  State& s = *state_;
  const at::NoGradGuard no_grad;
  plan(optimizer);
  if (s.shards.empty()) return update();
  // Shards stand for the parameters while the optimizer works, and its states belong to them.
  std::unordered_map<const void*, at::Tensor> shards, parameters;
  auto& states = optimizer.state();
  const auto rename = [&](const at::Tensor& from, const at::Tensor& to) {
    const auto at = states.find(from.unsafeGetTensorImpl());
    if (at == states.end()) return;
    auto kept = std::move(at->second);
    states.erase(at);
    states[to.unsafeGetTensorImpl()] = std::move(kept);
  };
  const auto restore = [&] {
    for (auto& group : optimizer.param_groups()) {
      for (at::Tensor& p : group.params()) {
        const auto at = parameters.find(p.unsafeGetTensorImpl());
        if (at != parameters.end()) p = at->second;
      }
    }
    for (const auto& [key, parameter] : parameters)
      rename(shards.at(parameter.unsafeGetTensorImpl()), parameter);
  };
  try {
    for (auto& group : optimizer.param_groups()) {
      for (at::Tensor& p : group.params()) {
        if (!p.defined() || !s.shards_of(p)) continue;
        at::Tensor& shard = shards[p.unsafeGetTensorImpl()];
        if (!shard.defined()) {
          shard = s.with_gradient(p);
          parameters[shard.unsafeGetTensorImpl()] = p;
          rename(p, shard);
        }
        p = shard;
      }
    }
    update();
  } catch (...) {
    restore();
    rethrow_to_all("ShardedOptimizer::step", *s.context);
  }
  restore();
  gather();
}

void refuse_archive() {
  throw NotAvailable(
      "a ShardedOptimizer is not saved to libtorch's archives, which hold what one rank has: use "
      "add_optimizer() and load_optimizer() (tessera/checkpoint/optimizer_state.h)");
}

}  // namespace detail

}  // namespace tessera
