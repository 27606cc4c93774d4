#include "tessera/tensor/distribute_module.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <memory>
#include <unordered_map>

#include "tessera/base/text.h"
#include "tessera/tensor/detail/layout.h"
#include "tessera/tensor/detail/mesh_context.h"
#include "tessera/tensor/detail/promote.h"

namespace tessera {

namespace {

// Once a gradient is accumulated it is laid out like its parameter. Only what differs travels: a gradient that is already reduced is left alone.
struct GradientPlacement final : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor& parameter) override {
    at::Tensor& grad = parameter.mutable_grad();
    if (!grad.defined()) return;
    const ShardSpec wanted = spec(parameter);
    if (!is_sharded(grad)) grad = detail::promote(grad, detail::context_of(wanted));
    if (!(spec(grad) == wanted)) grad = redistribute(grad, wanted);
  }
};

}  // namespace

void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const ModuleRule& rule) {
  struct Entry {
    std::string name;
    at::Tensor tensor;
  };
  std::vector<Entry> all;
  std::unordered_map<const void*, std::string> impls, memory;
  const auto collect = [&](const std::string& name, const at::Tensor& t) {
    if (!t.defined() || impls.contains(t.unsafeGetTensorImpl())) return;  // one tensor under two names is one tensor
    if (is_sharded(t)) throw ShardingError(concat("distribute_module: ", name, " is a ShardTensor already: ", spec(t)));
    if (t.grad().defined() || t.grad_fn())
      throw ShardingError(
          concat("distribute_module: ", name, " has a gradient or a graph: call it before the first backward, or zero_grad() with set_to_none"));
    if (t.numel() > 0) {
      const auto [at, fresh] = memory.emplace(t.storage().unsafeGetStorageImpl(), name);
      if (!fresh)
        throw ShardingError(
            concat("distribute_module: ", name, " and ", at->second, " are different tensors in the same memory: make them one tensor, or copies"));
    }
    impls.emplace(t.unsafeGetTensorImpl(), name);
    all.push_back({name, t});
  };
  for (const auto& p : module.named_parameters()) collect(p.key(), p.value());
  for (const auto& b : module.named_buffers()) collect(b.key(), b.value());
  const std::vector<Placement> replicated(mesh.layout().dims());
  // All that can be refused is refused before anything is changed.
  std::vector<std::pair<at::Tensor, at::Tensor>> changes;
  for (const Entry& entry : all) {
    const auto given = rule ? rule(entry.name, entry.tensor) : std::nullopt;
    const ParameterPlacement where = given ? *given : ParameterPlacement{replicated};
    const at::NoGradGuard no_grad;
    at::Tensor sharded;
    try {
      sharded = distribute_tensor(entry.tensor.detach(), mesh, where.placements, where.sizes);
    } catch (const InvalidArgument& e) {
      throw InvalidArgument(concat("distribute_module: ", entry.name, ": ", e.what()));
    }
    if (spec(sharded).has_partial()) throw InvalidArgument(concat("distribute_module: ", entry.name, " cannot be partial: ", list(where.placements)));
    if (spec(sharded).has_shard()) sharded = sharded.clone();  // a slice would keep the whole alive
    changes.emplace_back(entry.tensor, sharded);
  }
  for (auto& [tensor, sharded] : changes) {
    tensor.set_data(sharded);
    if (tensor.requires_grad()) torch::autograd::impl::set_post_acc_grad_hooks(tensor, std::make_unique<GradientPlacement>());
  }
}

}  // namespace tessera
