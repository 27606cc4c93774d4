#include "tessera/train/run_settings.h"

#include <algorithm>
#include <memory>

#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/nn/tensor_parallel.h"

namespace tessera {
namespace {

// "column(8)", or "column".
LayerSharding layer_sharding(const std::string& pattern, const std::string& text) {
  const std::size_t open = text.find('(');
  const std::string word = text.substr(0, open);
  std::int64_t units = 0;
  bool right = true;
  if (open != std::string::npos) {
    const auto number = text.back() == ')'
                            ? parse_number(text.substr(open + 1, text.size() - open - 2))
                            : std::nullopt;
    right = number && *number > 0 && *number < (1u << 30) && (word == "column" || word == "row");
    if (right) units = static_cast<std::int64_t>(*number);
  }
  if (right && word == "column") return column(units);
  if (right && word == "row") return row(units);
  if (right && word == "vocabulary") return vocabulary();
  if (right && word == "replicated") return replicated();
  throw InvalidArgument(concat("plan: '", pattern, "' is to be '", text,
                               "'; known are [column, column(units), row, row(units), vocabulary, "
                               "replicated], with units above 0"));
}

void require_axis(const std::vector<std::pair<std::string, int>>& mesh, const std::string& axis,
                  const char* what) {
  std::vector<std::string> axes;
  for (const auto& [name, size] : mesh) axes.push_back(name);
  if (std::find(axes.begin(), axes.end(), axis) == axes.end())
    throw InvalidArgument(
        concat(what, ": the mesh has no axis '", axis, "'; its axes are ", list(axes)));
}

}  // namespace

std::shared_ptr<Strategy> RunSettings::make_strategy(const DistributedManager& manager,
                                                     const StrategyRegistry& registry) const {
  if (strategy != "mesh") {
    if (!mesh.empty() || !batch.empty() || !plan.empty())
      throw InvalidArgument(concat("the strategy '", strategy,
                                   "' takes no mesh, batch or plan: choose the strategy 'mesh', or "
                                   "leave them out"));
    return registry.make(strategy, manager);
  }
  if (mesh.empty())
    throw InvalidArgument(
        "the strategy 'mesh' needs a mesh: axes with sizes, {data: 2, tensor: 4}");
  std::vector<Axis> axes;
  std::vector<Placement> placements;
  for (const auto& [name, size] : mesh) {
    axes.push_back({name, size});
    const auto found =
        std::find_if(batch.begin(), batch.end(), [&](const auto& b) { return b.first == name; });
    placements.push_back(found == batch.end() ? Placement(Replicate())
                                              : Placement(Shard(found->second)));
  }
  for (const auto& [axis, dim] : batch) {
    require_axis(mesh, axis, "batch");
    if (dim < 0) throw InvalidArgument(concat("batch: dim ", dim, " of axis '", axis, "'"));
  }
  const DeviceMesh devices = manager.mesh(axes);
  if (plan.empty())
    return std::make_shared<MeshStrategy>(devices, NamedPlacements{}, std::move(placements));
  require_axis(mesh, plan_axis, "plan_axis");
  LayerShardings layers;
  for (const auto& [pattern, text] : plan)
    layers.emplace_back(pattern, layer_sharding(pattern, text));
  const auto parallelise = [layers, axis = plan_axis](const std::string&, torch::nn::Module& module,
                                                      const DeviceMesh& on) {
    tensor_parallel(module, on, layers, {.axis = axis});
  };
  return std::make_shared<MeshStrategy>(devices, parallelise, std::move(placements));
}

TrainerOptions RunSettings::make(const DistributedManager& manager, const std::string& resolved,
                                 const StrategyRegistry& registry) const {
  TrainerOptions options = trainer;
  options.strategy = make_strategy(manager, registry);
  options.checkpoint.configuration = resolved;
  if (options.checkpoint.given())
    options.callbacks.push_back(std::make_shared<CheckpointCallback>(saves));
  if (!stop_on.empty())
    options.callbacks.push_back(std::make_shared<EarlyStopping>(stop_on, stopping));
  if (log_folder.empty()) return options;
  if (log_csv) options.loggers.push_back(csv_logger(log_folder + "/metrics.csv"));
  if (log_json) options.loggers.push_back(json_logger(log_folder + "/metrics.jsonl"));
  if (log_tensorboard) options.loggers.push_back(tensorboard_logger(log_folder + "/tensorboard"));
  return options;
}

}  // namespace tessera
