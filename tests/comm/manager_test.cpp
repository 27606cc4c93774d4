// Managers, their groups and meshes: ranks as threads, and as processes over Gloo. Trees of groups:
// group_trees_test.cpp.

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <future>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>

#include "managed_ranks.h"
#include "tessera/comm/job/detail/manager_state.h"
#include "tessera/comm/job/threads.h"

namespace tessera::manager_test {
namespace {

using namespace std::chrono_literals;

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

TEST(ThreadManager, EveryAxisSetOfAnyMeshReducesOverItsList) {
  for (const int ranks : {1, 2, 3, 5, 6, 8})
    run_threads(ranks, [](DistributedManager& manager) { meshes(manager, 25); });
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

// A group's name has no limit but one of its own.
TEST(ThreadManager, TheLongestLimitIsTheManagersOwnToItsGroups) {
  constexpr auto longest = std::chrono::milliseconds::max();
  run_threads(2,
              [&](DistributedManager& manager) {
                require(manager.world().name() == "world", manager.world().name());
                require(manager.world() == manager.group({0, 1}, {.timeout = longest}),
                        "the same limit");
              },
              {.timeout = longest});
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
