#include "tessera/checkpoint/detail/optimizer_parameters.h"

#include <map>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/internal/json_text.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/files/internal/checksum.h"
#include "tessera/files/json.h"

namespace tessera::detail {
namespace {

constexpr std::string_view kNames = "parameters.";

// Of the value that holds names: each text has a key of its own, so that ranks whose optimizers are
// over other parameters, as stages of a pipeline, add one each.
std::string key_of(const std::string& prefix, const std::string& text) {
  return concat(prefix, kNames, to_hex(Hash().text(text).value()));
}

// The groups of the saved parameters by name. Collective.
std::map<std::string, std::size_t> saved_groups(const CheckpointReader& saved,
                                                const std::string& prefix) {
  std::map<std::string, std::size_t> groups;
  for (const std::string& key : saved.value_names()) {
    // A key of sixteen digits, and nothing of a parameter that is called so.
    if (!key.starts_with(prefix + std::string(kNames)) ||
        key.size() != prefix.size() + kNames.size() + 16)
      continue;
    const Json names = Json::parse(saved.value(key));
    for (std::size_t g = 0; g < names.items().size(); ++g)
      for (const Json& name : names.items()[g].items()) groups[name.string()] = g;
  }
  return groups;
}

// Of each saved parameter, '1' if this rank's optimizer has it; `wrong` gets what does not fit.
std::string found_of(const std::map<std::string, std::size_t>& there,
                     const torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                     std::string& wrong) {
  std::map<const void*, std::set<std::string>> names;
  for (const auto& p : module.named_parameters())
    names[p.value().unsafeGetTensorImpl()].insert(p.key());
  std::set<std::string> here;
  for (const NamedParameter& one : named_parameters_of(optimizer, module)) {
    bool known = false;
    for (const std::string& name : names[one.parameter.unsafeGetTensorImpl()]) {
      const auto found = there.find(name);
      if (found == there.end()) continue;
      known = true;
      here.insert(name);
      if (found->second != one.group)
        wrong += concat(" '", printable(name), "' is in group ", found->second,
                        " there and in group ", one.group, " here;");
    }
    if (!known) wrong += concat(" '", printable(one.name), "' is here alone;");
  }
  return joined(there, "", [&](const auto& one) { return here.contains(one.first) ? '1' : '0'; });
}

}  // namespace

std::vector<NamedParameter> named_parameters_of(const torch::optim::Optimizer& optimizer,
                                                const torch::nn::Module& module) {
  std::map<const void*, std::string> names;
  for (const auto& p : module.named_parameters())
    names.emplace(p.value().unsafeGetTensorImpl(), p.key());
  std::vector<NamedParameter> all;
  std::set<const void*> seen;
  std::size_t position = 0;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g)
    for (const at::Tensor& p : optimizer.param_groups()[g].params()) {
      const auto found = names.find(p.unsafeGetTensorImpl());
      if (found == names.end())
        throw InvalidArgument("parameter number ", position,
                              " of the optimizer is not the module's: give the module that "
                              "all its parameters belong to");
      if (seen.insert(p.unsafeGetTensorImpl()).second) all.push_back({found->second, p, g});
      ++position;
    }
  return all;
}

void add_parameter_names(CheckpointState& state, const std::string& prefix,
                         const std::vector<NamedParameter>& parameters) {
  std::vector<std::vector<std::string>> groups;
  for (const NamedParameter& one : parameters) {
    if (groups.size() <= one.group) groups.resize(one.group + 1);
    groups[one.group].push_back(one.name);
  }
  const std::string text =
      json_list(groups, [](const auto& names) { return json_list(names, json_text); });
  state.set(key_of(prefix, text), text);
}

void check_parameter_names(const CheckpointReader& saved, const std::string& prefix,
                           const torch::optim::Optimizer& optimizer,
                           const torch::nn::Module& module) {
  const std::map<std::string, std::size_t> there = saved_groups(saved, prefix);
  if (there.empty()) return;
  const auto refuse = [&](const std::string& wrong) {
    return InvalidArgument(concat("the optimizer '", prefix,
                                  "' of the checkpoint is over other parameters than this one:",
                                  wrong, " LoadOptions::allow_missing loads what both have"));
  };
  const auto all = agree::all<std::string>(saved.group(), "load", [&] {
    std::string wrong;
    auto found = found_of(there, optimizer, module, wrong);
    if (!wrong.empty()) throw refuse(wrong);
    return found;
  });
  std::string wrong;
  std::size_t i = 0;
  for (const auto& [name, group] : there) {
    bool anywhere = false;
    for (const std::string& found : all) anywhere = anywhere || found[i] == '1';
    if (!anywhere) wrong += concat(" '", printable(name), "' is in the checkpoint alone;");
    ++i;
  }
  if (!wrong.empty()) throw InvalidArgument("load: ", refuse(wrong).what());
}

}  // namespace tessera::detail
