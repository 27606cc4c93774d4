#include "tessera/nn/detail/unit_options.h"

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include "tessera/base/text.h"

namespace tessera::detail {

namespace {

bool is_list(const torch::nn::Module& m) {
  return m.as<torch::nn::ModuleListImpl>() || m.as<torch::nn::SequentialImpl>() ||
         m.as<torch::nn::ModuleDictImpl>();
}

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

bool is_floating(at::ScalarType t) {
  return t == at::kHalf || t == at::kBFloat16 || t == at::kFloat || t == at::kDouble;
}

void check_dtypes(const std::string& where, const UnitPrecision& precision) {
  for (const auto& dtype : {precision.parameters, precision.reduce, precision.output}) {
    if (dtype && !is_floating(*dtype))
      throw InvalidArgument("fully_shard: the precision", where, " names ", toString(*dtype),
                            "; give float16, bfloat16, float32 or float64");
  }
  if (precision.output && !precision.parameters)
    throw InvalidArgument("fully_shard: the precision", where,
                          " has an output dtype and none to compute in: give "
                          "`parameters` too");
}

void add_default_units(const torch::nn::Module& module, const std::string& prefix,
                       std::set<std::string>& names) {
  for (const auto& child : module.named_children()) {
    const std::string name = joined(prefix, child.key());
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
    const std::string name = joined(prefix, child.key());
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

UnitPrecisions::UnitPrecisions(const FullyShardOptions& options) : options_(options) {
  check_dtypes("", options.precision);
  for (const auto& [pattern, precision] : options.unit_precision) {
    check_dtypes(concat(" of '", pattern, "'"), precision);
    unused_.insert(pattern);
  }
}

const UnitPrecision& UnitPrecisions::of(const std::string& unit) {
  for (const auto& [pattern, precision] : options_.unit_precision) {
    if (!matches(unit, pattern)) continue;
    unused_.erase(pattern);
    return precision;
  }
  return options_.precision;
}

void UnitPrecisions::check_parameter(const std::string& unit, const NamedTensor& p) {
  const UnitPrecision& precision = of(unit);
  const at::ScalarType dtype = p.tensor.scalar_type();
  if ((precision.parameters || precision.reduce) && !is_floating(dtype))
    throw InvalidArgument(
        "fully_shard: ", p.name, " is ", toString(dtype), ", and its unit '", unit,
        "' has a precision, which is for real floating-point parameters alone: give the unit "
        "another one by unit_precision, or leave the parameter out by ignore");
  if (precision.output && precision.parameters == dtype)
    throw InvalidArgument("fully_shard: ", p.name, " of unit '", unit, "' is ", toString(dtype),
                          " already, so that nothing is cast and no ", "output dtype can be given");
}

void UnitPrecisions::check_used() const {
  if (!unused_.empty())
    throw InvalidArgument("fully_shard: no unit has a name like ", list(unused_),
                          ", which unit_precision names");
}

std::string described(const UnitPrecision& precision) {
  const auto name = [](const std::optional<at::ScalarType>& t) {
    return t ? toString(*t) : "its own";
  };
  return concat(name(precision.parameters), "/", name(precision.reduce), "/",
                name(precision.output));
}

}  // namespace tessera::detail
