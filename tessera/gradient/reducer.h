#pragma once
// GradientReducer: sums or averages the gradients of many parameters over their groups, in buckets,
// while backward still runs.
//
//   GradientReducer reducer({{weight, "weight", group}, {bias, "bias", group}});
//   loss.backward();                  // when it returns, every .grad() is the mean over the group
//
// How it works. A hook on each parameter fires once its gradient is accumulated. When all gradients
// of a bucket have been accumulated they are packed into one flat tensor, and its all-reduce
// starts. Buckets start in a fixed order, never in order of arrival, so that ranks agree. At the
// end of backward the remaining buckets start (parameters may be unused), the reducer waits for all
// of them and writes the results back. Flags at the end of each bucket say whether any rank used a
// parameter: one that no rank used keeps the gradient that it has, as in one process.
//
// Accumulation. Gradients that were accumulated in a NoSync scope are reduced together with those
// of the next synchronised backward. A second backward onto gradients that are already reduced is
// right as well: a mean over ranks leaves equal values as they are, mean(R + g_r) = R + mean(g_r),
// and of a sum the group's first rank alone keeps what has been reduced, sum([R] + g_r) = R +
// sum(g_r). What a program puts in the place of a reduced gradient counts as reduced, too.
//
// Several reducers of one parameter work one after the other, in the order in which they were
// made: a mean over the ranks of a host and then over hosts, or a sharded parameter's own mesh and
// then its replicas.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/comm/group/group.h"
#include "tessera/gradient/sync.h"

namespace tessera {

/// The factor by which `op` multiplies the sum of `ranks` gradients: 1 / ranks for a mean. Nothing
/// for operations that are no multiple of the sum, and for premultiplied, where each rank has a
/// factor of its own.
std::optional<double> scale_of(ReduceOp op, int ranks);

/// What one rank contributes to the gradient of one parameter, and the ranks over which the
/// contributions are reduced.
struct UnreducedGradient {
  /// Undefined: this rank contributes nothing.
  at::Tensor value;
  /// The ranks over which the values are all-reduced.
  Group group;
  /// The dim along which the values are first reduce-scattered over `scatter`, so that each rank
  /// goes on with its own rows alone; below 0: they are not.
  int scatter_dim = -1;
  Group scatter = Group();
  /// How many rows each rank of `scatter` keeps.
  Sizes rows = {};
  /// The dtype in which they travel and are added up, if GradientAccess::uniform(); none: their
  /// own.
  std::optional<at::ScalarType> message = {};
};

/// How the reducer sees the gradient of one kind of parameter. The default is a plain leaf: all of
/// its .grad() is to be reduced.
class GradientAccess {
 public:
  virtual ~GradientAccess();
  /// A tensor with the shape, dtype and device of what this rank contributes.
  virtual at::Tensor like(const at::Tensor& parameter) const;
  /// Shape, dtype and whatever else must be the same on all ranks, for the message when it is not.
  virtual std::string describe(const at::Tensor& parameter) const;
  /// This rank's contribution. `group`: as ReducedParameter says.
  virtual UnreducedGradient unreduced(const at::Tensor& parameter, const Group& group) const;
  /// True if all ranks run the same backward, so that either all of them have something to reduce
  /// or none has, over the same groups. Then no flags are sent, parameters without a contribution
  /// are left out, and what is accumulated after a bucket has started is reduced as well.
  virtual bool uniform() const { return false; }
  /// Called if uniform(), once the value of unreduced() has been packed: the gradient's memory may
  /// be released until store() is called.
  virtual void packed(const at::Tensor& parameter) const;
  /// The gradient is reduced already, more is about to be accumulated onto it, and another rank
  /// contributes what has been reduced to the sum: this one starts from nothing.
  virtual void start_from_nothing(const at::Tensor& parameter) const;
  /// Makes `reduced`, of the shape of like(), the gradient. Its memory belongs to the caller: it
  /// may be kept only if `keep` is true.
  virtual void store(const at::Tensor& parameter, const at::Tensor& reduced, bool keep) const;
};

struct ReducedParameter {
  /// A leaf that requires grad.
  at::Tensor parameter;
  /// The name in error messages.
  std::string name;
  /// The ranks over which its gradient is reduced.
  Group group;
  /// avg, sum, or premultiplied by this rank's weight, which may differ between ranks; others
  /// reduce what stands in .grad(), whatever has been reduced before.
  ReduceOp op = ReduceOp::avg;
  /// nullptr: a plain leaf.
  std::shared_ptr<const GradientAccess> access = nullptr;
  /// Parameters of different units never share a bucket.
  std::size_t unit = 0;
};

struct ReducerOptions {
  /// Small, so that communication starts early in backward.
  std::int64_t first_bucket_bytes = 1 << 20;
  std::int64_t bucket_bytes = 25 << 20;
  /// false: everything is reduced at the end of backward.
  bool overlap = true;
  /// Gradients share the buckets' memory: one copy less, but a gradient that the caller kept is
  /// overwritten by the next backward.
  bool gradient_as_bucket_view = false;
  /// Buckets start in the order in which the first backward completed them, which the group's first
  /// rank broadcasts, instead of the last parameter's first. Needs one group for all parameters.
  bool learn_order = false;
};

class GradientReducer : Pinned {
 public:
  /// Collective over the groups named. Parameters are not kept alive: one that is gone is as one
  /// that was not used. Throws InvalidArgument for a parameter that is no leaf, does not require
  /// grad, or is listed twice; MismatchError on every rank if the ranks' parameters differ in
  /// number, name, shape, dtype or operation; GradientError if a parameter is reduced over some of
  /// the same ranks already, unless both take the mean.
  ///
  /// backward() throws GradientError where a gradient does not fit the operation: a mean of what
  /// sharded tensors leave as parts of a sum, a sum of what they leave complete, a sum of losses
  /// that mean_loss() scaled for a mean; and where a gradient has another shape than expected.
  explicit GradientReducer(std::vector<ReducedParameter> parameters, ReducerOptions options = {});

  /// False inside a NoSync scope.
  bool syncing() const;

  /// Reduces now what has been accumulated and not been reduced. For a rank whose backward touched
  /// no parameter at all while others' did, and after NoSync scopes without a last backward.
  void reduce();

  /// Parameter indices of each bucket, in the order in which buckets start.
  const std::vector<std::vector<std::size_t>>& buckets() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
