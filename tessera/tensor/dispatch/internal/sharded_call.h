#pragma once
// ShardedCall: one call of an operator on sharded tensors whose plan is ready, in six steps:
//
//   choose_memory         whether it runs on the device or in host memory (layout.h)
//   redistribute_inputs   inputs whose spec is not the plan's are redistributed
//   substitute_locals     every tensor on the stack is replaced by this rank's local
//   run_local             the operator, or the rule's function in its place, runs on the locals
//   wrap_results          the results get their specs
//   write_back            what was written to a copy of a view is written to the view's base
//
// Errors that follow from the specs alone are thrown before the fourth step, on every rank or on
// none. A failure from there on may happen on one rank only, and the others are told.

#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/tensor/dispatch/internal/plan_cache.h"

namespace tessera::detail {

class ParameterSource;
struct MeshContext;

class ShardedCall : Pinned {
 public:
  /// The arguments are the last values on `stack`; `plan` was made for arguments like them, and its
  /// mode is not by_functional.
  ShardedCall(const OpInfo& info, ReadyPlan& plan, torch::jit::Stack* stack, const Scan& scan);

  /// Runs the call. Leaves the results on the stack in place of the arguments. Call it once.
  void run();

 private:
  // An argument's local under the plan's spec.
  struct Moved {
    int argument, element;
    at::Tensor local;
    // If this call has redistributed it: the tensor and its move. A tensor that is given as two
    // arguments is moved once.
    at::Tensor source = {};
    const ReadyPlan::Move* move = nullptr;
    // If what was reduced is the tensor that the source is a view of: the local of that.
    at::Tensor below = {};
  };

  void run_steps();
  void refresh_copies() const;
  void check_policy() const;
  void refuse_overlap() const;
  void choose_memory();
  void keep_device_arguments();
  void redistribute_inputs();
  void find_copied();
  void substitute_locals();
  void run_local();
  void wrap_results();
  void write_back() const;

  at::Tensor argument(const ReadyPlan::Move& move) const;
  const Moved* moved_before(const at::Tensor& source, const ShardSpec& to) const;
  void reduce_below(Moved& moved);
  at::Tensor redistributed(const at::Tensor& t, const ReadyPlan::Move& move);
  at::Tensor local_of(const at::Tensor& t, int argument, int element) const;
  at::Tensor placed(at::Tensor local, const ShardMeta& of) const;
  at::Tensor uploaded(const ShardMeta& meta) const;
  c10::Device shown_by(const at::Tensor& result) const;
  void run_local_function();
  void run_on_aliases();
  // `position`: index of the result among those that are not arguments.
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
  // Views of normal tensors are normal in inference mode too: autograd keeps a record of them.
  const bool view_of_normal_;
  // Targets that may change shape are written to through a fresh alias: copies of the tensor share
  // the local of the old meta.
  const bool alias_targets_;
  std::vector<Moved> moved_;
  // The arguments that are written to, by position.
  c10::SmallVector<c10::IValue, 2> targets_;
  // For views of a copy: the copy, and the tensor that it was made of.
  std::shared_ptr<ViewCopy> view_copy_;
  at::Tensor view_base_;
  // A tensor among the arguments lies in host memory, and shows this device.
  const bool offloaded_;
  c10::Device shown_ = c10::kCPU;
  // The call computes in host memory; the program asks for a device other than the one shown.
  bool on_host_ = false, elsewhere_ = false;
  // For a copy of a parameter in another dtype: its source, if it has one.
  std::shared_ptr<ParameterSource> copied_from_;
  std::size_t copied_index_ = 0;
};

/// An intermediate result that is Partial, or a view of all its elements, becomes the reduced
/// value, with all its aliases. Returns false, with nothing done, if `tensor` is neither.
/// Collective.
bool reduce_intermediate(const at::Tensor& tensor);

/// For several targets that are views in memory of their own: what is written to one of them must
/// reach the others before they are written. An operator on lists (_foreach_...) is run element by
/// element, and true returned; for other operators two such views of one tensor are refused with a
/// ShardingError. Returns false, with nothing done, if there are no such targets.
bool run_one_by_one(const OpInfo& info, torch::jit::Stack* stack);

/// Runs the functional form on the sharded tensors: its results become the values of the arguments
/// that are written. Throws ShardingError if `out` cannot take the result.
void run_by_functional(const OpInfo& info, torch::jit::Stack* stack);

}  // namespace tessera::detail
