#pragma once
// ShardedCall: one call of an operator on sharded tensors whose plan is ready. It goes through five
// steps, in this order:
//
//   redistribute_inputs   what the plan wants laid out in another way is moved between ranks
//   substitute_locals     every tensor on the stack is replaced by this rank's local
//   run_local             the operator, or the rule's function in its place, on the locals
//   wrap_results          what came out is given its spec again
//   write_back            what was written to a copy of a view reaches the view's base
//
// What the specs alone decide has been decided before the third step, and has thrown on every rank
// or on none. What fails from there on may fail on one rank only, and the others are told.

#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <vector>

#include "tessera/tensor/dispatch/plan_cache.h"

namespace tessera::detail {

struct MeshContext;

class ShardedCall {
 public:
  /// The arguments are the last values on `stack`; `plan` was made for arguments like them, and its
  /// mode is not by_functional.
  ShardedCall(const OpInfo& info, ReadyPlan& plan, torch::jit::Stack* stack, const Scan& scan);
  ShardedCall(const ShardedCall&) = delete;
  ShardedCall& operator=(const ShardedCall&) = delete;

  /// Once. Leaves the results on the stack in place of the arguments.
  void run();

 private:
  // An argument's local as the plan wants it.
  struct Moved {
    int argument, element;
    at::Tensor local;
    // Of what this call has redistributed: the tensor and its move. One that stands in two
    // arguments is moved once.
    at::Tensor source = {};
    const ReadyPlan::Move* move = nullptr;
  };

  void check_policy() const;
  void refuse_overlap() const;
  void redistribute_inputs();
  void substitute_locals();
  void run_local();
  void wrap_results();
  void write_back() const;

  at::Tensor argument(const ReadyPlan::Move& move) const;
  const Moved* moved_before(const at::Tensor& source, const ShardSpec& to) const;
  at::Tensor redistributed(const at::Tensor& t, const ReadyPlan::Move& move);
  at::Tensor local_of(const at::Tensor& t, int argument, int element) const;
  void run_local_function();
  void run_on_aliases();
  // `position`: of the result among those that are no arguments.
  at::Tensor wrap(at::Tensor local, bool view, std::size_t position);
  at::Tensor wrap_replicated(at::Tensor local, bool view, std::size_t position);
  at::Tensor wrap_ruled(at::Tensor local, bool view, std::size_t position);

  const OpInfo& info_;
  ReadyPlan& plan_;
  torch::jit::Stack& stack_;
  const std::size_t count_, first_;
  // The arguments leave the stack: this keeps the context alive.
  const LayoutPtr like_;
  MeshContext& context_;
  // Views of normal tensors are normal ones in inference mode too: autograd keeps a record of them.
  const bool view_of_normal_;
  // Targets that may change shape are written to through a fresh alias: the local of the old meta
  // is shared by whoever copied the tensor.
  const bool alias_targets_;
  std::vector<Moved> moved_;
  // The arguments that are written, by position.
  c10::SmallVector<c10::IValue, 2> targets_;
  // Behind the views that are made: a copy of what they are views of, and the tensor itself.
  std::shared_ptr<ViewCopy> view_copy_;
  at::Tensor view_base_;
};

/// Views in memory of their own among several targets: what is written to one of them must reach
/// the others before they are written. An operator on lists (_foreach_...) is run on one element
/// after the other, and true returned; of other operators two such views of one tensor are refused
/// with a ShardingError. False: nothing of that kind, and nothing done.
bool run_one_by_one(const OpInfo& info, torch::jit::Stack* stack);

/// Runs the functional form on the sharded tensors: its results become the values of the arguments
/// that are written. Throws ShardingError where `out` cannot take the result.
void run_by_functional(const OpInfo& info, torch::jit::Stack* stack);

}  // namespace tessera::detail
