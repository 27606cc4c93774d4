#pragma once
// Parallelism of every kind against one process, as one rank of several sees it: run on threads and
// on processes.

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "support.h"
#include "tessera/comm/group/functional.h"
#include "tessera/train/strategies.h"

namespace tessera::test {

inline TrainerOptions with(std::shared_ptr<Strategy> strategy, int accumulate) {
  TrainerOptions options;
  options.strategy = std::move(strategy);
  options.accumulate = accumulate;
  options.max_epochs = 2;
  options.session.clip.max_norm = 0.5;
  options.session.signals = false;
  return options;
}

// Parameters sharded unevenly, with empty shards.
inline Parallelise fully_sharded() {
  return [](const std::string&, torch::nn::Module& module, const DeviceMesh& mesh) {
    const int n = mesh.mesh().size();
    distribute_module(
        module, mesh,
        [n](const std::string&, const at::Tensor& t) -> std::optional<ParameterPlacement> {
          Sizes sizes(static_cast<std::size_t>(n), 0);
          sizes.back() = t.size(0);
          if (n > 2) sizes[0] = 1, sizes.back() -= 1;
          return ParameterPlacement{{Shard(0)}, {{0, sizes}}};
        });
  };
}

// What a user writes for parallelism of their own: gradients are summed by one all-reduce.
class Mine : public Strategy {
 public:
  explicit Mine(Group group) : group_(std::move(group)) {}
  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  c10::Device root_device() const override { return c10::DeviceType::CPU; }
  void barrier() override { group_.barrier(); }
  void broadcast(const at::Tensor& t, int root) override { group_.broadcast(t, root); }
  std::string broadcast(const std::string& bytes, int root) override {
    return group_.broadcast_bytes(bytes, root);
  }
  void reduce(const at::Tensor& t, ReduceOp op, const std::optional<Group>& group) override {
    (group ? *group : group_).all_reduce(t, op);
  }
  using Strategy::all_gather;
  std::vector<std::string> all_gather(const std::string& mine) override {
    return group_.all_gather_bytes(mine);
  }
  Abilities abilities() const override {
    Abilities can;
    can.moves_modules = false;
    can.owns_accumulation = true;
    can.gradients = Abilities::Gradients::summed;
    return can;
  }
  void reduce_gradients() override {
    for (const NamedModule& m : modules())
      for (at::Tensor& p : m.module->parameters())
        if (p.grad().defined()) group_.all_reduce(p.mutable_grad());
  }
  double clip(const std::vector<at::Tensor>& parameters, const ClipOptions& options) override {
    return clip_gradients(parameters, group_, options);
  }

 private:
  Group group_;
};

// Each strategy trains as one process does, on ragged batches.
inline void each_strategy_case(DistributedManager& manager) {
  constexpr std::int64_t kMicro = 7;
  const int ranks = manager.world_size();
  for (const int accumulate : {1, 3}) {
    const auto expected = alone(ranks, kMicro, accumulate, with(nullptr, 1));
    const auto train = [&](const std::string& name, std::shared_ptr<Strategy> strategy) {
      Regression task;
      Trainer trainer(with(strategy, accumulate));
      const FitResult result = trainer.fit(task, ragged_batches(manager.rank(), kMicro));
      EXPECT_EQ(result.steps, 2 * ((kMicro + accumulate - 1) / accumulate));
      EXPECT_EQ(result.epochs, 2);
      expect_near(task.values(), expected,
                  concat(name, ", ", ranks, " ranks, accumulate ", accumulate));
    };
    train("ddp", std::make_shared<DDPStrategy>(manager));
    train("of the user", std::make_shared<Mine>(manager.world()));
    const auto line = manager.mesh({{"data", ranks}});
    train("fully sharded",
          std::make_shared<MeshStrategy>(line, fully_sharded(), std::vector{Shard(0)}));
    train("process group", std::make_shared<ProcessGroupStrategy>(manager.world().process_group()));
    if (ranks == 1) train("single", std::make_shared<SingleDevice>(manager));
    if (ranks != 4) continue;
    const auto plane = manager.mesh(mapped({{"data", 2}, {"model", 2}}));
    // Ranks along "model" share their samples.
    const auto strategy =
        std::make_shared<MeshStrategy>(plane,
                                       NamedPlacements{{"net.0.weight", {{Replicate(), Shard(0)}}},
                                                       {"net.0.bias", {{Replicate(), Shard(0)}}},
                                                       {"*.2.weight", {{Replicate(), Shard(1)}}}},
                                       std::vector{Shard(0), Replicate()});
    Regression task;
    Trainer(with(strategy, accumulate)).fit(task, ragged_batches(plane.coordinate()[0], kMicro));
    expect_near(task.values(), alone(2, kMicro, accumulate, with(nullptr, 1)), "tensor parallel");
  }
}

// ---- by hand ----

// An embedding table of which each rank holds some rows, looked up by all for all; what follows is
// ordinary data parallelism.
class TableTask : public Task {
 public:
  static constexpr std::int64_t kRows = 7, kWidth = 4;
  static std::int64_t first(int rank, int ranks) { return kRows * rank / ranks; }

  explicit TableTask(const Group& group)
      : group_(group),
        begin_(first(group.rank(), group.size())),
        end_(first(group.rank() + 1, group.size())),
        head(torch::nn::Linear(kWidth, 3)) {
    at::Generator own = at::detail::createCPUGenerator(5);
    const at::Tensor all = at::randn({kRows, kWidth}, own, at::kDouble);
    table = std::make_shared<torch::nn::Module>();
    // A leaf that has its own rows alone.
    rows_ = table->register_parameter("weight", all.narrow(0, begin_, end_ - begin_).clone());
    head->to(at::kDouble);
    fill(*head, 9);
    // Each rank's loss reaches the table through every rank: a sum; the step wants the mean.
    const int n = group.size();
    rows_.register_hook([n](const at::Tensor& gradient) { return gradient / n; });
  }
  NamedModules modules() override { return {{"table", table}, {"head", head.ptr()}}; }
  Optimizers optimizers() override {
    std::vector<at::Tensor> all{rows_};
    for (const at::Tensor& p : head->parameters()) all.push_back(p);
    return {std::make_shared<torch::optim::Adam>(all, torch::optim::AdamOptions(0.05))};
  }
  at::Tensor training_step(const MicroBatch& batch, Step&) override {
    return torch::mse_loss(head->forward(embedded(batch.tensors[0])), batch.tensors[1]);
  }

  at::Tensor embedded(const at::Tensor& ids) {
    Sizes sizes;
    for (const std::string& n : group_.all_gather_bytes(concat(ids.size(0))))
      sizes.push_back(std::stoll(n));
    std::int64_t rows = 0;
    for (const std::int64_t n : sizes) rows += n;
    const at::Tensor all = at::empty({rows}, at::kLong);
    group_.all_gather(all, ids, sizes);
    const at::Tensor here = all.ge(begin_).logical_and(all.lt(end_));
    at::Tensor found = at::zeros({rows, kWidth}, at::kDouble);
    const at::Tensor index = here.nonzero().squeeze(1);
    // index_add, so that a rank without rows takes part with a gradient of zero.
    found = found.index_add(0, index, rows_.index_select(0, all.index_select(0, index) - begin_));
    return functional::reduce_scatter(group_, found, sizes);
  }

  HandShards shards() const { return {{"table.weight", {{kRows, kWidth}, {begin_, 0}}}}; }
  const at::Tensor& rows() const { return rows_; }

 private:
  Group group_;
  std::int64_t begin_, end_;

 public:
  std::shared_ptr<torch::nn::Module> table;
  torch::nn::Linear head;

 private:
  at::Tensor rows_;
};

inline std::shared_ptr<BatchSource> lookups(int first, int last, std::int64_t batches) {
  return batches_of([=](std::uint64_t epoch, std::uint64_t index) -> std::optional<MicroBatch> {
    if (static_cast<std::int64_t>(index) >= batches) return std::nullopt;
    std::vector<at::Tensor> ids, targets;
    for (int r = first; r < last; ++r) {
      at::Generator own = at::detail::createCPUGenerator(77 + static_cast<std::uint64_t>(r) * 1000 +
                                                         epoch * 100 + index);
      const std::int64_t rows = (r + static_cast<std::int64_t>(index)) % 3 + (r == 0 ? 1 : 0);
      ids.push_back(at::randint(TableTask::kRows, {rows}, own, at::kLong));
      targets.push_back(at::randn({rows, 3}, own, at::kDouble));
    }
    return make_batch({at::cat(ids), at::cat(targets)});
  });
}

// (a) A table cut by hand, the rest data-parallel. Trains and saves, or goes on and finds nothing
// to do.
inline void table_case(DistributedManager& manager, const std::string& folder, int trained_ranks,
                       bool resume) {
  at::Tensor expected_rows;
  std::vector<at::Tensor> expected_head;
  {
    TableTask task{Group()};
    Trainer(with(nullptr, 1)).fit(task, lookups(0, trained_ranks, 4));
    expected_rows = task.rows().detach().clone();
    for (const auto& p : task.head->parameters()) expected_head.push_back(p.detach().clone());
  }
  TableTask task(manager.world());
  // The user wraps what is data-parallel.
  DistributedDataParallel head(task.head, manager.world());
  ManualOptions manual;
  manual.by_hand = {{task.rows(), manager.world()}};
  manual.hand_shards = task.shards();
  auto options = with(std::make_shared<ManualStrategy>(manager, manual), 1);
  options.checkpoint.folder = folder;
  options.checkpoint.resume = resume;
  if (!resume)
    options.callbacks = {std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{})};
  const FitResult result =
      Trainer(options).fit(task, lookups(manager.rank(), manager.rank() + 1, 4));
  EXPECT_EQ(result.steps, 8);
  const std::int64_t begin = TableTask::first(manager.rank(), manager.world_size());
  const std::string what = concat("trained by ", trained_ranks, ", on ", manager.world_size());
  expect_near({task.rows().detach()}, {expected_rows.narrow(0, begin, task.rows().size(0))},
              "table, " + what);
  std::vector<at::Tensor> got;
  for (const auto& p : task.head->parameters()) got.push_back(p.detach().clone());
  expect_near(got, expected_head, "head, " + what);
}

// The first layers fully sharded on a mesh, the last one data-parallel: small_net(), cut in two.
class Mixed : public Task {
 public:
  explicit Mixed(DistributedManager& manager)
      : mesh_(manager.mesh({{"data", manager.world_size()}})) {
    const auto net = small_net();
    const auto linear = [&](std::size_t i) {
      return torch::nn::Linear(std::dynamic_pointer_cast<torch::nn::LinearImpl>(net->ptr(i)));
    };
    body = torch::nn::Sequential(linear(0), torch::nn::Tanh());
    head = linear(2);
    fully_sharded()("body", *body, mesh_);
  }
  NamedModules modules() override { return {{"body", body.ptr()}, {"head", head.ptr()}}; }
  Optimizers optimizers() override {
    std::vector<at::Tensor> all = body->parameters();
    for (const at::Tensor& p : head->parameters()) all.push_back(p);
    return {std::make_shared<torch::optim::Adam>(all, torch::optim::AdamOptions(0.05))};
  }
  at::Tensor training_step(const MicroBatch& batch, Step&) override {
    const at::Tensor x = from_local(batch.tensors[0], mesh_, {Shard(0)});
    const at::Tensor rows = to_local(body->forward(x));
    return torch::mse_loss(head->forward(rows), batch.tensors[1]);
  }
  std::vector<at::Tensor> values() {
    std::vector<at::Tensor> all;
    for (const auto& p : body->parameters()) all.push_back(whole(p).clone());
    for (const auto& p : head->parameters()) all.push_back(p.detach().clone());
    return all;
  }
  torch::nn::Sequential body;
  torch::nn::Linear head{nullptr};

 private:
  DeviceMesh mesh_;
};

// (b) Data-parallel on one sub-module and fully sharded on another, one optimizer, one clip. The
// gradients of the one are means over ranks, or sums, those of the other are sums: the session
// knows.
inline void mixed_case(DistributedManager& manager) {
  const int ranks = manager.world_size();
  for (const int accumulate : {1, 3}) {
    const auto expected = alone(ranks, 7, accumulate, with(nullptr, 1));
    for (const ReduceOp reduction : {ReduceOp::avg, ReduceOp::sum}) {
      Mixed task(manager);
      DistributedDataParallelOptions head_options;
      head_options.reduction = reduction;
      DistributedDataParallel head(task.head, manager.world(), head_options);
      Trainer(with(std::make_shared<ManualStrategy>(manager), accumulate))
          .fit(task, ragged_batches(manager.rank(), 7));
      expect_near(
          task.values(), expected,
          concat(ranks, " ranks, accumulate ", accumulate, ", ", to_string(reduction.kind)));
    }
  }
}

}  // namespace tessera::test
