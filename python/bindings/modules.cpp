#include "modules.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include <map>
#include <set>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::python {

namespace {

// "blocks.0" and "weight" of "blocks.0.weight".
std::pair<std::string, std::string> owner_and_own(const std::string& name) {
  const auto dot = name.rfind('.');
  if (dot == std::string::npos) return {"", name};
  return {name.substr(0, dot), name.substr(dot + 1)};
}

}  // namespace

PyModuleTree::PyModuleTree(const std::vector<std::string>& modules,
                           const std::vector<std::string>& lists,
                           const std::vector<std::string>& names,
                           const std::vector<at::Tensor>& tensors, std::int64_t parameters) {
  if (names.size() != tensors.size())
    throw InvalidArgument(names.size(), " names and ", tensors.size(), " tensors");
  const std::set<std::string> are_lists(lists.begin(), lists.end());
  std::map<std::string, std::shared_ptr<torch::nn::Module>> made;
  const auto find = [&](const std::string& name) -> torch::nn::Module& {
    const auto at = made.find(name);
    if (at == made.end()) throw InvalidArgument("the tree of modules has none named '", name, "'");
    return *at->second;
  };
  for (const std::string& name : modules) {
    std::shared_ptr<torch::nn::Module>& one = made[name];
    if (are_lists.contains(name)) {
      one = std::make_shared<torch::nn::ModuleListImpl>();
    } else {
      one = std::make_shared<torch::nn::Module>();
    }
    if (name.empty()) continue;
    const auto [owner, own] = owner_and_own(name);
    find(owner).register_module(own, one);
  }
  find("");
  module = made.at("");
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto [owner, own] = owner_and_own(names[i]);
    if (static_cast<std::int64_t>(i) < parameters) {
      find(owner).register_parameter(own, tensors[i], tensors[i].requires_grad());
    } else {
      find(owner).register_buffer(own, tensors[i]);
    }
  }
}

}  // namespace tessera::python
