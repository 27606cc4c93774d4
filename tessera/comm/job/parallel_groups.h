#pragma once
// ParallelGroups: groups for model, pipeline and data parallelism, given by two numbers.
//
//   const ParallelGroups groups(manager, {.model = 2, .pipeline = 2});  // on all of 8 ranks
//   std::cout << groups.summary() << "\n";
//   groups.mp.group.ranks()                          // rank 5: {4, 5};  .pp: {5, 7};  .dp: {1, 5}
//   at::Tensor mine = groups.mp.split(weights, 0);   // this rank's rows
//   at::Tensor all = groups.mp.all_gather(mine, 0);   // the rows of all ranks again
//   groups.mesh.group("mp")                          // the same group, as an axis of a mesh
//
// On 8 ranks, model 2 and pipeline 2: model [0,1] [2,3] [4,5] [6,7], pipeline [0,2] [1,3] [4,6]
// [5,7], data [0,4] [1,5] [2,6] [3,7].

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/comm/job/manager.h"

namespace tessera {

/// Thrown for sizes that do not fit the world.
class ParallelismError : public ConfigurationError {
 public:
  using ConfigurationError::ConfigurationError;
};

/// One kind of parallelism, as seen from this rank.
struct GroupInfo {
  Group group;
  /// Global ranks in group order.
  std::vector<int> global_ranks;
  /// This rank's position in the group.
  int rank = 0;
  int world_size = 1;

  /// All-reduce in place. Not recorded by autograd, and therefore refused (InvalidArgument) for a
  /// tensor that is part of a graph: use functional::all_reduce there.
  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) const;
  Request start_all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) const;
  /// This rank's slice of a tensor that all ranks hold, as a copy: the first n mod world_size ranks
  /// get one row more than the others. [7, 2] along dim 0 over 3 ranks: 3, 2, 2 rows. The gradient
  /// is gathered: every rank's backward must run.
  at::Tensor split(const at::Tensor& tensor, std::int64_t dim = 0) const;
  /// The ranks' slices joined along `dim` in group order, of any sizes: the inverse of split, in
  /// forward and backward. All ranks must use the result alike, so that they hold the same gradient
  /// of it. The sizes are exchanged first (one small call, which blocks).
  at::Tensor all_gather(const at::Tensor& tensor, std::int64_t dim = 0) const;
  Pending<at::Tensor> start_all_gather(const at::Tensor& tensor, std::int64_t dim = 0) const;
  /// One rank of the group alone gets what all_gather() gives; the others get an undefined tensor.
  /// Throws InvalidArgument, as all_reduce() does, for a tensor that is part of a graph.
  at::Tensor gather_to(int root, const at::Tensor& tensor, std::int64_t dim = 0) const;
  Pending<at::Tensor> start_gather_to(int root, const at::Tensor& tensor,
                                      std::int64_t dim = 0) const;
};

/// How many ranks share one model (mp) and how many stages it has (pp); the rest of the world are
/// replicas (dp). Backend and time limit of each kind are the manager's unless given.
struct ParallelOptions {
  int model = 1;
  int pipeline = 1;
  GroupOptions model_group = {}, pipeline_group = {}, data_group = {};
};

/// The groups as members. A value; it holds the manager that made them.
class ParallelGroups {
 public:
  /// Collective over the manager's world. Throws ParallelismError if the sizes do not divide the
  /// world, and MismatchError on every rank if ranks give different options.
  explicit ParallelGroups(const DistributedManager& manager, const ParallelOptions& options = {});

  /// Axes "dp", "pp", "mp", outermost first, over the world. Its groups are the ones below.
  DeviceMesh mesh;
  GroupInfo mp, pp, dp;
  /// The default group: all ranks.
  GroupInfo world;

  /// One line for the log: "8 ranks: data 2 x pipeline 2 x model 2; rank 5: data 1 of [1, 5],
  /// pipeline 0 of [5, 7], model 1 of [4, 5]".
  std::string summary() const;
};

}  // namespace tessera
