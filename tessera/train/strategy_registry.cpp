// Strategies by name.

#include <utility>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/train/pipeline_strategy.h"
#include "tessera/train/strategies.h"

namespace tessera {

namespace {

void refuse_mesh(const std::string& name, const StrategyParts& parts) {
  if (!parts.mesh.empty() || !parts.batch.empty() || parts.fields || parts.parallelise)
    throw InvalidArgument("the strategy '", name,
                          "' takes no mesh, batch or plan: choose the strategy 'mesh', or leave "
                          "them out");
}

DeviceMesh mesh_of(const std::string& name, const DistributedManager& manager,
                   const StrategyParts& parts) {
  if (parts.mesh.empty())
    throw InvalidArgument("the strategy '", name,
                          "' needs a mesh: axes with sizes, {data: 2, tensor: 4}");
  DeviceMesh mesh = manager.mesh(parts.mesh);
  for (const auto& [axis, dim] : parts.batch) {
    if (!mesh.mesh().has_axis(axis))
      throw InvalidArgument("batch: the mesh has no axis '", axis, "'; its axes are ",
                            list(mesh.mesh().names()));
    if (dim < 0) throw InvalidArgument("batch: dim ", dim, " of axis '", axis, "'");
  }
  return mesh;
}

/// One placement for each of the axes.
std::vector<Placement> batch_on(const std::vector<std::string>& axes, const StrategyParts& parts) {
  std::vector<Placement> placements;
  for (const std::string& axis : axes) {
    const auto found = parts.batch.find(axis);
    placements.push_back(found == parts.batch.end() ? Placement(Replicate())
                                                    : Placement(Shard(found->second)));
  }
  return placements;
}

std::shared_ptr<Strategy> make_mesh(const DistributedManager& manager, const StrategyParts& parts) {
  const DeviceMesh mesh = mesh_of("mesh", manager, parts);
  if (!parts.fields)
    return std::make_shared<MeshStrategy>(mesh, parts.parallelise,
                                          batch_on(mesh.mesh().names(), parts));
  if (!parts.batch.empty())
    throw InvalidArgument(
        "the strategy 'mesh' was given a batch and the fields of one: give the "
        "axes of the rows with the fields");
  return std::make_shared<MeshStrategy>(mesh, parts.parallelise, *parts.fields);
}

std::shared_ptr<Strategy> make_pipeline(const DistributedManager& manager,
                                        const StrategyParts& parts) {
  const DeviceMesh mesh = mesh_of("pipeline", manager, parts);
  if (parts.fields || parts.batch.contains(parts.stage_axis))
    throw InvalidArgument("the strategy 'pipeline' takes a batch by the axes beside '",
                          parts.stage_axis, "', and no fields");
  std::vector<std::string> axes = mesh.mesh().names();
  std::erase(axes, parts.stage_axis);
  return std::make_shared<PipelineStrategy>(
      mesh, parts.stage_axis, parts.parallelise,
      axes.empty() ? std::vector<Placement>() : batch_on(axes, parts));
}

}  // namespace

StrategyRegistry StrategyRegistry::builtin() {
  using Parts = StrategyParts;
  StrategyRegistry all;
  all.add("ddp", [](const DistributedManager& manager, const Parts& parts) {
    refuse_mesh("ddp", parts);
    return std::make_shared<DDPStrategy>(manager, parts.ddp);
  });
  all.add("manual", [](const DistributedManager& manager, const Parts& parts) {
    refuse_mesh("manual", parts);
    return std::make_shared<ManualStrategy>(manager, parts.manual);
  });
  all.add("mesh", make_mesh);
  all.add("pipeline", make_pipeline);
  all.add("process_group", [](const DistributedManager& manager, const Parts& parts) {
    refuse_mesh("process_group", parts);
    return std::make_shared<ProcessGroupStrategy>(manager.world().process_group(),
                                                  manager.device());
  });
  all.add("single", [](const DistributedManager& manager, const Parts& parts) {
    refuse_mesh("single", parts);
    return std::make_shared<SingleDevice>(manager);
  });
  return all;
}

void StrategyRegistry::add(const std::string& name, Make make) {
  if (name.empty() || !make) throw InvalidArgument("a strategy needs a name and a function");
  if (!makes_.emplace(name, std::move(make)).second)
    throw InvalidArgument("a strategy named '", name, "' is there already");
}

std::shared_ptr<Strategy> StrategyRegistry::make(const std::string& name,
                                                 const DistributedManager& manager,
                                                 const StrategyParts& parts) const {
  const auto it = makes_.find(name);
  if (it == makes_.end())
    throw InvalidArgument("no strategy is named '", name, "'; known are ", list(names()));
  if (parts.ranks < 0 || (parts.ranks > 0 && parts.ranks != manager.world_size()))
    throw InvalidArgument("the strategy '", name, "' was asked for with ", parts.ranks,
                          " ranks, and the job has ", manager.world_size(),
                          ": start as many (tessera run -n), or ask for 0, which takes any");
  return it->second(manager, parts);
}

std::vector<std::string> StrategyRegistry::names() const { return keys_of(makes_); }

}  // namespace tessera
