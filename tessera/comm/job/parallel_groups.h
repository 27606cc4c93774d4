#pragma once
// Model, pipeline and data parallelism given by two numbers, for code that is written without a
// handle.
//
//   init_parallelism(2, 2);                          // on 8 ranks; on every rank
//   auto& groups = parallelism();
//   groups.mp.group.ranks()                          // rank 5: {4, 5};  .pp: {5, 7};  .dp: {1, 5}
//   at::Tensor mine = groups.mp.split(weights, 0);   // this rank's rows
//   at::Tensor all = groups.mp.gather(mine, 0);      // what was split
//   reset_parallelism();
//
// On 8 ranks, model 2 and pipeline 2: model [0,1] [2,3] [4,5] [6,7], pipeline [0,2] [1,3] [4,6]
// [5,7], data [0,4] [1,5] [2,6] [3,7].
//
// These calls, and no others of Tessera, use a current manager: one a thread, since ranks may be
// threads.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/comm/job/manager.h"

namespace tessera {

/// Sizes that do not fit the world, or calls in the wrong order.
class ParallelismError : public ConfigurationError {
 public:
  using ConfigurationError::ConfigurationError;
  ~ParallelismError() override;
};

/// A tensor whose values are there after wait(). Converts to the tensor, waiting.
struct PendingTensor {
  /// Shape, dtype and autograd history are right from the start.
  at::Tensor tensor;
  Request request;
  at::Tensor wait() {
    request.wait();
    return tensor;
  }
  operator at::Tensor() { return wait(); }
};

/// One kind of parallelism, as this rank sees it.
struct GroupInfo {
  Group group;
  /// In group order.
  std::vector<int> global_ranks;
  /// This rank's place in it.
  int rank = 0;
  int world_size = 1;

  /// All-reduce in place. With `async` the request is under way when this returns, else complete.
  /// Not recorded by autograd.
  Request reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum, bool async = false) const;
  /// This rank's slice of a tensor that all ranks hold: the first n mod world_size ranks get one
  /// row more, none is lost; a copy. [7, 2] along dim 0 over 3 ranks: 3, 2, 2 rows. Its gradient is
  /// gathered: every rank's backward must run.
  at::Tensor split(const at::Tensor& tensor, std::int64_t dim = 0) const;
  /// The ranks' slices joined along `dim`, in group order, any sizes. Inverse of split, both ways;
  /// its gradient is split. All ranks use the result alike, and so hold the same gradient of it.
  /// Sizes are exchanged first (one small call, which blocks).
  PendingTensor gather(const at::Tensor& tensor, std::int64_t dim = 0, bool async = false) const;
};

struct ParallelGroups {
  GroupInfo mp, pp, dp;
  /// The default group: all ranks.
  GroupInfo world;
};

/// Backend of each kind; empty: the manager's.
struct ParallelBackends {
  std::string model, pipeline, data;
};

/// This thread's manager; made by DistributedManager::initialize() if none was set.
DistributedManager current_manager();
void set_current_manager(const DistributedManager& manager);
bool has_current_manager();
/// Forgets it: if this was the last handle, the manager ends. Throws ParallelismError while
/// parallelism is initialized on it.
void clear_current_manager();

/// Collective over the world of the current manager. Ranks that give different numbers all get a
/// MismatchError. Throws ParallelismError if the sizes do not divide the world, or if parallelism
/// is initialized already.
const ParallelGroups& init_parallelism(int model_parallelism = 1, int pipeline_parallelism = 1,
                                       const ParallelBackends& backends = {});
bool parallelism_is_initialized();
/// Throws ParallelismError before init_parallelism().
const ParallelGroups& parallelism();
/// Destroys the groups: handles to them throw CommError from then on. Collective. Does nothing if
/// nothing is initialized.
void reset_parallelism();

}  // namespace tessera
