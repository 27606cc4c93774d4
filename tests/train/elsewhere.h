#pragma once
// A run on fields that any strategy can take over from any other, on 1 to 4 ranks: data-parallel,
// fully sharded, tensor-parallel, or sharded in space. It says which samples it was given, in
// order.

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "support.h"

namespace tessera::test {

enum class Layout { ddp, sharded, tensor, domain };

struct Place {
  Layout layout;
  int ranks;
};

inline std::string to_string(const Place& place) {
  constexpr const char* names[] = {"ddp", "sharded", "tensor", "domain"};
  return concat(names[static_cast<int>(place.layout)], " on ", place.ranks);
}

inline constexpr std::int64_t kFieldRows = 7, kFieldSamples = 23, kFieldBatch = 5;
// An epoch has five micro-batches: two steps of two and a short one.
inline constexpr std::int64_t kFieldSteps = 6;
/// Micro-batches before a step.
inline std::int64_t micro_of_step(std::int64_t step) { return step / 3 * 5 + step % 3 * 2; }

struct FieldNetImpl : torch::nn::Module {
  FieldNetImpl()
      : conv(register_module("conv",
                             torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1)))),
        head(register_module("head", torch::nn::Linear(4, 1))) {
    to(at::kDouble);
    fill(*this, 21);
  }
  at::Tensor forward(const at::Tensor& x) {
    return head(torch::tanh(conv(x)).permute({0, 2, 3, 1})).permute({0, 3, 1, 2});
  }
  torch::nn::Conv2d conv;
  torch::nn::Linear head;
};
TORCH_MODULE(FieldNet);

class FieldTask : public Task {
 public:
  NamedModules modules() override { return {{"net", net.ptr()}}; }
  Optimizers optimizers() override {
    return {
        std::make_shared<torch::optim::Adam>(net->parameters(), torch::optim::AdamOptions(0.02))};
  }
  at::Tensor training_step(const MicroBatch& batch, Step&) override {
    return torch::mse_loss(net->forward(batch.tensors[0]), batch.tensors[1]);
  }
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> all;
    for (const auto& p : net->parameters()) all.push_back(whole(p).clone());
    return all;
  }
  FieldNet net;
};

inline std::shared_ptr<Strategy> strategy_of(DistributedManager& manager, Layout layout) {
  const int n = manager.world_size();
  switch (layout) {
    case Layout::ddp:
      return std::make_shared<DDPStrategy>(manager);
    case Layout::sharded:
      return std::make_shared<MeshStrategy>(
          manager.mesh({{"data", n}}),
          NamedPlacements{{"*.weight", {{Shard(0)}}}, {"*.bias", {{Shard(0)}}}},
          std::vector{Shard(0)});
    case Layout::tensor:
      return std::make_shared<MeshStrategy>(
          manager.mesh(mapped({{"data", n / 2}, {"model", 2}})),
          NamedPlacements{{"net.conv.weight", {{Replicate(), Shard(0)}}},
                          {"net.conv.bias", {{Replicate(), Shard(0)}}},
                          {"net.head.weight", {{Replicate(), Shard(1)}}}},
          std::vector{Shard(0), Replicate()});
    case Layout::domain:
      // Of the rows of a field each rank takes its own.
      return std::make_shared<MeshStrategy>(
          manager.mesh(mapped({{"data", 1}, {"domain", n}})), NamedPlacements{},
          BatchFields{.rows = {"data"}, .fields = {{.dims = {{"domain", 2}}, .whole = true}}});
  }
  throw Error("no such layout");
}

/// How the ranks share the samples.
inline Mesh readers_of(const Place& place) {
  switch (place.layout) {
    case Layout::tensor:
      return mapped({{"data", place.ranks / 2}, {"model", 2}});
    case Layout::domain:
      return mapped({{"data", 1}, {"domain", place.ranks}});
    default:
      return Mesh({{"data", place.ranks}});
  }
}

/// The samples of each micro-batch in turn, over all ranks, sorted.
using Reads = std::vector<std::vector<std::uint64_t>>;

/// What several ranks read: the n-th micro-batch of each is the n-th of the run. Those that not all
/// ranks have come to are left out.
class ReadLog {
 public:
  void add(int rank, std::vector<std::uint64_t> samples) {
    const std::lock_guard lock(mutex_);
    of_rank_[rank].push_back(std::move(samples));
  }
  Reads merged(int ranks) const {
    Reads all;
    if (of_rank_.size() < static_cast<std::size_t>(ranks)) return all;
    std::size_t common = of_rank_.begin()->second.size();
    for (const auto& [rank, reads] : of_rank_) common = std::min(common, reads.size());
    for (std::size_t i = 0; i < common; ++i) {
      std::vector<std::uint64_t> one;
      for (const auto& [rank, reads] : of_rank_) {
        one.insert(one.end(), reads[i].begin(), reads[i].end());
      }
      std::ranges::sort(one);
      // Ranks that share their samples read the same ones.
      one.erase(std::unique(one.begin(), one.end()), one.end());
      all.push_back(std::move(one));
    }
    return all;
  }

 private:
  std::mutex mutex_;
  std::map<int, Reads> of_rank_;
};

struct FieldRun {
  std::vector<at::Tensor> values;
  FitResult result;
};

/// Trains, or goes on from what is in the folder, with a save of every step in the background,
/// slower than a step. `strategy` nullptr: one process.
inline FieldRun train_fields(std::shared_ptr<Strategy> strategy, const Mesh& readers, int rank,
                             const std::string& folder, ReadLog& log,
                             std::vector<std::shared_ptr<Callback>> callbacks = {}) {
  at::Generator own = at::detail::createCPUGenerator(6);
  const auto data = std::make_shared<TensorDataset>(
      std::vector<at::Tensor>{at::randn({kFieldSamples, 2, kFieldRows, 4}, own, at::kDouble),
                              at::randn({kFieldSamples, 1, kFieldRows, 4}, own, at::kDouble)});
  SampleOrderOptions order;
  order.samples = kFieldSamples;
  order.seed = 9;
  Loader loader({data}, std::make_shared<FixedOrder>(order, BatchSchedule(kFieldBatch)),
                batch_mapping(readers, {"data"}), rank, {.workers = 1});
  const auto batches = batches_of(loader, [&](LoadedBatch loaded) {
    std::vector<std::uint64_t> samples;
    for (std::int64_t i = 0; i < loaded.rows; ++i)
      if (!loaded.mask.defined() || loaded.mask[i].item<bool>())
        samples.push_back(loaded.samples[static_cast<std::size_t>(i)].index);
    log.add(rank, std::move(samples));
    MicroBatch batch;
    batch.tensors = std::move(loaded.tensors);
    batch.rows = loaded.rows;
    batch.real = loaded.real;
    batch.mask = std::move(loaded.mask);
    return batch;
  });
  FieldTask task;
  TrainerOptions options;
  options.strategy = std::move(strategy);
  options.session.signals = false;
  options.session.clip.max_norm = 1;
  options.max_epochs = 2;
  options.accumulate = 2;
  options.callbacks = std::move(callbacks);
  if (!folder.empty()) {
    options.checkpoint.folder = folder;
    options.checkpoint.resume = true;
    options.checkpoint.options.background_rate = 400'000;
    options.checkpoint.options.timeout = std::chrono::seconds(20);
    options.callbacks.push_back(std::make_shared<CheckpointCallback>(
        CheckpointCallbackOptions{.every_steps = 1, .at_end = false}));
  }
  FieldRun run;
  run.result = Trainer(options).fit(task, batches);
  run.values = task.values();
  return run;
}

/// The run of one process that nothing interrupts.
inline FieldRun fields_alone(ReadLog& log) {
  return train_fields(nullptr, Mesh({{"data", 1}}), 0, "", log);
}

}  // namespace tessera::test
