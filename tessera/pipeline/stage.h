#pragma once
// A stage of a pipeline: what one rank computes of a micro-batch between two messages.
//
//   auto first = make_stage(torch::nn::Sequential(Linear(8, 16), Tanh()));    // one tensor to one
//   auto tail = make_stage(decoder, [decoder](const std::vector<at::Tensor>& x) mutable {
//     return std::vector<at::Tensor>{decoder->forward(x[0], x[1])};           // lists of tensors
//   });
//
// or a class of one's own that derives from PipelineStage.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/base/pinned.h"

namespace tessera {

struct NamedTensor;

class PipelineStage : Pinned {
 public:
  virtual ~PipelineStage();

  /// Outputs of one micro-batch from its inputs: those of the stage before (of the batch, on the
  /// first stage), then one tensor for each skip connection that ends here. The outputs are those
  /// for the next stage, then one for each skip connection that begins here. Those that require
  /// grad carry gradients back. They are dense tensors, plain ones or sharded ones of the stage's
  /// mesh (stage_mesh()): of those each rank sends its local to the rank at the same place of the
  /// next stage, where they arrive as sharded tensors that lie alike. Called once a micro-batch,
  /// twice where the stage recomputes.
  virtual std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) = 0;
  /// The leaves that the stage trains.
  virtual std::vector<at::Tensor> parameters() const = 0;
  /// What a second forward of the same micro-batch must leave as it is (running statistics).
  virtual std::vector<at::Tensor> buffers() const { return {}; }
  /// What a deferred stage (tessera/nn/deferred.h) is to be filled with: parameters that are not
  /// trained, too. The default: parameters() and buffers(), under their numbers.
  virtual std::vector<NamedTensor> tensors() const;
  /// True: nothing but the inputs is kept between forward and backward, which runs the forward
  /// again, with the same random numbers. Such a stage's backward is never split.
  virtual bool recomputes() const { return false; }

  /// True: the stage's parameters are fully sharded. The pipeline then calls gather() before the
  /// first computation of a step, release() after the last one (or more often, where
  /// PipelineOptions::gathered_at_once says so), and nothing else is to gather meanwhile.
  virtual bool sharded() const { return false; }
  virtual void gather() {}
  virtual void release() {}
  /// Reduces the step's gradients over the ranks that share the parameters, once a step, after the
  /// stage's last backward. The default: all that is known to reduce one of parameters()
  /// (DistributedDataParallel, distribute_module, any GradientSync) and is not held back by a
  /// NoSync scope of the caller.
  virtual void reduce();
};

struct StageOptions {
  /// PipelineStage::recomputes().
  bool recompute = false;
  /// PipelineStage::gather() and release(), for a module that fully_shard() has sharded:
  ///   make_stage(net, {.gather = gather_parameters, .release = release_parameters})
  /// Both or none.
  std::function<void(const torch::nn::Module&)> gather = nullptr, release = nullptr;
};

using StageFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// `module` owns the parameters and buffers, `forward` computes.
std::shared_ptr<PipelineStage> make_stage(std::shared_ptr<torch::nn::Module> module,
                                          StageFunction forward, const StageOptions& options = {});

namespace detail {
/// Throws InvalidArgument unless a module that takes one tensor is given one.
void require_one(std::size_t inputs);
}  // namespace detail

/// The module's own forward, of one tensor or of a list, returning one tensor or a list. `Module`:
/// a module holder (what TORCH_MODULE makes) or a shared_ptr to a module. A module that takes one
/// tensor refuses several (a skip that ends at the stage, say) with InvalidArgument.
template <class Module>
std::shared_ptr<PipelineStage> make_stage(Module module, const StageOptions& options = {}) {
  std::shared_ptr<torch::nn::Module> owner;
  if constexpr (requires { module.ptr(); })
    owner = module.ptr();
  else
    owner = module;
  const auto listed = [](auto result) -> std::vector<at::Tensor> {
    if constexpr (std::is_convertible_v<decltype(result), at::Tensor>)
      return {std::move(result)};
    else
      return result;
  };
  return make_stage(
      std::move(owner),
      [module, listed](const std::vector<at::Tensor>& inputs) mutable -> std::vector<at::Tensor> {
        if constexpr (requires { module->forward(inputs[0]); }) {
          detail::require_one(inputs.size());
          return listed(module->forward(inputs[0]));
        } else {
          return listed(module->forward(inputs));
        }
      },
      options);
}

// A torch::nn::Sequential cut into stages, which share its children.
//
//   split_sequential(net, {3, 5})                     // children 0-2, 3-4, 5 and on
//   split_sequential(net, {"decoder"})                // up to the child of that name, and from it
//   split_sequential(net, balanced_cuts(parameter_costs(net), 4))

/// Stage i holds the children from cuts[i - 1] to cuts[i] - 1. Throws InvalidArgument where the
/// cuts do not ascend within the children, or a stage would be empty.
std::vector<torch::nn::Sequential> split_sequential(const torch::nn::Sequential& net,
                                                    const std::vector<int>& cuts);
/// Each name is that of the child that begins a stage. Throws InvalidArgument for an unknown name.
std::vector<torch::nn::Sequential> split_sequential(const torch::nn::Sequential& net,
                                                    const std::vector<std::string>& names);

/// Cuts for `stages` stages of consecutive children, so that the largest sum of costs is as small
/// as can be; of equal ones, with the earlier stages as full as that allows. No stage is empty.
/// Throws InvalidArgument for fewer children than stages, and costs that are negative or not
/// finite.
///
///   balanced_cuts({1, 1, 4, 1, 1}, 3) -> {2, 3}
std::vector<int> balanced_cuts(const std::vector<double>& costs, int stages);

/// The number of elements of each child's parameters, plus 1.
std::vector<double> parameter_costs(const torch::nn::Sequential& net);

}  // namespace tessera
