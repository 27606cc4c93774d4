// Groups and meshes by name of a tree: ranks as threads, and as processes over Gloo.

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "managed_ranks.h"
#include "tessera/comm/job/parallel_groups.h"
#include "tessera/comm/job/threads.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/mapping/cost.h"
#include "tessera/mesh/mapping/rank_mapping.h"
#include "tessera/mesh/mapping/topology.h"

namespace tessera::manager_test {
namespace {

using namespace std::chrono_literals;

ProcessGroupConfig tree() {
  ProcessGroupConfig config;
  config.add_node({.name = "mp", .size = 2, .orthogonal_group = "not_mp"}, "world");
  config.add_node({.name = "dp"}, "world");
  config.add_node({.name = "shard", .size = 2}, "dp");
  config.add_node({.name = "replicate"}, "dp");
  return config;
}

void require_tree(DistributedManager& manager, bool eager) {
  manager.create_process_groups(tree(), eager);
  const auto plan = GroupPlan::of_config(tree(), manager.world_size());
  for (const auto& family : plan.families()) {
    const auto ranks = plan.group(family.name, manager.rank());
    require(manager.group_size(family.name) == static_cast<int>(ranks.size()), "group_size");
    require(ranks[manager.group_rank(family.name)] == manager.rank(), "group_rank");
    require_group(manager, manager.group(family.name), ranks);
  }
  require(manager.group_names().size() == plan.families().size(), "group_names");
  require(manager.group("not_mp").size() == manager.world_size() / 2, "orthogonal to mp");
  manager.create_process_groups(tree());  // the same again adds nothing
  require(manager.group_names().size() == plan.families().size(),
          "group_names after the same plan");
  bool unknown = false;
  try {
    manager.group("tp");
  } catch (const UnknownName& error) {
    unknown = std::string(error.what()).find("shard") != std::string::npos;
  }
  require(unknown, "an unknown name shows the known ones");
  // Other sizes on one rank: every rank sees the line.
  auto other = tree();
  other.set_leaf_group_sizes({{"mp", manager.rank() == 1 ? 1 : 2}});
  try {
    manager.create_process_groups(other);
  } catch (const MismatchError& error) {
    require(std::string(error.what()).find("mp") != std::string::npos, error.what());
    return;
  }
  throw std::logic_error("different plans were taken");
}

TEST(ProcessManager, TreeOfGroups) {
  run_processes(4, [](DistributedManager& manager) { require_tree(manager, true); });
}

// Real ranks, a rank table of the user's own, and options per node.
TEST(ProcessManager, NodesOfATreeHaveTheirRanksBackendsAndLimits) {
  run_processes(4, [](DistributedManager& manager) {
    auto config = tree();
    config.set_options("mp", {"shm", 54321ms});
    config.set_options("shard", {"gloo", 43210ms});
    const std::vector<int> table = {3, 1, 0, 2};
    manager.create_process_groups(config, table);
    const auto plan = GroupPlan::of_config(config, table);
    require(manager.mesh("world").mesh().ranks() == table, "the table");
    for (const auto& [name, backend, limit] : {std::tuple("mp", "shm", 54321ms),
                                               {"not_mp", "shm", 54321ms},
                                               {"shard", "gloo", 43210ms}}) {
      const Group group = manager.group(name);
      require(group.backend() == backend, concat(name, " is over ", group.backend()));
      require(group.timeout() == limit, concat(name, " has another limit"));
      require_group(manager, group, plan.group(name, manager.rank()));
    }
    require(manager.group("replicate").timeout() != 54321ms, "no option");
    // The same of groups by two numbers.
    ParallelOptions options{.model = 2};
    options.model_group = {"shm", 7s};
    options.data_group = {"gloo", 8s};
    const ParallelGroups groups(manager, options);
    require(groups.mp.group.backend() == "shm" && groups.mp.group.timeout() == 7s, "model");
    require(groups.dp.group.backend() == "gloo" && groups.dp.group.timeout() == 8s, "data");
    const at::Tensor mine = at::full({manager.rank() + 1}, manager.rank(), at::kLong);
    const int near = manager.rank() / 2 * 2, far = manager.rank() % 2;
    require(groups.mp.all_gather(mine).size(0) == 2 * near + 3, "rows of the two model ranks");
    groups.dp.all_reduce(mine.narrow(0, 0, 1));
    require(mine[0].item<std::int64_t>() == 2 * far + 2, "the sum over the data ranks");
  });
}

TEST(ThreadManager, TreeOfGroups) {
  for (const int ranks : {4, 8})
    run_threads(ranks, [](DistributedManager& manager) { require_tree(manager, false); });
}

TEST(ThreadManager, TreeOnATopologyRunsItsTrafficInsideAHost) {
  run_threads(4, [](DistributedManager& manager) {
    ProcessGroupConfig config;
    config.add_node({.name = "near", .size = 2}, "world");
    config.add_node({.name = "far"}, "world");
    const auto topology = Topology::uniform(2, 2);
    const RankMapping mapping = manager.create_process_groups(
        config, topology, {{.axes = {"far"}, .bytes = 1e9}, {.axes = {"near"}, .bytes = 1e3}});
    require(mapping.seconds < mapping.naive_seconds && mapping.slot_of.size() == 4,
            "the mapping that was chosen");
    require(manager.mesh("world").mesh().ranks() == mapping.slot_of, "the mesh of the mapping");
    const Group far = manager.group("far"), near = manager.group("near");
    require(topology.host_of(far.ranks()[0]) == topology.host_of(far.ranks()[1]),
            concat("far over hosts: ", list(far.ranks())));
    require(topology.host_of(near.ranks()[0]) != topology.host_of(near.ranks()[1]),
            concat("near in one host: ", list(near.ranks())));
    require_group(manager, far, far.ranks());
    require_group(manager, near, near.ranks());
    bool refused = false;
    try {
      manager.create_process_groups(config, Topology::uniform(3, 2));
    } catch (const MappingError&) {
      refused = true;
    }
    require(refused, "a topology of six slots for four ranks was taken");
  });
}

TEST(ThreadManager, MeshesByName) {
  run_threads(8, [](DistributedManager& manager) {
    auto config = tree();
    config.set_options("shard", {"", 54321ms});
    config.set_options("dp", {"", 65432ms});
    manager.create_process_groups(config);
    const DeviceMesh dp = manager.mesh("dp"), mp = manager.mesh("mp"),
                     world = manager.mesh("world");
    require(dp.mesh().dims() == 2 && dp.mesh().size() == 4 && dp.contains_me(), "two leaves");
    require(dp.mesh().ranks() == manager.group("dp").ranks(), "the node's ranks");
    require(world.mesh() == config.mesh(8), "the root is the whole tree");
    // The tree's own groups, with their options, made once.
    require(dp.group("shard").state() == manager.group("shard").state(), "shard was made twice");
    require(dp.group("shard").timeout() == 54321ms, "the leaf's limit");
    require(dp.all().state() == manager.group("dp").state(), "dp was made twice");
    require(dp.all().timeout() == 65432ms, "the node's limit");
    require(world.group("shard").state() == dp.group("shard").state(), "shard was made twice");
    require(mp.mesh().dims() == 1 && mp.all().state() == manager.group("mp").state(), "a leaf");
    require(dp.group("replicate").timeout() == manager.group("replicate").timeout(), "no option");
    require_group(manager, dp.group("replicate"), manager.group("replicate").ranks());
    // A mesh of one's own, by any rank table.
    const Mesh grid({{"y", 2}, {"x", 2}}, {7, 1, 4, 2});
    manager.add_mesh("grid", grid);
    manager.add_mesh("grid", grid);
    require(manager.mesh(std::string("grid")) == manager.mesh(grid), "a named mesh");
    const auto throws = [&](const std::function<void()>& call, const std::string& words) {
      try {
        call();
      } catch (const Error& error) {
        return std::string(error.what()).find(words) != std::string::npos;
      }
      return false;
    };
    require(throws([&] { manager.mesh("gird"); }, "grid"), "an unknown name shows the known ones");
    require(throws([&] { manager.add_mesh("grid", Mesh({{"x", 8}})); }, "exists"), "another mesh");
    require(throws([&] { manager.add_mesh("dp", grid); }, "exists"), "the name of a family");
    require(throws([&] { manager.add_mesh("far", Mesh({{"x", 9}})); }, "rank 8"), "no such rank");
    require(throws([&] { manager.create_process_groups(GroupPlan::of_mesh(Mesh({{"grid", 8}}))); },
                   "exists"),
            "a family of a mesh's name");
    require(manager.mesh(GroupPlan::of_config(config, 8)).group("shard").timeout() == 54321ms,
            "the mesh of a plan");
  });
}

// Two models of one job, each of which says what it needs.
struct Encoder {
  static ProcessGroupConfig process_groups() {
    ProcessGroupConfig tree({.name = "encoder", .orthogonal_group = "encoders"});
    tree.add_node({.name = "rows", .size = 2}, "encoder");
    tree.add_node({.name = "columns"}, "encoder");
    return tree;
  }
};
struct Decoder {
  static ProcessGroupConfig process_groups() {
    ProcessGroupConfig tree({.name = "decoder", .orthogonal_group = "decoders"});
    tree.add_node({.name = "tensor", .size = 4}, "decoder");
    return tree;
  }
};

TEST(ThreadManager, ModelsSayWhatGroupsTheyNeed) {
  run_threads(8, [](DistributedManager& manager) {
    manager.create_process_groups<Encoder>({{"columns", 1}});
    manager.create_process_groups<Decoder>();
    const DeviceMesh encoder = manager.mesh("encoder");
    require(encoder.mesh().names() == std::vector<std::string>{"columns", "rows"}, "two leaves");
    require(encoder.mesh().size() == 2 && manager.group_size("encoders") == 4, "its replicas");
    require(manager.group_size("tensor") == 4 && manager.group_size("decoders") == 2, "the other");
    require_group(manager, manager.group("encoders"),
                  {manager.rank() % 2, manager.rank() % 2 + 2, manager.rank() % 2 + 4,
                   manager.rank() % 2 + 6});
    require_group(manager, manager.group("decoders"), {manager.rank() % 4, manager.rank() % 4 + 4});
    // Both trees have a root "world" over the same ranks: it is one group, made once.
    require(manager.group("world").state() == manager.world().state(), "the world, once");
    // Another size on one rank: all hear of it.
    bool differs = false;
    try {
      manager.create_process_groups<Encoder>({{"columns", manager.rank() == 3 ? 2 : 1}});
    } catch (const MismatchError&) {
      differs = true;
    }
    require(differs, "different sizes were taken");
    bool unknown = false;
    try {
      manager.create_process_groups<Decoder>({{"rows", 2}});
    } catch (const UnknownName&) {
      unknown = true;
    }
    require(unknown, "a leaf that the tree lacks was taken");
  });
}

}  // namespace
}  // namespace tessera::manager_test
