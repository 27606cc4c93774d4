#include "tessera/train/run_settings.h"

#include <algorithm>
#include <memory>

#include "tessera/base/internal/split.h"
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
  throw InvalidArgument("plan: '", pattern, "' is to be '", text,
                        "'; known are [column, column(units), row, row(units), vocabulary, "
                        "replicated], with units above 0");
}

void require_axis(const std::vector<std::pair<std::string, int>>& mesh, const std::string& axis,
                  const char* what) {
  std::vector<std::string> axes;
  for (const auto& [name, size] : mesh) axes.push_back(name);
  if (std::ranges::find(axes, axis) == axes.end())
    throw InvalidArgument(what, ": the mesh has no axis '", axis, "'; its axes are ", list(axes));
}

// "domain=2,tensor=3"; empty: replicated along the axes that do not shard the rows.
FieldSharding field_sharding(const std::string& field, const std::string& text) {
  FieldSharding sharding{.field = field};
  if (text.empty()) return sharding;
  for (const std::string& one : split(text, ',')) {
    const std::size_t equals = one.find('=');
    const auto dim =
        equals == std::string::npos ? std::nullopt : parse_number(one.substr(equals + 1));
    if (!dim || *dim >= (1u << 16) || equals == 0)
      throw InvalidArgument("fields: '", field, "' is to be '", text,
                            "'; give axes with the dims that they shard, domain=2,tensor=3");
    if (!sharding.dims.emplace(one.substr(0, equals), static_cast<int>(*dim)).second)
      throw InvalidArgument("fields: '", field, "' names an axis twice: '", text, "'");
  }
  return sharding;
}

BatchFields batch_fields(const RunSettings& run) {
  BatchFields all;
  // In the order of the mesh.
  for (const auto& [axis, size] : run.mesh)
    if (std::ranges::any_of(run.batch, [&](const auto& b) { return b.first == axis; }))
      all.rows.push_back(axis);
  for (const auto& [field, text] : run.fields) {
    FieldSharding sharding = field_sharding(field, text);
    for (const auto& [axis, dim] : sharding.dims) require_axis(run.mesh, axis, "fields");
    if (run.reads != RunSettings::Reads::one)
      sharding.whole = run.reads == RunSettings::Reads::complete;
    all.fields.push_back(std::move(sharding));
  }
  all.one_reads = run.reads == RunSettings::Reads::one;
  return all;
}

}  // namespace

std::shared_ptr<Strategy> RunSettings::make_strategy(const DistributedManager& manager,
                                                     const StrategyRegistry& registry) const {
  StrategyParts parts{.ranks = ranks, .stage_axis = stage_axis};
  const bool by_field = !fields.empty() || reads == Reads::one;
  for (const auto& [name, size] : mesh) parts.mesh.push_back({name, size});
  for (const auto& [axis, dim] : batch) {
    require_axis(mesh, axis, "batch");
    if (!by_field)
      parts.batch[axis] = dim;
    else if (dim != 0)
      throw InvalidArgument(
          "batch: axis '", axis, "' shards dim ", dim,
          " of all tensors, beside fields or one rank that reads for all: say it for each "
          "of the fields");
  }
  if (by_field) parts.fields = batch_fields(*this);
  if (!plan.empty()) {
    require_axis(mesh, plan_axis, "plan_axis");
    LayerShardings layers;
    for (const auto& [pattern, text] : plan)
      layers.emplace_back(pattern, layer_sharding(pattern, text));
    parts.parallelise = [layers, axis = plan_axis](const std::string&, torch::nn::Module& module,
                                                   const DeviceMesh& on) {
      tensor_parallel(module, on, layers, {.axis = axis});
    };
  }
  return registry.make(strategy, manager, parts);
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
