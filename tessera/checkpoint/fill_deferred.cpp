#include "tessera/checkpoint/fill_deferred.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/nn/deferred.h"

namespace tessera {
namespace {

// What each "*" of the pattern matches; nothing if the name is another one. Text between two stars
// is taken where it comes first, which leaves the most to what follows.
std::optional<std::vector<std::string>> stars_of(std::string_view name, std::string_view pattern) {
  std::vector<std::string> stars;
  std::size_t star = pattern.find('*');
  if (star == std::string_view::npos) return name == pattern ? std::optional(stars) : std::nullopt;
  if (!name.starts_with(pattern.substr(0, star))) return std::nullopt;
  name.remove_prefix(star);
  while (star != std::string_view::npos) {
    pattern.remove_prefix(star + 1);
    star = pattern.find('*');
    const std::string_view text = pattern.substr(0, star);
    const bool last = star == std::string_view::npos;
    if (last && !name.ends_with(text)) return std::nullopt;
    const std::size_t at = last ? name.size() - text.size() : name.find(text);
    if (at == std::string_view::npos) return std::nullopt;
    stars.emplace_back(name.substr(0, at));
    name.remove_prefix(at + text.size());
  }
  return stars;
}

std::string with_stars(const std::string& to, const std::vector<std::string>& stars) {
  std::string name;
  std::size_t next = 0;
  for (const char c : to)
    if (c == '*')
      name += stars.at(next++);
    else
      name += c;
  return name;
}

void check_table(const NameTable& table) {
  for (const auto& [from, to] : table)
    if (std::ranges::count(to, '*') > std::ranges::count(from, '*'))
      throw InvalidArgument("fill_deferred: '", to, "' has more stars than '", from, "' matches");
}

struct FillPlan {
  // By the names that they are filled from.
  NamedTensors deferred;
  // Those that have values already.
  CheckpointState others;
  // What all ranks must share.
  std::string text;
};

// Every tensor once, with its names in the files.
std::vector<std::pair<at::Tensor, std::vector<std::string>>> named_in_files(
    const NamedTensors& tensors, const NameTable& table) {
  std::vector<std::pair<at::Tensor, std::vector<std::string>>> all;
  std::map<const void*, std::size_t> known;
  std::vector<bool> used(table.size(), false);
  for (const auto& [name, t] : tensors) {
    if (!t.defined()) continue;
    for (std::size_t i = 0; i < table.size(); ++i)
      if (stars_of(name, table[i].first)) used[i] = true;
    const auto [at, fresh] = known.emplace(t.unsafeGetTensorImpl(), all.size());
    if (fresh) all.push_back({t, {}});
    all[at->second].second.push_back(name_in_files(name, table));
  }
  for (std::size_t i = 0; i < table.size(); ++i)
    if (!used[i])
      throw InvalidArgument("fill_deferred: no parameter or buffer has a name like '",
                            table[i].first,
                            "'; names are as in named_parameters() and named_buffers()");
  return all;
}

FillPlan plan_of(const NamedTensors& tensors, const CheckpointReader& saved, const NameTable& table,
                 const LoadOptions& options) {
  check_table(table);
  std::map<std::string, SavedTensor> there;
  for (SavedTensor& t : saved.tensors()) there.emplace(t.name, t);
  FillPlan plan;
  std::set<std::string> wanted;
  std::string wrong;
  for (const auto& [t, names] : named_in_files(tensors, table)) {
    wanted.insert(names.begin(), names.end());
    const auto name =
        std::ranges::find_if(names, [&](const std::string& n) { return there.contains(n); });
    if (name == names.end()) {
      if (!options.allow_missing) wrong += concat(" '", names[0], "' is not there.");
      continue;
    }
    const SavedTensor& from = there.at(*name);
    if (from.shape != t.sizes().vec())
      wrong += concat(" '", *name, "' has shape ", list(from.shape), ", in the module ",
                      list(t.sizes().vec()), '.');
    if (from.dtype != t.scalar_type() && !options.convert)
      wrong += concat(" '", *name, "' is ", from.dtype, ", in the module ", t.scalar_type(),
                      " (LoadOptions::convert converts).");
    plan.text += concat(is_deferred(t) ? "deferred '" : "'", *name, "';");
    if (is_deferred(t))
      plan.deferred.emplace_back(*name, t);
    else
      plan.others.add(*name, t);
  }
  if (!options.allow_extra)
    for (const auto& [name, t] : there)
      if (!wanted.contains(name)) wrong += concat(" '", printable(name), "' is there alone.");
  if (!wrong.empty())
    throw InvalidArgument("fill_deferred: the files do not fit the module:", wrong,
                          " Give a table of names, or let LoadOptions leave the rest");
  return plan;
}

std::vector<int> sorted_ranks(const Group& group) {
  std::vector<int> ranks = group.ranks();
  std::ranges::sort(ranks);
  return ranks;
}

DeferredSource source_of(const std::shared_ptr<const CheckpointReader>& saved,
                         const std::string& name, const at::Tensor& tensor, LoadOptions options) {
  options.allow_extra = true;
  return [saved, options, name, shape = tensor.sizes().vec(), dtype = tensor.scalar_type()](
             const ShardSpec* spec, c10::Device device) {
    if (!spec) {
      const at::Tensor whole = at::empty(shape, at::TensorOptions(dtype).device(device));
      CheckpointState state;
      state.add(name, whole);
      saved->load(state, options);
      return whole;
    }
    const std::vector<int> here = sorted_ranks(spec->mesh().all());
    if (const std::vector<int> readers = sorted_ranks(saved->group()); here != readers)
      throw InvalidArgument("fill_deferred: '", name, "' is placed over ranks ", list(here),
                            " and read by ranks ", list(readers),
                            ": make the reader over the mesh's ranks (mesh.all())");
    const at::Tensor read = saved->read(name, *spec, options);
    return read.scalar_type() == dtype ? read : read.to(dtype);
  };
}

}  // namespace

std::string name_in_files(const std::string& name, const NameTable& table) {
  check_table(table);
  for (const auto& [from, to] : table)
    if (const auto stars = stars_of(name, from)) return with_stars(to, *stars);
  return name;
}

void fill_deferred(const NamedTensors& tensors,
                   const std::shared_ptr<const CheckpointReader>& saved, const NameTable& names,
                   const LoadOptions& options) {
  if (!saved) throw InvalidArgument("fill_deferred: there is no reader");
  FillPlan plan;
  agree::all_same(saved->group(), "fill_deferred", [&] {
    plan = plan_of(tensors, *saved, names, options);
    return plan.text;
  });
  if (!plan.others.tensors().empty()) {
    LoadOptions others = options;
    others.allow_extra = true;
    saved->load(plan.others, others);
  }
  for (const auto& [name, t] : plan.deferred)
    set_source(t, name, source_of(saved, name, t, options));
}

void fill_deferred(torch::nn::Module& module, const std::shared_ptr<const CheckpointReader>& saved,
                   const NameTable& names, const LoadOptions& options) {
  NamedTensors all;
  for (const auto& p : module.named_parameters()) all.emplace_back(p.key(), p.value());
  for (const auto& b : module.named_buffers()) all.emplace_back(b.key(), b.value());
  fill_deferred(all, saved, names, options);
}

}  // namespace tessera
