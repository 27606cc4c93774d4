#pragma once
// The strategies that come with the library, and a registry of strategies by name.
//
//   auto mesh = manager.mesh({{"data", 2}, {"domain", 2}});
//   // rows of a batch over `data`; of images dim 2 over `domain`, all else replicated there
//   options.strategy = std::make_shared<MeshStrategy>(
//       mesh, NamedPlacements{},
//       BatchFields{.rows = {"data"},
//                   .fields = {{.field = "image", .dims = {{"domain", 2}}, .whole = true}}});

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/data/shard_batch.h"
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
  c10::Device root_device() const override {
    return options_.device.value_or(ManagedStrategy::root_device());
  }
  void place(MicroBatch& batch) override;
  void reduce_gradients() override;
  std::vector<OwnedShard> by_hand() const override { return options_.by_hand; }
  HandShards hand_shards() const override { return options_.hand_shards; }
  int sharing() const override { return options_.sharing; }
  int loss_sharing() const override { return options_.shared_loss ? size() : options_.sharing; }
  double loss_weight(double mine) override {
    return options_.shared_loss ? summed_weight(mine) : mine;
  }

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
  Abilities abilities() const override { return {.reduces_modules_alone = true}; }
  void setup(const NamedModules& modules) override;
  void teardown() override;
  void before_forward(bool synchronised) override;
  void backward(const at::Tensor& loss) override;
  void share_buffers() override;

 private:
  struct Wrapped;
  DistributedDataParallelOptions options_;
  std::unique_ptr<Wrapped> wrapped_;
};

/// Data parallelism over a c10d process group of the program's own, of which this library knows
/// nothing else.
///
///   auto store = c10::make_intrusive<c10d::TCPStore>(...);
///   auto group = c10::make_intrusive<c10d::ProcessGroup>(...);     // or a backend's
///   options.strategy = std::make_shared<ProcessGroupStrategy>(group);
class ProcessGroupStrategy : public ManagedStrategy {
 public:
  /// Every rank holds all parameters; their gradients are added up over the group at the end of
  /// each step, in one message a dtype. Modules are moved, and the first rank's values broadcast,
  /// in setup(); its buffers are given to all after each step. All ranks save. What is no gradient
  /// goes through groups of the library's own over the same ranks: a manager of theirs is made
  /// here, for which the ranks meet at a port of the first one that they learn over the group, so
  /// that it needs no store. The group stays the program's. Waits are bounded by the group's own
  /// time limit and the manager's. Collective over the group. Throws InvalidArgument without a
  /// group, and RendezvousError where its ranks do not meet.
  explicit ProcessGroupStrategy(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                c10::Device device = c10::DeviceType::CPU);

  std::string name() const override { return "process_group"; }
  Abilities abilities() const override;
  void reduce(const at::Tensor& tensor, ReduceOp op,
              const std::optional<Group>& group = {}) override;
  void setup(const NamedModules& modules) override;
  void share_buffers() override;
  void reduce_gradients() override;

 private:
  Group given_;
};

/// How a module is made parallel on a mesh: shards its parameters, replaces its layers.
using Parallelise =
    std::function<void(const std::string& name, torch::nn::Module& module, const DeviceMesh& mesh)>;

/// How the fields of a batch lie on a mesh: what shard_rows() and scatter_rows() take.
struct BatchFields {
  /// The axes that shard the rows; ranks along the others have the same samples.
  std::vector<std::string> rows = {};
  /// By name (or place) the other dims that axes shard; what is not named is replicated along them.
  std::vector<FieldSharding> fields = {};
  /// One rank of those that have the same samples reads them (reads_for_others()), and sends the
  /// others their shards. These give batches without tensors, of as many rows: those of a loader
  /// with LoaderOptions::reads false.
  bool one_reads = false;
};

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
  /// Fields that lie differently, by name. A batch whose tensors are sharded already, by a function
  /// that batches_of() was given, stays as it is. Throws InvalidArgument for axes that the mesh
  /// does not have or that stand in another order than its own; what does not fit a batch is thrown
  /// on all ranks when it comes.
  MeshStrategy(const DeviceMesh& mesh, Parallelise parallelise, BatchFields batch);
  MeshStrategy(const DeviceMesh& mesh, NamedPlacements patterns, BatchFields batch);
  std::string name() const override { return "mesh"; }
  void setup(const NamedModules& modules) override;
  void place(MicroBatch& batch) override;
  double loss_weight(double mine) override { return summed_weight(mine); }
  int sharing() const override { return sharing_; }
  int loss_sharing() const override { return size(); }
  const DeviceMesh& mesh() const { return mesh_; }

 private:
  DeviceMesh mesh_;
  Parallelise parallelise_;
  NamedPlacements patterns_;
  std::vector<Placement> batch_;
  /// In place of batch_, where it was given.
  std::optional<BatchFields> fields_;
  int sharing_ = 1;
  /// What setup() has made parallel: it stays so, for another run.
  std::vector<std::weak_ptr<torch::nn::Module>> prepared_;
};

/// What a strategy that is asked for by name is made of, beside the ranks of the job.
struct StrategyParts {
  /// The number of ranks that the program counts on; 0: as many as the job has.
  int ranks = 0;
  /// Axes with their sizes, one of which may be open: of "mesh" and "pipeline", which need them.
  std::vector<Axis> mesh = {};
  /// The axis of the stages of "pipeline".
  std::string stage_axis = "stage";
  /// How "mesh" and "pipeline" make modules parallel; empty: parameters are replicated.
  Parallelise parallelise = {};
  /// By axis the dim of a batch's tensors that it shards, for "mesh" and the stages of "pipeline".
  std::map<std::string, int> batch = {};
  /// In place of `batch`, for "mesh".
  std::optional<BatchFields> fields = {};
  ManualOptions manual = {};
  DistributedDataParallelOptions ddp = {};
};

/// Strategies by name, as a value: a program that takes a name from its command line adds its own.
///
///   auto strategies = StrategyRegistry::builtin();
///   strategies.add("mine", [](const DistributedManager& manager, const StrategyParts&) {
///     return std::make_shared<Mine>(manager);
///   });
///   auto strategy = strategies.make("mesh", manager,
///                                   {.ranks = 8, .mesh = {{"data", 4}, {"domain", 2}}});
class StrategyRegistry {
 public:
  using Make = std::function<std::shared_ptr<Strategy>(const DistributedManager& manager,
                                                       const StrategyParts& parts)>;
  /// "ddp", "manual", "mesh", "pipeline", "process_group" (over the group of the manager's world:
  /// see manager_of()), "single".
  static StrategyRegistry builtin();
  /// Throws InvalidArgument for a name that is there already.
  void add(const std::string& name, Make make);
  /// Throws InvalidArgument for a name that there is not, with those that there are; for another
  /// number of ranks; for a mesh, batch, fields or function that a strategy of the library lacks or
  /// does not take (options of the others stand unused); and as its constructor. Collective where
  /// that is.
  std::shared_ptr<Strategy> make(const std::string& name, const DistributedManager& manager,
                                 const StrategyParts& parts = {}) const;
  std::vector<std::string> names() const;

 private:
  std::map<std::string, Make> makes_;
};

}  // namespace tessera
