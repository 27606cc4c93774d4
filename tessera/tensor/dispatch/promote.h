#pragma once
// Promotion: a plain tensor that meets sharded ones becomes a replicated one, and its gradient
// comes back plain and reduced.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

#include "tessera/tensor/dispatch/op_info.h"
#include "tessera/tensor/spec/mesh_context.h"

namespace torch::autograd {
struct Node;
}

namespace tessera::detail {

/// Neither sharded nor undefined nor a number wrapped as a tensor.
bool is_plain(const at::TensorBase& t);

/// Differentiable: the gradient is demote()d.
at::Tensor promote(const at::Tensor& plain, const std::shared_ptr<MeshContext>& context);
/// The whole value as a plain tensor, the same on all ranks. Differentiable: the gradient is
/// promote()d.
at::Tensor demote(const at::Tensor& sharded);

/// Whether a node of the graph is that of demote(), or makes a plain tensor of a sharded one in any
/// way: to_local() and full_tensor() do it, too.
bool is_demotion(const torch::autograd::Node& node);
bool from_sharded(const torch::autograd::Node& node);
/// The replicated tensor over the same memory, without a history. Throws ShardingError for a tensor
/// that cannot be one, and at the collective level of checking MismatchError where the ranks'
/// values differ.
at::Tensor wrap_plain(const at::Tensor& plain, const std::shared_ptr<MeshContext>& context);
/// Plain targets that have been promoted where they stand, for an operator that may yet fail.
class PromotedTargets {
 public:
  void add(const at::Tensor& target);
  /// They are what they were.
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
/// written to, where they stand. `above`: autograd still has its turn, so that promotion must be
/// differentiable. What it throws has changed nothing.
PromotedTargets promote_arguments(const OpInfo& info, c10::IValue* arguments,
                                  const std::shared_ptr<MeshContext>& context, bool above);

/// Makes the call whose arguments have been promoted.
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
