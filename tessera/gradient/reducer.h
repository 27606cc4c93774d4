#pragma once
// GradientReducer: sums or averages the gradients of many parameters over their groups, in buckets,
// while backward still runs.
//
//   GradientReducer reducer({{weight, "weight", group}, {bias, "bias", group}});
//   loss.backward();                  // when it returns, every .grad() is the mean over the group
//
// How it works. A hook on each parameter fires once its gradient is accumulated. When all gradients
// of a bucket are there they are copied into one flat tensor, and its all-reduce starts; buckets
// start in a fixed order, never in order of arrival, so that ranks agree. The end of backward
// starts what is left (parameters that were not used), waits, and writes the results back. Flags
// that travel at the end of each bucket tell whether any rank used a parameter: one that no rank
// used keeps the gradient that it has, as in one process.
//
// Accumulation. Gradients that were accumulated in a no_sync() scope are reduced together with
// those of the next synchronised backward. A second backward onto gradients that are already
// reduced is right as well, because a mean over ranks leaves equal values as they are: mean(R +
// g_r) = R + mean(g_r). (A parameter reduced with ReduceOp::sum must therefore say, through its
// GradientAccess, which part of its gradient is still owed.)

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera {

/// What this rank owes for one parameter: its term, and the ranks whose terms are reduced with it.
struct OwedGradient {
  /// Undefined: nothing.
  at::Tensor value;
  /// Its ranks' values are reduced.
  Group group;
  /// Where `scatter_dim` is a dim: before that, the values are reduced over `scatter`, and each of
  /// its ranks keeps its rows of that dim alone.
  int scatter_dim = -1;
  Group scatter = Group();
  /// Of each rank of `scatter`.
  Sizes rows = {};
};

/// How the reducer sees the gradient of one kind of parameter. The default is a plain leaf: all of
/// its .grad() is owed.
class GradientAccess {
 public:
  virtual ~GradientAccess();
  /// A tensor with the shape, dtype and device of what this rank contributes.
  virtual at::Tensor like(const at::Tensor& parameter) const;
  /// Shape, dtype and whatever else must be the same on all ranks, for the message when it is not.
  virtual std::string describe(const at::Tensor& parameter) const;
  /// This rank's contribution. `group`: as ReducedParameter says.
  virtual OwedGradient owed(const at::Tensor& parameter, const Group& group) const;
  /// All ranks run the same backward, so that either all owe a gradient or none does, and they owe
  /// it over the same groups. Then no flags travel, only what is owed does, and what is accumulated
  /// after it has started is reduced as well.
  virtual bool alike() const { return false; }
  /// The value of owed() is on its way, if alike(): the gradient's memory may be given up until
  /// store().
  virtual void taken(const at::Tensor& parameter) const;
  /// Takes the reduced value, of the shape of like(). `reduced` is the caller's own: it may be kept
  /// only if `keep` is true.
  virtual void store(const at::Tensor& parameter, const at::Tensor& reduced, bool keep) const;
};

struct ReducedParameter {
  /// A leaf that requires grad.
  at::Tensor parameter;
  /// For messages.
  std::string name;
  /// Over which its gradient is reduced.
  Group group;
  ReduceOp op = ReduceOp::avg;
  /// nullptr: a plain leaf.
  std::shared_ptr<const GradientAccess> access = nullptr;
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
};

class GradientReducer {
 public:
  /// Collective over the groups named. Parameters are not kept alive: one that is gone is as one
  /// that was not used. Throws InvalidArgument for a parameter that is no leaf, does not require
  /// grad, or stands twice; MismatchError on every rank if the ranks' parameters differ in number,
  /// name, shape, dtype or operation.
  explicit GradientReducer(std::vector<ReducedParameter> parameters, ReducerOptions options = {});
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// While it lives, backward accumulates locally and nothing is sent. Scopes nest. All ranks must
  /// open and close them alike.
  class NoSync {
   public:
    explicit NoSync(GradientReducer& reducer);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::shared_ptr<void> scope_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(*this); }

  /// False inside a no_sync() scope.
  bool syncing() const;

  /// Reduces now what is owed. For a rank whose backward touched no parameter at all while others'
  /// did, and after no_sync() scopes without a last backward.
  void reduce();

  /// Parameter indices of each bucket, in the order in which buckets start.
  const std::vector<std::vector<std::size_t>>& buckets() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
