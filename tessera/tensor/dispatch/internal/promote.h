#pragma once
// Promotion: a plain tensor that is used together with sharded ones becomes a replicated one; its
// gradient is plain and reduced.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

#include "tessera/tensor/dispatch/internal/op_info.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace torch::autograd {
struct Node;
}

namespace tessera::detail {

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

}  // namespace tessera::detail
