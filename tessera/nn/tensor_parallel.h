#pragma once
// Tensor parallelism by name: which layers of a module are sharded over an axis of the mesh, and
// how. The module is an ordinary one and stays so.
//
//   const auto plan = tensor_parallel(*gpt, mesh, {{"*.attention.query", column(heads)},
//                                                  {"*.attention.key", column(heads)},
//                                                  {"*.attention.value", column(heads)},
//                                                  {"*.attention.out", row(heads)},
//                                                  {"*.mlp.up", column()},
//                                                  {"*.mlp.down", row()},
//                                                  {"embedding", vocabulary()},
//                                                  {"head", vocabulary()}});
//   if (manager.rank() == 0) std::cout << plan.to_string();
//
// A column() layer gives each rank some of its output features, a row() layer behind it takes them
// as its input and adds up over the ranks: one all-reduce for the two, forward and backward
// (Megatron-LM, https://arxiv.org/abs/1909.08053). With `sequence_dim` the data between such pairs
// are sharded along their sequence, norms and dropout work on shards, and the all-reduce becomes a
// reduce-scatter and an all-gather (https://arxiv.org/abs/2205.05198).

#include <torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/gradient/reducer.h"
#include "tessera/nn/distribute_module.h"

namespace tessera {

/// How one layer, or one parameter, is sharded over the tensor axis.
struct LayerSharding {
  enum class Kind : unsigned char { column, row, vocabulary, replicated, sharded };
  Kind kind = Kind::replicated;
  /// Equal blocks of what is sharded that stay together; 0: none do.
  std::int64_t units = 0;
  /// The dim along which a parameter is sharded (Kind::sharded).
  int dim = 0;
};

/// A linear layer whose output features are sharded: dim 0 of weight and bias. The features are
/// `units` equal blocks, dealt to the ranks as evenly as that goes: the heads of attention, or the
/// groups of heads that share a key. A fused projection has its heads outermost (head, then query,
/// key and value, then the features of each).
LayerSharding column(std::int64_t units = 0);
/// A linear layer whose input features are sharded: dim 1 of the weight. `units` as in the column()
/// layer whose features it takes.
LayerSharding row(std::int64_t units = 0);
/// An embedding whose rows are sharded, or the linear layer that scores the same vocabulary.
/// cross_entropy takes the sharded scores.
LayerSharding vocabulary();
/// The same on all ranks: what holds for all that no pattern names.
LayerSharding replicated();
/// A parameter, named itself, that is sharded along `dim` in `units` blocks.
LayerSharding sharded(int dim, std::int64_t units = 0);

/// Patterns of names of layers ("*" matches any characters, dots included), or of single
/// parameters. The first pattern that matches a parameter's layer or its own name counts.
using LayerShardings = std::vector<std::pair<std::string, LayerSharding>>;

struct TensorParallelOptions {
  /// The axis of the mesh that shards layers. On the other axes parameters are replicated.
  std::string axis = "tensor";
  /// But for this one, if it is not empty, over which samples are sharded: what the plan shards is
  /// sharded over it as well, along a dim that `axis` leaves alone, and gathered where an operator
  /// uses it (distribute_module()); a parameter without such a dim is replicated.
  std::string sharded_axis = {};
  /// Dim of the data between the sharded layers that is sharded over the same axis: 1 for data
  /// [batch, sequence, features].
  std::optional<int> sequence_dim = {};
  ReducerOptions reducer = {};
};

/// What a module's layers become: a value that can be looked at before it is applied.
class TensorParallelPlan {
 public:
  struct Parameter {
    std::string name;
    /// The layer's kind and units: "column of 5 units"; empty for what no pattern names.
    std::string how;
    std::vector<std::int64_t> shape;
    ParameterPlacement placement;
    /// Elements on each rank of the axis; where `sharded_axis` shards them further, at most.
    std::vector<std::int64_t> elements;
  };

  /// Communicates nothing. Throws InvalidArgument for an axis that the mesh does not have, a
  /// pattern that matches nothing, a layer of which it does not know what to shard, features that
  /// do not divide into the units, and for a parameter whose two names give it two shardings.
  TensorParallelPlan(const torch::nn::Module& module, const DeviceMesh& mesh,
                     const LayerShardings& layers, const TensorParallelOptions& options = {});

  const std::vector<Parameter>& parameters() const { return parameters_; }
  /// Returns the plan as a rule for distribute_module() and check_module().
  ModuleRule rule() const;
  /// A line for each sharded parameter, and the elements that each rank holds.
  std::string to_string() const;

 private:
  std::vector<std::string> axes_;
  int axis_ = 0;
  std::optional<int> sequence_dim_;
  std::vector<Parameter> parameters_;
};

/// Makes the plan and distributes the module by it: see distribute_module(), which says what else
/// is thrown. Throws on every rank: what the plan throws, if it does on all; MismatchError if the
/// ranks' plans differ, or one rank alone refuses its own. Collective over the mesh.
TensorParallelPlan tensor_parallel(torch::nn::Module& module, const DeviceMesh& mesh,
                                   const LayerShardings& layers,
                                   const TensorParallelOptions& options = {});

}  // namespace tessera
