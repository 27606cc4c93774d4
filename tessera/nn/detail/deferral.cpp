#include "tessera/nn/detail/deferral.h"

#include <ATen/core/enum_tag.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformer.h>

#include <algorithm>
#include <string>

#include "tessera/base/error.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {

namespace detail {

namespace {

// What it writes to that argument depends on nothing that was there.
bool overwrites(const c10::OperatorHandle& op, std::size_t argument) {
  const std::string& name = op.schema().name();
  return op.schema().arguments()[argument].is_out() || name == "aten::fill_" ||
         name == "aten::zero_" || name == "aten::copy_" ||
         (op.hasTag(at::Tag::nondeterministic_seeded) && name.find("dropout") == std::string::npos);
}

}  // namespace

std::size_t Tape::blank(const at::Tensor& meta, const std::string& name) {
  const std::lock_guard lock(mutex_);
  const std::size_t value =
      add_made({0, meta.sizes().vec(), meta.scalar_type(), name}, name,
               [shape = meta.sizes().vec(), dtype = meta.scalar_type()](const ShardSpec* spec,
                                                                        c10::Device device) {
                 const auto options = at::TensorOptions(dtype).device(device);
                 return spec ? empty(*spec, options) : at::empty(shape, options);
               });
  steps_.back().blank = true;
  return value;
}

std::int64_t Tape::count(std::size_t value) const {
  return c10::multiply_integers(values_[value].shape);
}

std::string Tape::unsaid(std::size_t value) const {
  const std::lock_guard lock(mutex_);
  struct Unknown {
    std::string name;
    std::int64_t count = 0;
  };
  std::unordered_map<std::size_t, Unknown> unknown;  // by memory
  for (const Step* step : steps_of({value})) {
    const auto& arguments = step->op.schema().arguments();
    std::optional<std::string> taken;
    if (step->blank) taken = step->what;
    for (const Use& use : step->uses) {
      const auto at = unknown.find(values_[use.value].memory);
      if (at == unknown.end()) continue;
      if (!arguments[use.argument].alias_info()) taken = at->second.name;
    }
    for (const Use& use : step->uses) {
      const auto at = unknown.find(values_[use.value].memory);
      const auto* alias = arguments[use.argument].alias_info();
      const bool all = at != unknown.end() && count(use.value) == at->second.count;
      if (all && alias && alias->isWrite() && overwrites(step->op, use.argument)) unknown.erase(at);
    }
    for (const std::size_t memory : taken ? step->touched : std::vector<std::size_t>()) {
      // The first value of a memory is all of it, and no view.
      const auto base = std::ranges::find(values_, memory, &Value::memory);
      unknown.try_emplace(memory,
                          Unknown{*taken, count(static_cast<std::size_t>(base - values_.begin()))});
    }
  }
  const auto at = unknown.find(values_[value].memory);
  return at == unknown.end() ? "" : at->second.name;
}

void require_said(const std::string& who, const Recorded& deferred) {
  const std::string name = deferred.tape->unsaid(deferred.value);
  if (!name.empty())
    throw InvalidArgument(who, ": '", name,
                          "' was on the meta device, and nothing says what its values are: give "
                          "defer() a function that initialises its module, call fill_deferred(), "
                          "or write to all of it (fill_, copy_) before it is placed");
}

Deferral::Deferral(const std::vector<NamedTensor>& tensors, bool host_too)
    : tape_(std::make_shared<Tape>(host_too)) {
  require_no_scope("defer");
  Tape::ensure_registered();
  std::vector<NamedTensor> fresh;
  std::unordered_map<const void*, std::string> memory;
  bool any = false;
  for (const NamedTensor& entry : tensors) {
    const auto& [name, t, parameter] = entry;
    if (!t.defined() || !t.is_meta()) continue;
    any = true;
    if (is_deferred(t) || !taken_.emplace(t.unsafeGetTensorImpl(), t).second) continue;
    if (t.layout() != at::kStrided || t.grad().defined() || t.grad_fn())
      throw InvalidArgument("defer: '", name, "' is not dense, or has a gradient or a graph");
    const auto [at, first] = memory.emplace(t.storage().unsafeGetStorageImpl(), name);
    if (!first && t.numel() > 0)
      throw InvalidArgument("defer: '", name, "' and '", at->second,
                            "' are different tensors in the same memory: make them one tensor, or "
                            "copies");
    fresh.push_back(entry);
  }
  if (!any)
    throw InvalidArgument(
        "defer: no parameter or buffer is on the meta device: what has values can be placed as it "
        "is");
  for (const auto& [name, t, parameter] : fresh) mark(t, tape_, tape_->blank(t, name));
}

bool Deferral::begin(const std::vector<at::Tensor>& parameters,
                     const std::vector<at::Tensor>& buffers, const std::vector<at::Tensor>& own) {
  const auto here = [&](const at::Tensor& t) { return taken_.contains(t.unsafeGetTensorImpl()); };
  if (!std::ranges::all_of(parameters, here)) return false;
  if (parameters.empty() && std::ranges::none_of(buffers, here)) return false;
  own_ = own;
  for (const at::Tensor& t : own) {
    if (!here(t) || !written_.contains(t.unsafeGetTensorImpl())) continue;
    aside_.emplace_back(t, recorded(t)->value);
    mark(t, tape_, tape_->blank(t, ""));
  }
  recording_.emplace(tape_);
  return true;
}

void Deferral::end() {
  recording_.reset();
  for (const auto& [t, value] : aside_) mark(t, tape_, value);
  for (const at::Tensor& t : own_) {
    const Recorded* is = recorded(t);
    if (is && is->tape->unsaid(is->value).empty()) written_.insert(t.unsafeGetTensorImpl());
  }
  aside_.clear();
  own_.clear();
}

void Deferral::undo() {
  end();
  for (const auto& [impl, t] : taken_) unmark(t);
}

namespace {

namespace nn = torch::nn;

template <class... Layers>
bool reset_one_of(nn::Module& module) {
  const auto reset = [](auto* layer) {
    if (layer) layer->reset_parameters();
    return layer != nullptr;
  };
  return (reset(dynamic_cast<Layers*>(&module)) || ...);
}

// Children first, each once.
void initialise(nn::Module& module, const std::function<void(nn::Module&)>& with,
                Deferral& deferral, std::unordered_set<const nn::Module*>& seen) {
  if (!seen.insert(&module).second) return;
  for (const auto& child : module.children()) initialise(*child, with, deferral, seen);
  std::vector<at::Tensor> own = module.parameters(/*recurse=*/false);
  for (const at::Tensor& b : module.buffers(/*recurse=*/false)) own.push_back(b);
  if (!deferral.begin(module.parameters(), module.buffers(), own)) return;
  with(module);
  deferral.end();
}

}  // namespace

}  // namespace detail

void reset_parameters(torch::nn::Module& module) {
  namespace nn = torch::nn;
  const bool known =
      detail::reset_one_of<nn::LinearImpl, nn::BilinearImpl, nn::EmbeddingImpl,
                           nn::EmbeddingBagImpl, nn::LayerNormImpl, nn::GroupNormImpl,
                           nn::TransformerImpl>(module) ||
      detail::reset_one_of<nn::Conv1dImpl, nn::Conv2dImpl, nn::Conv3dImpl, nn::ConvTranspose1dImpl,
                           nn::ConvTranspose2dImpl, nn::ConvTranspose3dImpl>(module) ||
      detail::reset_one_of<nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl,
                           nn::InstanceNorm1dImpl, nn::InstanceNorm2dImpl, nn::InstanceNorm3dImpl>(
          module) ||
      detail::reset_one_of<nn::RNNImpl, nn::LSTMImpl, nn::GRUImpl, nn::RNNCellImpl,
                           nn::LSTMCellImpl, nn::GRUCellImpl>(module);
  if (known) return;
  if (auto* attention = dynamic_cast<nn::MultiheadAttentionImpl*>(&module))
    attention->_reset_parameters();
  if (auto* slopes = dynamic_cast<nn::PReLUImpl*>(&module)) {
    const at::NoGradGuard no_grad;
    slopes->weight.fill_(slopes->options.init());
  }
}

void defer(torch::nn::Module& module, const std::function<void(torch::nn::Module&)>& initialise) {
  if (!initialise) throw InvalidArgument("defer: there is no function that initialises a module");
  detail::Deferral deferral(named_tensors(module), /*host_too=*/false);
  try {
    std::unordered_set<const torch::nn::Module*> seen;
    detail::initialise(module, initialise, deferral, seen);
  } catch (...) {
    deferral.undo();
    throw;
  }
}

void defer(const std::vector<NamedTensor>& tensors) {
  const detail::Deferral deferral(tensors, /*host_too=*/false);
}

}  // namespace tessera
