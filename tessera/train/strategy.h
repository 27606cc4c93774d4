#pragma once
// Strategy: what a training loop needs to know of the ranks, and nothing else. Derive from it to
// define all parallelism by hand: eight functions, and what follows them has a default.
//
//   class Mine : public tessera::Strategy {
//     int rank() const override { ... }
//     ...
//     void reduce(const at::Tensor& t, ReduceOp op, const std::optional<Group>& group) override;
//   };
//
// The contract of gradients. After the last backward of a step, reduce_gradients() included, the
// gradient of every parameter is the sum over ranks of the gradients of their losses, or a known
// multiple of it, on every rank that holds the parameter. Where something reduces it of which the
// library knows (DistributedDataParallel, distribute_module(), any GradientSync), that says by what
// the sum is multiplied; for other parameters Abilities::gradients does. Ranks that share a loss,
// as those of a mesh over which it is sharded do, count once (loss_sharing()).

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/checkpoint/state.h"
#include "tessera/comm/group/group.h"
#include "tessera/comm/job/manager.h"
#include "tessera/data/fields.h"
#include "tessera/nn/clip.h"

namespace tessera {

/// What one rank trains on at once; an optimizer step may have several. The rows that count are the
/// weight of this rank's mean unless the task says otherwise; none: a rank that has run out of data
/// and takes part so that no other one waits.
struct MicroBatch : TensorBatch {
  /// It counts within the epoch, the same on every rank.
  std::uint64_t index = 0;
};

/// A module and the name under which it is saved: "net" gives "net.0.weight".
struct NamedModule {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
};
using NamedModules = std::vector<NamedModule>;

/// What a strategy can do and how. Declared by it, never inferred from its type.
struct Abilities {
  /// Modules and batches may be moved to the root device and converted. False: the user did.
  bool moves_modules = true;
  /// All ranks write their share of a checkpoint. False: the first one alone does, which must hold
  /// everything.
  bool saves_on_all_ranks = true;
  /// Micro-batches come together in the strategy: its backward() is called for each of them
  /// without no_sync() around it, and reduce_gradients() at the end of every step.
  bool owns_accumulation = false;
  /// A checkpoint's values can be written into the modules after setup(). False: what setup()
  /// leaves behind takes none (its memory is out of reach, or something is derived from it), and
  /// the modules get them before. Checkpoints are written after setup() all the same: the names,
  /// shapes and dtypes that they have there must fit the modules before it.
  bool restores_after_setup = true;
  /// How the gradients of parameters come together that nothing reduces of which the library knows
  /// (see the head of this file): their mean over the ranks with different losses, or their sum.
  enum class Gradients : unsigned char { averaged, summed } gradients = Gradients::averaged;
  /// Nothing reduces the gradients of parameters that are in no module: optimizers that have such
  /// are refused (GradientError) where there are several ranks.
  bool reduces_modules_alone = false;
  /// Ranks hold different modules, or other parts of them (the stages of a pipeline), under names
  /// that are theirs in the complete model. Checkpoints hold what all ranks have together.
  bool modules_differ = false;
};

class Session;

class Strategy : Pinned {
 public:
  virtual ~Strategy();

  // ---- what each strategy defines. Calls are collective over all its ranks ----

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Where batches go.
  virtual c10::Device root_device() const = 0;
  virtual void barrier() = 0;
  virtual void broadcast(const at::Tensor& tensor, int root) = 0;
  virtual std::string broadcast(const std::string& bytes, int root) = 0;
  /// Works in place, over all ranks, or over those of `group`.
  virtual void reduce(const at::Tensor& tensor, ReduceOp op,
                      const std::optional<Group>& group = {}) = 0;
  /// One text a rank, by rank.
  virtual std::vector<std::string> all_gather(const std::string& mine) = 0;

  // ---- what has a default ----

  virtual std::string name() const { return "of the user"; }
  virtual Abilities abilities() const { return {}; }
  /// Prepares the modules for training: moves, wraps, shards. The default does nothing, not even
  /// move. Called once, before the first forward.
  virtual void setup(const NamedModules& modules);
  /// The end of training. What the user made stays. The default does nothing.
  virtual void teardown() { modules_.clear(); }
  /// The numbers of all ranks, reduced one by one; the same on every rank. By reduce(), in memory
  /// of its own: a call that an error ends may still write to it.
  std::vector<double> reduced(const std::vector<double>& numbers, ReduceOp op);
  /// True if all ranks, or any rank, say so; the same on every rank. By reduce().
  virtual bool all(bool mine) { return !any(!mine); }
  virtual bool any(bool mine);
  /// Tensors of any sizes, by rank, on the CPU. By all_gather().
  virtual std::vector<at::Tensor> all_gather(const at::Tensor& mine);

  /// Puts the tensors of a batch where the modules want them. The default copies them to the root
  /// device if abilities().moves_modules.
  virtual void place(MicroBatch& batch);
  /// The weight of a loss, from what this rank gives for its own rows. Another one where ranks
  /// share a loss, which then has one weight. The default returns `mine`.
  virtual double loss_weight(double mine) { return mine; }
  /// Comes before the forward of a training step whose backward is synchronised or not.
  virtual void before_forward(bool /*synchronised*/) {}
  /// The default calls backward on the loss.
  virtual void backward(const at::Tensor& loss) { loss.backward(); }
  /// While the result lives, backward reduces nothing. The default finds every reducer that hangs
  /// on the parameters of the modules given to setup() (tessera::no_sync).
  virtual std::shared_ptr<void> no_sync();
  /// Gives all ranks the first one's buffers (running statistics, counters), where they hold
  /// replicas of a module: called after each optimizer step and each evaluation, so that whatever
  /// looks at them in between, a checkpoint too, finds one state. The default does nothing, and a
  /// checkpoint then has the first rank's.
  virtual void share_buffers() {}
  /// Reduces what is still owed, after a step whose last backward was not synchronised.
  virtual void reduce_gradients();
  /// clip_gradients() over all ranks with by_hand(); the norm before, the same on every rank.
  virtual double clip(const std::vector<at::Tensor>& parameters, const ClipOptions& options);
  /// Plain parameters of which each rank holds another shard, for clip().
  virtual std::vector<OwnedShard> by_hand() const { return {}; }
  /// The same for checkpoints, by full name with the module's name in front.
  virtual HandShards hand_shards() const { return {}; }
  /// How many ranks hold the same samples (tensor-parallel ones): sums of metrics are divided by
  /// it. The default is 1.
  virtual int sharing() const { return 1; }
  /// How many ranks compute the same loss: it counts once. The default is sharing().
  virtual int loss_sharing() const { return sharing(); }

  /// What checkpoints are written by; nullptr: this strategy has none, and a run of several ranks
  /// cannot save.
  virtual const DistributedManager* manager() const { return nullptr; }
  /// The ranks of that manager that train together, by rank of this strategy. The default: all.
  virtual std::vector<int> global_ranks() const;
  /// Tells the other ranks that this one cannot go on: their pending and later calls throw, with
  /// the reason. Called when an exception leaves a step. The default aborts the manager's groups,
  /// and does nothing without a manager.
  virtual void abort(const std::string& reason) noexcept;

 protected:
  /// Those given to setup() of this class.
  const NamedModules& modules() const { return modules_; }

 private:
  friend class Session;
  NamedModules modules_;
  /// Whose setup() was the last: another session's end is no teardown().
  const Session* session_ = nullptr;
};

/// It has the ranks of a manager: all that Strategy asks for, by its world group or another one.
class ManagedStrategy : public Strategy {
 public:
  explicit ManagedStrategy(DistributedManager manager);
  /// Its ranks are these of the manager's alone.
  ManagedStrategy(DistributedManager manager, Group ranks);

  int rank() const override { return world_.rank(); }
  int size() const override { return world_.size(); }
  c10::Device root_device() const override { return manager_.device(); }
  void barrier() override { world_.barrier({.name = "strategy"}); }
  void broadcast(const at::Tensor& tensor, int root) override;
  std::string broadcast(const std::string& bytes, int root) override;
  void reduce(const at::Tensor& tensor, ReduceOp op,
              const std::optional<Group>& group = {}) override;
  using Strategy::all_gather;
  std::vector<std::string> all_gather(const std::string& mine) override;
  double clip(const std::vector<at::Tensor>& parameters, const ClipOptions& options) override;
  const DistributedManager* manager() const override { return &manager_; }
  std::vector<int> global_ranks() const override { return world_.ranks(); }

 protected:
  const Group& world() const { return world_; }
  /// The weight of a loss that all ranks compute together: the sum of what ranks with other samples
  /// give. Collective.
  double summed_weight(double mine);

 private:
  DistributedManager manager_;
  Group world_;
};

/// Moves modules and their buffers, keeping every handle to the parameters valid. Throws
/// InvalidArgument for a module that is null, or a name that is a duplicate, empty or has a dot.
void check_modules(const NamedModules& modules);

}  // namespace tessera
