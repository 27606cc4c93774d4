#pragma once
// The autograd graph of one stage for one micro-batch, from its inputs to its outputs, with a
// backward that may run in two halves: gradients of the inputs, and those of the parameters later.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <vector>

namespace tessera::detail {

/// How the halves are kept apart. Let A be the nodes from which the inputs are reached. The first
/// half runs A alone, captures the gradients of the inputs and, at each node of A that also leads
/// to something else (a parameter, in the end), the gradient that arrives there; such a node
/// computes only what goes on inside A, since the engine asks it for nothing else. Then all other
/// nodes of A release what they saved, and the edges inside A are taken out of those nodes. The
/// second half starts at those nodes with the captured gradients: without the edges they compute
/// only what was left out. Each product is computed once, and parameters may be used several times.
/// (torch.distributed.pipelining groups parameters by the nodes where their paths meet those of the
/// inputs, and runs the second half for each group.)
///
/// A node that runs in both halves must be able to compute one without the other, which the
/// generated ones are: where it is of a user's own Function, a fused recurrent layer, or has hooks,
/// the first half runs the full backward, and the second has nothing to do.
class StageGraph {
 public:
  /// The values as the stage is to see them: where wants[i] is true, their history begins here.
  std::vector<at::Tensor> enter(const std::vector<at::Tensor>& values,
                                const std::vector<bool>& wants);
  /// What the stage made of them. The tensors are not kept, what their history saved is.
  void leave(const std::vector<at::Tensor>& outputs);

  /// Gradients of the values that were entered, undefined where there is none, from those of the
  /// outputs (undefined: none). Those of the parameters are accumulated.
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& gradients);
  /// The first half. Those of the parameters are accumulated by weight_gradients().
  std::vector<at::Tensor> input_gradients(const std::vector<at::Tensor>& gradients);
  void weight_gradients();

 private:
  std::vector<at::Tensor> leaves_;
  /// Of each leaf, what its gradient is captured at; invalid where none is wanted.
  std::vector<torch::autograd::Edge> entries_;
  std::vector<torch::autograd::Edge> roots_;
  std::vector<torch::autograd::Edge> later_;
  std::vector<at::Tensor> later_gradients_;
};

}  // namespace tessera::detail
