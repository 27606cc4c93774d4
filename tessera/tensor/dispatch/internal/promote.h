#pragma once
// What happens to the arguments of a call above autograd.
//
// Promotion: a plain tensor that is used together with sharded ones becomes a replicated one; its
// gradient is plain and reduced. Where a program has named rows for a while, plain tensors with as
// many rows that are written to lie as those do.
//
// Mixed precision of parameters: an operator that takes a parameter whose source says so, together
// with data, computes in a lower precision. C++ modules have no hooks, so that operators are where
// the dtype changes, like autocast's, and gradients come back in the parameter's own dtype.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>
#include <vector>

#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail {

struct ShardMeta;

/// True for a tensor that is neither sharded nor undefined nor a number wrapped as a tensor.
bool is_plain(const at::TensorBase& t);

/// The plain tensor as a replicated one. Differentiable: its gradient is demote()d.
at::Tensor promote(const at::Tensor& plain, const std::shared_ptr<MeshContext>& context);
/// The global value as a plain tensor, the same on all ranks. Differentiable: its gradient is
/// promote()d.
at::Tensor demote(const at::Tensor& sharded);

/// True if a node of the graph is that of demote(); from_sharded(): if it makes a plain tensor of a
/// sharded one in any way, as to_local() and full_tensor() do.
bool is_demotion(const torch::autograd::Node& node);
bool from_sharded(const torch::autograd::Node& node);
/// The replicated tensor over the same memory, without a history. Throws ShardingError for a tensor
/// that cannot be one, and, with CheckLevel::collective, MismatchError if the ranks' values differ.
at::Tensor wrap_plain(const at::Tensor& plain, const std::shared_ptr<MeshContext>& context);
/// Plain targets that have been promoted in place, for an operator that may still fail.
class PromotedTargets {
 public:
  void add(const at::Tensor& target);
  /// Undoes the promotion of all targets.
  void restore() const;

 private:
  struct Target {
    at::Tensor tensor;
    c10::intrusive_ptr<c10::TensorImpl> before;
    torch::autograd::Edge history;
  };
  std::vector<Target> targets_;
};

/// Promotes every plain tensor among the arguments, lists and optionals included; targets that are
/// written to are promoted in place. `above`: autograd has not run yet, so that promotion must be
/// differentiable. If it throws, nothing has changed.
PromotedTargets promote_arguments(const OpInfo& info, c10::IValue* arguments,
                                  const std::shared_ptr<MeshContext>& context, bool above);

/// Makes the call whose arguments have been promoted; undoes the promotion if it throws.
template <class Call>
decltype(auto) after_promotion(const PromotedTargets& promoted, Call call) {
  try {
    return call();
  } catch (...) {
    promoted.restore();
    throw;
  }
}

/// Of this thread: a spec of one dim, or empty. OwnedRowsScope (ops) sets it.
ShardSpec& rows_in_scope();

/// The spec of a tensor of this shape whose rows lie as those in scope. Empty: there are none for
/// it.
ShardSpec spec_in_scope(const std::shared_ptr<MeshContext>& context, at::IntArrayRef shape);

/// One load: whether arguments may have to be cast, in a call that takes this tensor.
bool casts_parameters(const ShardMeta& meta);

struct ParameterCasts {
  /// Whether an argument was replaced.
  bool any = false;
  /// The dtype that the first result is to have.
  std::optional<at::ScalarType> output = {};
};

/// Casts, among the arguments of a call, parameters to the dtype that operators compute in, and the
/// other floating-point tensors (but for those without dims and those that are written to) to that
/// dtype as well. Nothing is cast in calls
///   - that write to a parameter, or take parameters alone,
///   - that work element by element on a parameter and tensors of its shape and dtype, as those of
///     an optimizer or a penalty do,
///   - of optimizers on lists, and of batch norm, whose statistics keep their dtype.
/// Ranks agree: it depends on shapes, dtypes and which tensors are parameters alone.
ParameterCasts cast_arguments(const OpInfo& info, c10::IValue* arguments);

/// The result of a call in the dtype that its casts ask for, if it has the one that it computes in.
at::Tensor cast_result(at::Tensor result, const ParameterCasts& casts);
/// The first of the results at the top of the stack.
void cast_result(const OpInfo& info, torch::jit::Stack* stack, const ParameterCasts& casts);

/// For kernels above autograd that are not libtorch's own: casts the tensors in place, by the rules
/// of a call that is not element by element.
ParameterCasts cast_tensors(at::ArrayRef<at::Tensor*> tensors);

}  // namespace tessera::detail
