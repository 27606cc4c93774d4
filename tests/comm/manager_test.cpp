// Managers, their groups and meshes: ranks as threads, and as processes over Gloo.

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <future>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "fork_ranks.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/detail/manager_state.h"
#include "tessera/comm/job/manager.h"
#include "tessera/comm/job/parallel_groups.h"
#include "tessera/comm/job/threads.h"
#include "tessera/mesh/errors.h"
#include "tessera/mesh/mapping/cost.h"
#include "tessera/mesh/mapping/rank_mapping.h"
#include "tessera/mesh/mapping/topology.h"

namespace tessera::manager_test {
namespace {

using namespace std::chrono_literals;

// Checks throw, so that they end a rank whether it is a thread or a forked process.
void require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error(what);
}

std::int64_t reduced_rank(const DistributedManager& manager, const Group& group) {
  const auto rank = at::full({1}, manager.rank(), at::TensorOptions().dtype(at::kLong));
  group.all_reduce(rank);
  return rank.item<std::int64_t>();
}

/// The group's list is `ranks`, this rank stands where it should, and an all-reduce over it gives
/// the sum of the list.
void require_group(const DistributedManager& manager, const Group& group,
                   const std::vector<int>& ranks) {
  require(group.ranks() == ranks,
          concat("the group has ranks ", list(group.ranks()), " instead of ", list(ranks)));
  require(ranks[group.rank()] == manager.rank(),
          concat("rank ", manager.rank(), " is not at place ", group.rank(), " of ", list(ranks)));
  const auto sum = reduced_rank(manager, group);
  require(sum == std::accumulate(ranks.begin(), ranks.end(), std::int64_t{0}),
          concat("the sum over ", list(ranks), " is ", sum));
}

/// A mesh over some of the world's ranks in any order; the same on every rank.
Mesh random_mesh(int world, std::mt19937& random) {
  std::vector<int> ranks(world);
  std::iota(ranks.begin(), ranks.end(), 0);
  for (int i = world; i > 1; --i) std::swap(ranks[i - 1], ranks[random() % i]);
  int size = 1;
  std::vector<Axis> axes;
  for (int i = 0; i < 3; ++i) {
    const int most = world / size;
    const int n = 1 + static_cast<int>(random() % most);
    axes.push_back({std::string(1, static_cast<char>('a' + i)), n});
    size *= n;
  }
  ranks.resize(size);
  return Mesh(axes, ranks);
}

void require_mesh(const DistributedManager& manager, const Mesh& layout) {
  const DeviceMesh mesh = manager.mesh(layout);
  require(mesh.contains_me() == layout.contains(manager.rank()), "contains_me");
  if (!mesh.contains_me()) {
    try {
      mesh.all();
    } catch (const InvalidArgument&) {
      return;
    }
    throw std::logic_error("a rank outside the mesh got a group");
  }
  require(mesh.coordinate() == layout.coordinate(manager.rank()), "coordinate");
  for (int set = 0; set < 1 << layout.dims(); ++set) {
    std::vector<int> axes;
    for (int axis = 0; axis < layout.dims(); ++axis)
      if (set >> axis & 1) axes.push_back(axis);
    const Group group = mesh.group(axes);
    require_group(manager, group, layout.group(axes, manager.rank()));
    std::ranges::reverse(axes);
    require(mesh.group(axes) == group, "the order in which axes are named made another group");
    if (axes.size() == 1) {
      require(mesh.group(axes[0]) == group && mesh.group(layout.axes()[axes[0]].name) == group,
              "one axis, three ways");
      require(group.rank() == mesh.coordinate()[axes[0]],
              "rank in the group is not the coordinate on the axis");
    }
  }
}

std::string in_process(const Launch& launch, const std::function<void(DistributedManager&)>& body,
                       std::chrono::milliseconds limit = 30s) {
  at::set_num_threads(1);
  ManagerOptions options;
  options.launch = launch;
  options.timeout = limit;
  auto manager = DistributedManager::initialize(options);
  body(manager);
  return "ok";
}

void run_processes(int ranks, const std::function<void(DistributedManager&)>& body,
                   std::chrono::milliseconds limit = 30s) {
  const auto ends = testing::fork_ranks(
      ranks, [&](const Launch& launch) { return in_process(launch, body, limit); }, 60s);
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_TRUE(ends[rank].ended) << "rank " << rank << " hung";
    EXPECT_EQ(ends[rank].report, "ok") << "rank " << rank << ", exit code " << ends[rank].exit_code
                                       << ", signal " << ends[rank].signal;
  }
}

void meshes(DistributedManager& manager, int count) {
  std::mt19937 random(11);
  for (int i = 0; i < count; ++i) require_mesh(manager, random_mesh(manager.world_size(), random));
  require_mesh(manager, Mesh({{"all", manager.world_size()}}));
}

// Processes first: forking is safe only while this process has no threads of its own.
TEST(ProcessManager, EveryAxisSetOfAnyMeshReducesOverItsList) {
  for (const int ranks : {1, 2, 3, 4})
    run_processes(ranks, [](DistributedManager& manager) { meshes(manager, 6); });
}

TEST(ProcessManager, GroupsAreMadeByTheirMembersInAnyOrder) {
  run_processes(4, [](DistributedManager& manager) {
    // Each rank asks in its own order; pairs of a ring in two directions would block if making one
    // held up the other.
    const int rank = manager.rank();
    require_group(manager, rank % 2 ? manager.group({3, 1}) : manager.group({2, 0}),
                  rank % 2 ? std::vector<int>{3, 1} : std::vector<int>{2, 0});
    if (rank < 3) require_group(manager, manager.group({1, 2, 0}), {1, 2, 0});
    require(manager.group({rank}).size() == 1, "a group of one");
    require_group(manager, manager.world(), {0, 1, 2, 3});
    require(manager.world() == manager.group({0, 1, 2, 3}), "the world is made once");
    require(!(manager.world() == manager.group({3, 2, 1, 0})), "another order is another group");
  });
}

TEST(ProcessManager, ShutdownDestroysAndLaterCallsMakeAnew) {
  run_processes(3, [](DistributedManager& manager) {
    const DeviceMesh mesh = manager.mesh({{"a", 3}});
    for (int round = 0; round < 4; ++round) {
      const Group world = manager.world(), along = mesh.group("a");
      require_group(manager, world, {0, 1, 2});
      require_group(manager, along, {0, 1, 2});
      manager.shutdown();
      bool refused = false;
      try {
        world.barrier();
      } catch (const CommError&) {
        refused = true;
      }
      require(refused, "a destroyed group took a call");
    }
  });
}

TEST(ProcessManager, OneProcessMayMeetAgain) {
  const auto ends = testing::fork_ranks(
      3,
      [&](const Launch& launch) {
        for (int round = 0; round < 3; ++round)
          in_process(launch, [](DistributedManager& manager) {
            require_group(manager, manager.world(), {0, 1, 2});
          });
        return std::string("ok");
      },
      60s);
  for (const auto& end : ends) EXPECT_EQ(end.report, "ok");
}

TEST(ProcessManager, ARankMayLeaveWhileOthersStillConnect) {
  for (int n = 0; n < 6; ++n) {
    const auto ends = testing::fork_ranks(
        3,
        [](const Launch& launch) -> std::string {
          ManagerOptions options;
          options.backend = "gloo";
          options.launch = launch;
          DistributedManager::initialize(options).world();
          return "left";
        },
        20s);
    for (const auto& end : ends) EXPECT_EQ(end.report, "left") << end.signal;
  }
}

TEST(ProcessManager, AMemberThatDoesNotComeIsNamed) {
  run_processes(3, [](DistributedManager& manager) {
    manager.world().barrier();
    if (manager.rank() != 2) {
      try {
        manager.group({0, 1, 2}, {"", 2500ms}).barrier();
      } catch (const TimeoutError& error) {
        require(error.missing() == std::vector<int>{2},
                concat("missing ", list(error.missing()), ": ", error.what()));
        require(std::string(error.what()).find("has not made this group") != std::string::npos,
                error.what());
        require_group(manager, manager.group({0, 1}), {0, 1});  // the others can go on
        manager.world().barrier();
        return;
      }
      throw std::logic_error("no error");
    }
    manager.world().barrier();
  });
}

TEST(ProcessManager, APlanThatARankDoesNotBringNamesIt) {
  run_processes(
      4,
      [](DistributedManager& manager) {
        const auto plan = GroupPlan::of_mesh(Mesh({{"data", 2}, {"model", 2}}));
        manager.create_process_groups(plan);
        const auto store = manager.state()->base().store;
        if (manager.rank() == 1) {
          // runs, and does something else
          store->wait({"0 is told", "2 is told", "3 is told"}, 20s);
          return;
        }
        try {
          manager.create_process_groups(plan);
        } catch (const TimeoutError& error) {
          require(error.missing() == std::vector<int>{1},
                  concat("missing ", list(error.missing()), ": ", error.what()));
          store->set(concat(manager.rank(), " is told"), std::vector<std::uint8_t>{1});
          return;
        }
        throw std::logic_error("no error");
      },
      2500ms);
}

TEST(ProcessManager, TheLauncherIsReadFromTheEnvironment) {
  const auto ends = testing::fork_ranks(
      2,
      [](const Launch& launch) {
        for (const auto& [name, value] : std::vector<std::pair<std::string, std::string>>{
                 {"RANK", std::to_string(launch.rank)},
                 {"WORLD_SIZE", "2"},
                 {"MASTER_ADDR", "127.0.0.1"},
                 {"MASTER_PORT", std::to_string(launch.port)}})
          ::setenv(name.c_str(), value.c_str(), 1);
        auto manager = DistributedManager::initialize();
        require(manager.launch().launcher == "plain", manager.launch().launcher);
        require_group(manager, manager.world(), {0, 1});
        return std::string("ok");
      },
      60s);
  for (const auto& end : ends) EXPECT_EQ(end.report, "ok");
}

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

TEST(ThreadManager, EveryAxisSetOfAnyMeshReducesOverItsList) {
  for (const int ranks : {1, 2, 3, 5, 6, 8})
    run_threads(ranks, [](DistributedManager& manager) { meshes(manager, 25); });
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

namespace {

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

}  // namespace

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

TEST(ThreadManager, ARankThatComesLateHearsOfTheFailure) {
  // As rank 0 fails before rank 1 has its manager.
  const ThreadRanks ranks(2);
  ranks.fail(0, "the disk is full");
  std::string what;
  std::thread late([&] {
    const auto manager = ranks.enter(1);
    try {
      manager.world().barrier();
    } catch (const PeerLostError& error) {
      what = error.what();
    }
    ranks.leave(1);
  });
  late.join();
  EXPECT_NE(what.find("the disk is full"), std::string::npos) << what;
}

TEST(ThreadManager, RefusesGroupsThatCannotBe) {
  run_threads(3, [](DistributedManager& manager) {
    const int rank = manager.rank(), other = (rank + 1) % 3;
    for (const std::vector<int>& ranks :
         {std::vector<int>{}, {other}, {rank, rank}, {rank, 3}, {-1, rank}}) {
      bool refused = false;
      try {
        manager.group(ranks);
      } catch (const InvalidArgument&) {
        refused = true;
      }
      require(refused, concat("the group of ranks ", list(ranks), " was made"));
    }
    for (const auto& axes :
         std::vector<std::vector<Axis>>{{{"a", 2}}, {{"a", 4}}, {{"a", 2}, {"b", 2}}}) {
      bool refused = false;
      try {
        manager.mesh(axes);
      } catch (const InvalidArgument&) {
        refused = true;
      }
      require(refused, "a mesh that is not the world was made");
    }
  });
}

TEST(ThreadManager, CheckLevelReachesGroupsOfBeforeAndAfter) {
  run_threads(2, [](DistributedManager& manager) {
    const Group before = manager.world();
    manager.set_check_level(CheckLevel::collective);
    require(before.check_level() == CheckLevel::collective, "before");
    require(manager.group({1, 0}).check_level() == CheckLevel::collective, "after");
  });
}

TEST(Manager, RefusesOptionsThatCannotBe) {
  ManagerOptions options;
  options.launch = Launch{};
  options.backend = "pigeon";
  EXPECT_THROW(DistributedManager::initialize(options), InvalidArgument);
  options.backend = "";
  options.timeout = 0ms;
  EXPECT_THROW(DistributedManager::initialize(options), InvalidArgument);
  options.timeout = 1s;
  options.launch->rank = 1;
  EXPECT_THROW(DistributedManager::initialize(options), Error);
}

TEST(Manager, ARankHasADeviceOfItsOwnOrTheCpu) {
  const c10::Device cpu(c10::DeviceType::CPU), cuda(c10::DeviceType::CUDA),
      second(c10::DeviceType::CUDA, 1), fourth(c10::DeviceType::CUDA, 3);
  using detail::choose_device;
  EXPECT_EQ(choose_device({}, 3, 2, ""), second);
  EXPECT_EQ(choose_device({}, 3, 2, "no such part"), cpu);
  EXPECT_EQ(choose_device({}, 3, 0, ""), cpu);
  EXPECT_EQ(choose_device(cpu, 3, 2, ""), cpu);
  EXPECT_EQ(choose_device(second, 2, 2, ""), second);
  EXPECT_EQ(choose_device(cuda, 3, 2, ""), second);
  EXPECT_THROW(choose_device(fourth, 0, 2, ""), InvalidArgument);
  EXPECT_THROW(choose_device(second, 0, 2, "no such part"), NotAvailable);
  EXPECT_THROW(choose_device(c10::Device(c10::DeviceType::Meta), 0, 2, ""), InvalidArgument);
}

// Else it keeps the core of a rank that has one from the thread that sends (gloo.cpp).
TEST(ThreadManager, GloosEventLoopPreemptsNoOtherThread) {
  const sched_param none{};
  const bool allowed = std::async(std::launch::async, [&] {
                         return sched_setscheduler(0, SCHED_BATCH, &none) == 0;
                       }).get();
  if (!allowed || sched_getscheduler(0) != SCHED_OTHER)
    GTEST_SKIP() << "threads have another policy here, or may not change it";
  run_threads(
      2,
      [](DistributedManager& manager) {
        const auto world = manager.world();
        require_group(manager, world, {0, 1});
        world.barrier();
        if (world.rank() == 0) {
          int batch = 0;
          for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
            batch += sched_getscheduler(std::stoi(task.path().filename().string())) == SCHED_BATCH;
          require(batch >= 2, concat(batch, " batch threads of two groups over Gloo"));
          require(sched_getscheduler(0) == SCHED_OTHER, "a rank's own thread has another policy");
        }
        world.barrier();
      },
      {.backend = "gloo"});
}

TEST(Manager, OneProcessNeedsNoOther) {
  ManagerOptions options;
  options.launch = Launch{};
  auto manager = DistributedManager::initialize(options);
  EXPECT_EQ(manager.world().size(), 1);
  EXPECT_EQ(reduced_rank(manager, manager.world()), 0);
  EXPECT_EQ(manager.mesh({{"a", 1}}).group("a").size(), 1);
}

}  // namespace
}  // namespace tessera::manager_test
