#include "tessera/pipeline/detail/step_run.h"

#include <ATen/ATen.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>

#include "tessera/base/hash.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail {
namespace {

using Clock = std::chrono::steady_clock;

// Buffers, and what was in them.
using KeptBuffers = std::vector<std::pair<at::Tensor, at::Tensor>>;

void restore(const KeptBuffers& kept) {
  const at::NoGradGuard no_grad;
  for (const auto& [now, before] : kept) {
    try {
      // Writing ends what other graphs have saved of it.
      if (!now.equal(before)) now.copy_(before);
    } catch (const std::exception& e) {
      TORCH_WARN("a buffer of a stage that recomputes could not be restored: ", e.what());
    }
  }
}

bool kept(const PipelinePlan& plan, const StepFacts& facts) {
  return plan.last() && (!facts.training || plan.options.keep_outputs);
}

}  // namespace

StepRun::StepRun(PipelinePlan& plan, const PipelineBatch& batch, const StepFacts& facts)
    : plan_(plan),
      batch_(batch),
      facts_(facts),
      schedule_(facts.training ? plan.training : plan.evaluation),
      group_(plan.group()),
      device_(plan.device()) {
  if (kept(plan, facts)) outputs_.resize(facts.micro_batches);
  if (facts.training) {
    for (int s = 0; s < plan.count(); ++s) {
      if (plan.stages[s]) held_back_.emplace(s, NoSync(plan.stages[s]->parameters()));
    }
  }
  if (plan.options.seed) random_before_ = random_now();
}

StepRun::~StepRun() {
  if (random_before_) set_random(*random_before_);
}

void StepRun::run() {
  const auto& row = schedule_.actions[plan_.rank];
  spans_.assign(row.size(), std::nullopt);
  const auto began = Clock::now();
  const auto since = [&](Clock::time_point t) {
    return std::chrono::duration<double>(t - began).count();
  };
  for (std::size_t i = 0; i < row.size(); ++i) {
    const PipelineAction& action = row[i];
    if (has_micro_batch(action.kind) && action.micro_batch >= facts_.micro_batches) continue;
    mark_ = Clock::now();
    try {
      act(action);
    } catch (...) {
      fail(action);
    }
    spans_[i] = ActionSpan{since(mark_), since(Clock::now())};
  }
  try {
    while (!held_back_.empty()) reduce(held_back_.begin()->first);
    for (Request& request : sending_) request.wait();
    for (auto& [at, flight] : flights_) flight.sent.wait();
  } catch (...) {
    fail(row.empty() ? PipelineAction{} : row.back());
  }
  flights_.clear();
}

void StepRun::act(const PipelineAction& action) {
  const int s = action.stage, k = action.micro_batch;
  switch (action.kind) {
    case ActionKind::forward:
      return forward(s, k);
    case ActionKind::backward:
      return backward(s, k, false);
    case ActionKind::input_gradient:
      return backward(s, k, true);
    case ActionKind::weight_gradient:
      return weight_gradient(s, k);
    case ActionKind::send_activation:
      return send_activation(s, k);
    case ActionKind::receive_activation:
      return receive_activation(s, k);
    case ActionKind::send_gradient:
      return send_gradient(s, k);
    case ActionKind::receive_gradient:
      return receive_gradient(s, k);
    case ActionKind::gather:
      return plan_.stages[s]->gather();
    case ActionKind::release:
      return plan_.stages[s]->release();
    case ActionKind::reduce_gradient:
      return reduce(s);
  }
}

std::vector<int> StepRun::skips(const std::function<bool(const PipelineSkip&)>& which) const {
  return numbers_below(static_cast<int>(plan_.options.skips.size()),
                       [&](int i) { return which(plan_.options.skips[i]); });
}
std::vector<int> StepRun::skips_from(int stage) const {
  return skips([&](const PipelineSkip& skip) { return skip.from == stage; });
}
std::vector<int> StepRun::skips_to(int stage) const {
  return skips([&](const PipelineSkip& skip) { return skip.to == stage; });
}
std::vector<int> StepRun::skips_after(int stage) const {
  return skips([&](const PipelineSkip& skip) { return plan_.travels(skip, stage); });
}

// ---- computing ----

// What the stage gives from flight.inputs; with `graph`, its history is kept.
StepRun::Made StepRun::compute(int s, int k, Flight& flight, bool graph) {
  const at::AutoGradMode mode(graph);
  const std::shared_ptr<void> scope = facts_.forward_scope ? facts_.forward_scope() : nullptr;
  const bool again = graph && plan_.stages[s]->recomputes();
  std::vector<at::Tensor> given =
      graph ? flight.graph.enter(flight.inputs, flight.wants) : flight.inputs;
  if (!graph && facts_.training) {
    // A stage may write to its inputs, of which it needs the values again.
    for (at::Tensor& input : given) input = input.clone();
  }
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (flight.shards[i]) given[i] = from_local(given[i], flight.shards[i]);
  }
  Made made{plan_.stages[s]->forward(given), {}};
  std::vector<at::Tensor>& outputs = made.values;
  if (s + 1 < plan_.count()) {
    // The graph and the messages see locals alone, forward and backward; a gradient comes back with
    // the placements of its value.
    for (at::Tensor& output : outputs) {
      made.shards.push_back(is_sharded(output) ? spec(output) : ShardSpec());
      if (made.shards.back()) output = to_local(output);
    }
    if (graph) flight.graph.leave(outputs);
    return made;
  }
  if (kept(plan_, facts_) && !again) {
    for (const at::Tensor& output : outputs) outputs_[k].push_back(output.detach());
  }
  if (!facts_.targets) return made;
  const at::Tensor loss = scaled_loss(k, outputs, !again);
  if (graph && facts_.weights[k] == 0) {
    // Zeros go back from the outputs: a loss over nothing may have no derivative at all, while
    // what a stage does in backward together with other ranks is to be done all the same.
    flight.graph.leave(outputs);
    for (const at::Tensor& output : outputs)
      flight.gradients.push_back(output.defined() && output.requires_grad()
                                     ? at::zeros_like(output.detach())
                                     : at::Tensor());
  } else if (graph) {
    const auto trains = [](const at::Tensor& t) { return t.defined() && t.requires_grad(); };
    if (!loss.requires_grad() && std::ranges::any_of(outputs, trains))
      throw InvalidArgument(
          "the loss has no derivative by the outputs of the last stage (a detach(), item() or "
          "argmax() on the way): no stage would be trained");
    flight.graph.leave({loss});
    flight.gradients = {at::ones_like(loss.detach())};
  }
  return made;
}

at::Tensor StepRun::scaled_loss(int k, const std::vector<at::Tensor>& outputs, bool count) {
  const auto at = static_cast<std::size_t>(k);
  const at::Tensor loss = plan_.loss(outputs, batch_.targets[at]);
  if (!loss.defined() || loss.dim() != 0 || !loss.is_floating_point())
    throw InvalidArgument("the loss must be 0-dim and floating-point: the mean over the ",
                          "micro-batch",
                          loss.defined() ? concat("; it has shape ", loss.sizes()) : "");
  const double weight = facts_.weights[at];
  // A product alone would keep the NaN of a mean over nothing.
  const at::Tensor sound =
      weight > 0 ? loss
                 : at::where(at::zeros({}, loss.options().dtype(at::kBool).requires_grad(false)),
                             loss, at::zeros({}, loss.options().requires_grad(false)));
  if (count) {
    const at::NoGradGuard no_grad;
    const at::Tensor value = sound.detach().to(at::kDouble) * weight;
    loss_sum_ = loss_sum_.defined() ? loss_sum_ + value : value;
  }
  return sound * (weight * facts_.scale);
}

double StepRun::loss_sum() const { return loss_sum_.defined() ? loss_sum_.item<double>() : 0.0; }

// Moves the stage's own part of what came, and the skips that end here, into its inputs.
void StepRun::take_inputs(int s, int k, Flight& f) {
  List given = std::exchange(f.incoming, {});
  if (s == 0)
    for (const at::Tensor& input : batch_.inputs[k]) given.push_back({input});
  const std::vector<int> came = skips_after(s - 1);
  const std::size_t own = given.size() - came.size();
  for (std::size_t i = 0; i < came.size(); ++i) skipped_[{came[i], k}].value = given[own + i];
  given.resize(own);
  for (const int i : skips_to(s)) given.push_back(std::exchange(skipped_.at({i, k}).value, {}));
  for (const CarriedTensor& one : given) {
    f.inputs.push_back(one.value);
    f.wants.push_back(one.wants && facts_.training);
    f.shards.push_back(one.shards);
  }
}

StepRun::Random StepRun::random_now() const {
  at::Generator generator = at::globalContext().defaultGenerator(device_);
  const std::lock_guard lock(generator.mutex());
  return {generator.get_state(), random_state(plan_.mesh.manager())};
}

void StepRun::set_random(const Random& random) const {
  at::Generator generator = at::globalContext().defaultGenerator(device_);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(random.plain);
  set_random_state(plan_.mesh.manager(), random.sharded);
}

void StepRun::seed_forward(int s, int k) {
  Hash seed;
  seed.number(*plan_.options.seed).number(facts_.step);
  seed.number(static_cast<std::uint64_t>(s)).number(static_cast<std::uint64_t>(k));
  // Pipelines with other samples draw other numbers.
  const std::vector<int> here = plan_.mesh.coordinate();
  for (const int a : plan_.sample_axes()) seed.number(static_cast<std::uint64_t>(here[a]));
  at::Generator generator = at::globalContext().defaultGenerator(device_);
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed.value());
  set_random_state(plan_.mesh.manager(), {seed.value(), 0});
}

void StepRun::forward(int s, int k) {
  Flight& f = flight(s, k);
  f.arriving.wait();
  mark_ = Clock::now();
  const bool recomputes = facts_.training && plan_.stages[s]->recomputes();
  take_inputs(s, k, f);
  if (plan_.options.seed) seed_forward(s, k);
  bool gradient = false;
  if (recomputes) {
    f.random = random_now();
    gradient = !plan_.stages[s]->parameters().empty();
    for (const bool wants : f.wants) gradient = gradient || wants;
  }
  const Made made = compute(s, k, f, facts_.training && !recomputes);
  if (!recomputes) f.inputs.clear();
  if (s + 1 == plan_.count()) return;
  hand_on(s, k, f, made, [&](const at::Tensor& t) {
    return facts_.training &&
           (recomputes ? gradient && (t.is_floating_point() || t.is_complex()) : t.requires_grad());
  });
}

// What the stage made and what passes it, for the next stage; `wants` says whether a gradient is to
// come back.
void StepRun::hand_on(int s, int k, Flight& f, const Made& made,
                      const std::function<bool(const at::Tensor&)>& wants) {
  const std::vector<at::Tensor>& outputs = made.values;
  const std::vector<int> begin = skips_from(s);
  if (outputs.size() < begin.size())
    throw InvalidArgument("the stage gave ", outputs.size(), " tensors, and ", begin.size(),
                          " skip connections begin here, for each of which the last ones "
                          "are");
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& t = outputs[i];
    if (!t.defined()) throw InvalidArgument("the stage gave an undefined tensor");
    f.outgoing.push_back({t.detach(), wants(t), made.shards[i]});
  }
  const std::size_t own = outputs.size() - begin.size();
  for (std::size_t i = 0; i < begin.size(); ++i)
    skipped_[{begin[i], k}].value = f.outgoing[own + i];
  f.outgoing.resize(own);
  for (const int i : skips_after(s)) f.outgoing.push_back(std::move(skipped_.at({i, k}).value));
  f.outgoing_spec = spec_of(f.outgoing, plan_.mesh, plan_.axis);
  if (plan_.holds(s + 1)) {
    Flight& next = flight(s + 1, k);
    next.incoming = std::move(f.outgoing);
    next.incoming_spec = f.outgoing_spec;
    f.outgoing.clear();
  }
}

void StepRun::backward(int s, int k, bool split) {
  Flight& f = flight(s, k);
  f.arriving_gradient.wait();
  f.sent.wait();  // long ago: the gradient is the answer
  mark_ = Clock::now();
  const PipelineStage& stage = *plan_.stages[s];
  // What a second forward writes to. Not restored before the backward, which may have saved them.
  KeptBuffers buffers;
  const auto as_before = c10::make_scope_exit([&] { restore(buffers); });
  if (stage.recomputes()) {
    for (const at::Tensor& b : stage.buffers())
      if (b.defined()) buffers.emplace_back(b.detach(), b.detach().clone());
    const auto restored = c10::make_scope_exit([&, before = random_now()] { set_random(before); });
    set_random(f.random);
    compute(s, k, f, true);
    f.inputs.clear();
  }

  // Of the stage's own outputs: those for the next one, and the skips that begin here.
  std::vector<at::Tensor> given = std::exchange(f.gradients, {});
  if (s + 1 < plan_.count()) {
    const std::vector<int> back = skips_after(s);
    given.resize(f.outgoing_spec.size());
    const std::size_t own = given.size() - back.size();
    for (std::size_t i = 0; i < back.size(); ++i) skipped_[{back[i], k}].gradient = given[own + i];
    given.resize(own);
    for (const int i : skips_from(s)) {
      given.push_back(skipped_.at({i, k}).gradient);
      skipped_.erase({i, k});
    }
  }
  std::vector<at::Tensor> got =
      split && !stage.recomputes() ? f.graph.input_gradients(given) : f.graph.backward(given);
  if (s == 0) return;

  const std::vector<int> came = skips_after(s - 1);
  std::size_t ends = f.incoming_spec.size() - came.size();
  std::vector<at::Tensor> back(got.begin(), got.begin() + static_cast<std::ptrdiff_t>(ends));
  for (const int i : skips_to(s)) skipped_.at({i, k}).gradient = got[ends++];
  for (const int i : came) back.push_back(std::move(skipped_.at({i, k}).gradient));
  if (plan_.holds(s - 1))
    flight(s - 1, k).gradients = std::move(back);
  else
    f.incoming_gradients = std::move(back);
}

void StepRun::weight_gradient(int s, int k) { flight(s, k).graph.weight_gradients(); }

void StepRun::reduce(int s) {
  held_back_.erase(s);
  if (facts_.reduces) plan_.stages[s]->reduce();
}

// ---- faults ----

// The present exception, with the action in its message. The other ranks hear of it before this
// rank's messages under way are given up.
void StepRun::fail(const PipelineAction& action) {
  const std::string place = concat(
      "pipeline ", schedule_.name, ", step ", facts_.step, ", ", action, " (stage ", action.stage,
      action.micro_batch < 0 ? std::string() : concat(", micro-batch ", action.micro_batch),
      ") on rank ", plan_.mesh.manager().rank(), ": ");
  const auto tell = [&](const std::string& what) { tell_failure(plan_, what); };
  try {
    throw;
  } catch (const PeerFailedError& e) {
    throw PeerFailedError(place + e.what(), e.ranks());
  } catch (const PeerLostError& e) {
    tell(place + e.what());
    throw PeerLostError(place + e.what(), e.ranks());
  } catch (const TimeoutError& e) {
    tell(place + e.what());
    throw TimeoutError(place + e.what(), e.missing());
  } catch (const MismatchError& e) {
    tell(place + e.what());
    throw MismatchError(place + e.what());
  } catch (const c10::Error& e) {
    tell(place + e.what_without_backtrace());
    std::throw_with_nested(PipelineError(place + e.what_without_backtrace(), action));
  } catch (const std::exception& e) {
    tell(place + e.what());
    std::throw_with_nested(PipelineError(place + e.what(), action));
  } catch (...) {
    tell(place + "an exception of another type");
    std::throw_with_nested(PipelineError(place + "an exception of another type", action));
  }
}

}  // namespace tessera::detail
