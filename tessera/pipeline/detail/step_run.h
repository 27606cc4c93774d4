#pragma once
// One step of a pipeline on one rank: its row of the schedule, action by action.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/gradient/sync.h"
#include "tessera/pipeline/detail/plan.h"
#include "tessera/pipeline/detail/stage_graph.h"
#include "tessera/tensor/policy.h"

namespace tessera::detail {

class StepRun : Pinned {
 public:
  StepRun(PipelinePlan& plan, const PipelineBatch& batch, const StepFacts& facts);
  ~StepRun();

  /// All actions, and reductions that the row does not have. What they throw has been told to the
  /// other ranks.
  void run();
  /// Of weight * loss, on the rank of the last stage.
  double loss_sum() const;
  /// outputs[k], on the rank of the last stage, where they are kept.
  std::vector<std::vector<at::Tensor>>& outputs() { return outputs_; }
  /// Seconds since the run began, of each action of the row, without what it waited for; none of
  /// those that were left out.
  const std::vector<std::optional<ActionSpan>>& spans() const { return spans_; }

 private:
  using List = std::vector<CarriedTensor>;

  /// States of the generators of plain and of sharded tensors.
  struct Random {
    at::Tensor plain;
    RandomState sharded;
  };
  /// One micro-batch in one stage, from its forward to the end of its backward.
  struct Flight {
    Request arriving, arriving_gradient;
    /// From the stage before, and for the next one.
    List incoming, outgoing;
    /// Of `incoming` and `outgoing`.
    ListSpec incoming_spec, outgoing_spec;
    StageGraph graph;
    /// Of the tensors of `outgoing`, and of `incoming`.
    std::vector<at::Tensor> gradients, incoming_gradients;
    Request sent;
    /// Of the stage, as locals; where one is of a sharded tensor, its spec.
    std::vector<at::Tensor> inputs;
    std::vector<bool> wants;
    std::vector<ShardSpec> shards;
    /// For a stage that recomputes.
    Random random;
  };
  /// A skip in a stage of this rank, or on its way to another one of this rank.
  struct Skipped {
    CarriedTensor value;
    at::Tensor gradient;
  };

  void act(const PipelineAction& action);
  void forward(int s, int k);
  void backward(int s, int k, bool split);
  void weight_gradient(int s, int k);
  void send_activation(int s, int k);
  void receive_activation(int s, int k);
  void send_gradient(int s, int k);
  void receive_gradient(int s, int k);
  void reduce(int s);

  /// What a stage made: locals of sharded tensors, with their specs, for the stages behind it; what
  /// the last one made, as it is.
  struct Made {
    std::vector<at::Tensor> values;
    std::vector<ShardSpec> shards;
  };
  void take_inputs(int s, int k, Flight& f);
  Random random_now() const;
  void set_random(const Random& random) const;
  void seed_forward(int s, int k);
  Made compute(int s, int k, Flight& flight, bool graph);
  void hand_on(int s, int k, Flight& f, const Made& made,
               const std::function<bool(const at::Tensor&)>& wants);
  at::Tensor scaled_loss(int k, const std::vector<at::Tensor>& outputs, bool count);
  void keep_sending(Request request);
  Flight& flight(int s, int k) { return flights_[{s, k}]; }
  int peer(int stage) const { return plan_.training.placement[stage]; }
  /// Numbers of skips, ascending: those that begin and end at the stage, and those that travel from
  /// it to the next one, behind its own tensors.
  std::vector<int> skips(const std::function<bool(const PipelineSkip&)>& which) const;
  std::vector<int> skips_from(int stage) const;
  std::vector<int> skips_to(int stage) const;
  std::vector<int> skips_after(int stage) const;
  [[noreturn]] void fail(const PipelineAction& action);

  PipelinePlan& plan_;
  const PipelineBatch& batch_;
  const StepFacts& facts_;
  const PipelineSchedule& schedule_;
  const Group group_;
  const c10::Device device_;
  std::map<std::pair<int, int>, Flight> flights_;
  /// By skip and micro-batch.
  std::map<std::pair<int, int>, Skipped> skipped_;
  /// Gradients in progress, the oldest first.
  std::deque<Request> sending_;
  /// By stage, until its gradients are reduced.
  std::map<int, NoSync> held_back_;
  std::vector<std::vector<at::Tensor>> outputs_;
  at::Tensor loss_sum_;
  /// What the generators are set to at the end of a step that seeds them.
  std::optional<Random> random_before_;
  std::vector<std::optional<ActionSpan>> spans_;
  /// When the present action had what it needs.
  std::chrono::steady_clock::time_point mark_;
};

}  // namespace tessera::detail
