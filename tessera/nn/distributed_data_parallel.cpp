#include "tessera/nn/distributed_data_parallel.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>

#include "tessera/base/text.h"
#include "tessera/comm/agreement.h"
#include "tessera/gradient/coalesced.h"

namespace tessera::detail {

DataParallelEngine::DataParallelEngine(std::shared_ptr<torch::nn::Module> module, Group group, DistributedDataParallelOptions options)
    : module_(std::move(module)), group_(std::move(group)), options_(std::move(options)) {
  std::set<std::string> unknown(options_.ignore.begin(), options_.ignore.end());
  auto ignored = [&](const std::string& name) {
    unknown.erase(name);
    return std::find(options_.ignore.begin(), options_.ignore.end(), name) != options_.ignore.end();
  };
  std::vector<at::Tensor> state;
  std::vector<ReducedParameter> reduced;
  std::set<const c10::TensorImpl*> seen;  // a tensor registered under two names travels once
  std::string text;
  for (const auto& item : module_->named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (ignored(item.key()) || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    state.push_back(parameter);
    text += concat("parameter '", item.key(), "', shape ", parameter.sizes(), ", ", parameter.scalar_type(),
                   parameter.requires_grad() ? "" : ", frozen", "\n");
    if (parameter.requires_grad()) reduced.push_back({parameter, item.key(), group_});
  }
  for (const auto& item : module_->named_buffers()) {
    if (ignored(item.key()) || !seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    state.push_back(item.value());
    text += concat("buffer '", item.key(), "', shape ", item.value().sizes(), ", ", item.value().scalar_type(), "\n");
  }
  for (const std::string& name : unknown) text += concat("to ignore, but not in the module: '", name, "'\n");
  require_agreement(group_, "the module", text);
  if (!unknown.empty())
    throw InvalidArgument(
        concat("the module has no parameter or buffer named ", list(unknown), "; names to ignore are as in named_parameters() and named_buffers()"));
  broadcast_coalesced(state, group_, 0);
  reducer_ = std::make_unique<GradientReducer>(std::move(reduced), options_.reducer);
}

std::vector<at::Tensor> DataParallelEngine::buffers() const {
  std::vector<at::Tensor> tensors;
  for (const auto& item : module_->named_buffers())
    if (std::find(options_.ignore.begin(), options_.ignore.end(), item.key()) == options_.ignore.end()) tensors.push_back(item.value());
  return tensors;
}

void DataParallelEngine::before_forward() {
  // Evaluation may run on some ranks alone, so it must not communicate.
  if (!options_.broadcast_buffers || !module_->is_training() || !at::GradMode::is_enabled() || !reducer_->syncing()) return;
  broadcast_coalesced(buffers(), group_, 0);
}

}  // namespace tessera::detail
