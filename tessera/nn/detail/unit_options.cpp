#include "tessera/nn/detail/unit_options.h"

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"

namespace tessera::detail {

namespace {

bool is_list(const torch::nn::Module& m) {
  return m.as<torch::nn::ModuleListImpl>() || m.as<torch::nn::SequentialImpl>() ||
         m.as<torch::nn::ModuleDictImpl>();
}

void add_default_units(const torch::nn::Module& module, const std::string& prefix,
                       std::set<std::string>& names) {
  for (const auto& child : module.named_children()) {
    const std::string name = dotted(prefix, child.key());
    if (is_list(module)) {
      names.insert(name);
    } else {
      add_default_units(*child.value(), name, names);
    }
  }
}

// `patterns`: those that match no module around this one. Those that match leave `unused`.
void add_matched_units(const torch::nn::Module& module, const std::string& prefix,
                       const std::vector<std::string>& patterns, std::set<std::string>& unused,
                       std::set<std::string>& names) {
  for (const auto& child : module.named_children()) {
    const std::string name = dotted(prefix, child.key());
    std::vector<std::string> others;
    for (const std::string& pattern : patterns) {
      if (!matches(name, pattern)) {
        others.push_back(pattern);
        continue;
      }
      unused.erase(pattern);
      names.insert(name);
    }
    add_matched_units(*child.value(), name, others, unused, names);
  }
}

}  // namespace

std::set<std::string> unit_names(const torch::nn::Module& module,
                                 const std::vector<std::string>& patterns) {
  std::set<std::string> names, unused(patterns.begin(), patterns.end());
  if (patterns.empty()) add_default_units(module, "", names);
  add_matched_units(module, "", patterns, unused, names);
  if (!unused.empty())
    throw InvalidArgument("fully_shard: no module has a name like ", list(unused),
                          "; names are as in named_modules()");
  return names;
}

std::string unit_of(const std::set<std::string>& units, const std::string& parameter) {
  std::string name = parameter;
  for (std::size_t dot; (dot = name.rfind('.')) != std::string::npos;) {
    name.resize(dot);
    if (units.contains(name)) return name;
  }
  return "";
}

}  // namespace tessera::detail
