#pragma once
// The strategies that come with the library, and a registry of strategies by name.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/nn/distribute_module.h"
#include "tessera/nn/distributed_data_parallel.h"
#include "tessera/tensor/spec/placement.h"
#include "tessera/train/strategy.h"

namespace tessera {

/// One process, which is all there is.
class SingleDevice : public ManagedStrategy {
 public:
  /// A manager of its own, of one rank.
  explicit SingleDevice(c10::Device device = c10::DeviceType::CPU);
  /// Throws InvalidArgument for a manager of several ranks.
  explicit SingleDevice(DistributedManager manager);
  std::string name() const override { return "single"; }
  void setup(const NamedModules& modules) override;
};

struct ManualOptions {
  /// Where batches go; absent: nothing is moved.
  std::optional<c10::Device> device = {};
  /// Parameters that nothing reduces of which the library knows have such gradients.
  Abilities::Gradients gradients = Abilities::Gradients::averaged;
  /// Plain parameters of which each rank holds another shard.
  std::vector<OwnedShard> by_hand = {};
  /// The same parameters for checkpoints, by full name with the module's name in front
  /// ("net.table.weight").
  HandShards hand_shards = {};
  /// Ranks that hold the same samples.
  int sharing = 1;
  /// All ranks compute one loss together (of sharded tensors): it counts once, with the sum of the
  /// ranks' weights. Otherwise only those that share their samples compute the same one.
  bool shared_loss = false;
  bool saves_on_all_ranks = true;
  /// It reduces gradients of which the library knows nothing: called at the end of every step,
  /// after the last backward, in place of reduce_gradients(); no_sync() is not used then.
  std::function<void()> reduce_gradients = {};
};

/// The user made the groups, moved and wrapped the modules. This one moves, wraps and initialises
/// nothing: it supplies ranks and collectives. teardown() leaves everything as it is.
class ManualStrategy : public ManagedStrategy {
 public:
  explicit ManualStrategy(DistributedManager manager, ManualOptions options = {});
  std::string name() const override { return "manual"; }
  Abilities abilities() const override;
  c10::Device root_device() const override;
  void place(MicroBatch& batch) override;
  void reduce_gradients() override;
  std::vector<OwnedShard> by_hand() const override { return options_.by_hand; }
  HandShards hand_shards() const override { return options_.hand_shards; }
  int sharing() const override { return options_.sharing; }
  int loss_sharing() const override { return options_.shared_loss ? size() : options_.sharing; }
  double loss_weight(double mine) override;

 private:
  ManualOptions options_;
};

/// Every rank holds all parameters; gradients are averaged while backward runs
/// (DistributedDataParallel over all modules of the task).
class DDPStrategy : public ManagedStrategy {
 public:
  /// `options.ignore`: with the module's name in front.
  explicit DDPStrategy(DistributedManager manager, DistributedDataParallelOptions options = {});
  ~DDPStrategy() override;
  std::string name() const override { return "ddp"; }
  Abilities abilities() const override;
  void setup(const NamedModules& modules) override;
  void teardown() override;
  void before_forward(bool synchronised) override;
  void share_buffers() override;

 private:
  struct Wrapped;
  DistributedDataParallelOptions options_;
  std::unique_ptr<Wrapped> wrapped_;
};

/// How a module is made parallel on a mesh: shards its parameters, replaces its layers.
using Parallelise =
    std::function<void(const std::string& name, torch::nn::Module& module, const DeviceMesh& mesh)>;

/// Parameters and data on a mesh: sharded (in space too) or replicated, in any mixture.
class MeshStrategy : public ManagedStrategy {
 public:
  /// `parallelise` is called for each module in setup(). `batch`: how the tensors of a batch lie,
  /// one placement per axis. Each rank gives the rows, or the part of the field, that are its own
  /// (from_local); tensors with too few dims for a Shard are replicated on that axis. The loss of
  /// such tensors is that of all ranks' samples; its weight is the sum of what the ranks with other
  /// samples give (one small all-reduce a micro-batch). The mesh may be of some ranks of the job,
  /// which then train by themselves. Throws InvalidArgument for placements that do not fit the
  /// mesh's axes or are Partial.
  MeshStrategy(const DeviceMesh& mesh, Parallelise parallelise, std::vector<Placement> batch);
  /// A table of patterns (distribute_module), matched with the module's name in front.
  MeshStrategy(const DeviceMesh& mesh, NamedPlacements patterns, std::vector<Placement> batch);
  std::string name() const override { return "mesh"; }
  void setup(const NamedModules& modules) override;
  void place(MicroBatch& batch) override;
  double loss_weight(double mine) override;
  int sharing() const override { return sharing_; }
  int loss_sharing() const override { return size(); }
  const DeviceMesh& mesh() const { return mesh_; }

 private:
  DeviceMesh mesh_;
  Parallelise parallelise_;
  NamedPlacements patterns_;
  std::vector<Placement> batch_;
  int sharing_ = 1;
  /// What setup() has made parallel: it stays so, for another run.
  std::vector<std::weak_ptr<torch::nn::Module>> prepared_;
};

/// Strategies by name, as a value: a program that takes a name from its command line adds its own.
///
///   auto strategies = StrategyRegistry::builtin();
///   strategies.add("mine", [](const DistributedManager& m) { return std::make_shared<Mine>(m); });
///   auto strategy = strategies.make("mine", manager);
class StrategyRegistry {
 public:
  using Make = std::function<std::shared_ptr<Strategy>(const DistributedManager& manager)>;
  /// "ddp", "manual", "single". ("mesh" needs a mesh: add one that knows it.)
  static StrategyRegistry builtin();
  /// Throws InvalidArgument for a name that is there already.
  void add(const std::string& name, Make make);
  /// Throws InvalidArgument with the known names.
  std::shared_ptr<Strategy> make(const std::string& name, const DistributedManager& manager) const;
  std::vector<std::string> names() const;

 private:
  std::map<std::string, Make> makes_;
};

}  // namespace tessera
