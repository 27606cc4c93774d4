// A program with MPI of its own: it initialises and finalises MPI, splits its ranks, and gives one
// part a group. Argument: the thread level.

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <thread>

#include "../support/free_port.h"
#include "mpi_support.h"
#include "tessera/comm/job/manager.h"
#include "tessera/comm/job/mpi_interop.h"

namespace tessera::test {

namespace {

int level_wanted = MPI_THREAD_SINGLE;

struct Split {
  MPI_Comm comm = MPI_COMM_NULL;
  int colour = 0, rank = 0, size = 1;
  Split() {
    int world = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &world);
    colour = world % 2;
    MPI_Comm_split(MPI_COMM_WORLD, colour, -world, &comm);  // The key turns the order around.
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
  }
  ~Split() { MPI_Comm_free(&comm); }
};

bool mpi_is_finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

}  // namespace

TEST(MpiInterop, ManagerOnACommunicatorOfTheProgram) {
  const Split split;
  // The first rank of each part says where its part meets.
  int port = split.rank == 0 ? testing::free_port() : 0;
  MPI_Bcast(&port, 1, MPI_INT, 0, split.comm);
  const auto launch = [&](int size) {
    return detect_launch({}, {.rank = split.rank,
                              .world_size = size,
                              .local_rank = split.rank,
                              .local_size = size,
                              .address = std::string("127.0.0.1"),
                              .port = port});
  };
  ManagerOptions options;
  options.backend = "mpi";
  options.mpi = mpi_world(split.comm);
  options.launch = launch(split.size);
  {
    const auto manager = DistributedManager::initialize(options);
    const at::Tensor t = at::full({3}, 10.0 * split.colour + split.rank, at::kDouble);
    manager.world().all_reduce(t);
    EXPECT_EQ(t[1].item<double>(), split.size * (10.0 * split.colour + (split.size - 1) / 2.0));
    EXPECT_EQ(manager.world().backend(), split.size > 1 ? "mpi" : "self");
    // A started call waits for a rank that is late, longer than a blocked wait sleeps between two
    // looks at the group.
    for (const bool messages : {false, true}) {
      if (split.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(500));
      const at::Tensor mine = at::full({2}, split.rank, at::kDouble),
                       other = at::zeros({2}, at::kDouble);
      const int next = (split.rank + 1) % split.size,
                before = (split.rank + split.size - 1) % split.size;
      Request request =
          messages ? manager.world().started().exchange({{Message::Kind::send, mine, next},
                                                         {Message::Kind::receive, other, before}})
                   : manager.world().started().all_reduce(mine);
      request.wait();
      EXPECT_EQ((messages ? other : mine)[1].item<double>(),
                messages ? before : split.size * (split.size - 1) / 2.0);
    }
  }
  EXPECT_FALSE(mpi_is_finalized());
  options.backend = "gloo";
  EXPECT_THROW(DistributedManager::initialize(options), InvalidArgument);
  options.backend = "mpi";
  options.launch = launch(split.size + 1);
  try {
    DistributedManager::initialize(options);
    ADD_FAILURE() << "a launch of another size than the communicator was accepted";
  } catch (const ConfigurationError& e) {
    EXPECT_NE(std::string(e.what()).find("and MPI says rank"), std::string::npos) << e.what();
  }
}

TEST(MpiInterop, ManagerWithoutStoreOrSockets) {
  const Split split;
  const auto mpi = mpi_world(split.comm);
  const auto manager = DistributedManager::initialize({.mpi = mpi});
  EXPECT_EQ(manager.rank(), split.rank);
  EXPECT_EQ(manager.world_size(), split.size);
  EXPECT_EQ(manager.launch().local_size, split.size);  // all ranks of the test are on one host
  EXPECT_TRUE(manager.launch().address.empty());
  EXPECT_TRUE(manager.device().is_cpu());
  const at::Tensor t = at::full({3}, split.rank + 1.0, at::kDouble);
  manager.world().all_reduce(t);
  EXPECT_EQ(t[2].item<double>(), split.size * (split.size + 1) / 2.0);
  EXPECT_THROW(DistributedManager::initialize({.backend = "gloo", .mpi = mpi}), InvalidArgument);
  EXPECT_THROW(DistributedManager::initialize({.device = c10::Device("cuda"), .mpi = mpi}), Error);
}

TEST(MpiInterop, BothEndsOfAMessageThatDoesNotFitThrow) {
  struct Case {
    at::Tensor sent, received;
    std::string sent_as, received_as, words[2];
  };
  const std::vector<Case> cases{
      {at::ones({4}), at::zeros({5}), "", "", {"Float[4]", "Float[5]"}},
      {at::ones({5}), at::zeros({4}), "", "", {"Float[5]", "Float[4]"}},
      {at::ones({1 << 20}), at::zeros({8}), "", "", {"1048576", "[8]"}},
      {at::ones({8}), at::zeros({1 << 20}), "", "", {"1048576", "[8]"}},
      {at::ones({2, 3}), at::zeros({3, 2}), "", "", {"[2, 3]", "[3, 2]"}},
      {at::ones({4}), at::zeros({4}, at::kInt), "", "", {"Float[4]", "Int[4]"}},
      {at::ones({0}), at::zeros({4}), "", "", {"[0]", "[4]"}},
      {at::ones({4}), at::zeros({0}), "", "", {"[4]", "[0]"}},
      {at::ones({4}), at::zeros({4}), "rows", "columns", {"'rows'", "'columns'"}}};
  const auto manager = DistributedManager::initialize(
      {.check_level = CheckLevel::collective, .mpi = mpi_world(MPI_COMM_WORLD)});
  const int me = manager.rank(), last = manager.world_size() - 1;
  if (last == 0) return;
  // From the first rank to the last; the group goes on.
  for (const bool started : {false, true}) {
    for (std::size_t c = 0; c < cases.size() && (me == 0 || me == last); ++c) {
      const Case& test = cases[c];
      const Group group = manager.group({0, last}, {.timeout = std::chrono::milliseconds(20000)});
      try {
        if (me == 0) {
          started ? group.started().send(test.sent, 1, {.name = test.sent_as}).wait()
                  : group.send(test.sent, 1, {.name = test.sent_as});
        } else {
          started ? group.started().receive(test.received, 0, {.name = test.received_as}).wait()
                  : group.receive(test.received, 0, {.name = test.received_as});
        }
        ADD_FAILURE() << "no error for " << test.words[0] << " and " << test.words[1];
      } catch (const MismatchError& e) {
        for (const auto& word : test.words)
          EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
      }
      const at::Tensor t = at::full({3}, me + 1.0);
      me == 0 ? group.send(t, 1) : group.receive(t, 0);
      EXPECT_EQ(t[2].item<float>(), 1);
    }
    manager.world().barrier();
  }
}

// What a rank starts goes on while it waits for something else.
TEST(MpiInterop, ComparedMessagesTravelInAnyOrderOfWaits) {
  const auto manager = DistributedManager::initialize(
      {.check_level = CheckLevel::collective, .mpi = mpi_world(MPI_COMM_WORLD)});
  const Group world = manager.world();
  const int n = world.size(), me = world.rank(), next = (me + 1) % n, before = (me + n - 1) % n;
  if (n == 1) return;
  for (int round = 0; round < 20; ++round) {
    const at::Tensor got = at::zeros({1 << 15}, at::kDouble), small = at::zeros({7}),
                     none = at::zeros({0, 3});
    auto sent = world.started().send(at::full({1 << 15}, me + 10.0 * round, at::kDouble), next);
    auto second = world.started().send(at::full({7}, static_cast<double>(me)), next);
    auto received = world.started().receive(got, before);
    sent.wait();
    world.barrier();
    world.receive(small, before);
    second.wait();
    received.wait();
    EXPECT_TRUE(got.eq(before + 10.0 * round).all().item<bool>());
    EXPECT_TRUE(small.eq(before).all().item<bool>());
    world.exchange(
        {{Message::Kind::send, none, next}, {Message::Kind::receive, none.clone(), before}});
  }
}

TEST(MpiInterop, ComparedMessagesTravelWhileOneIsOnlyAskedFor) {
  const auto manager = DistributedManager::initialize(
      {.check_level = CheckLevel::collective, .mpi = mpi_world(MPI_COMM_WORLD)});
  const Group world = manager.world();
  if (world.size() == 1 || world.rank() > 1) return;
  const at::Tensor given = at::full({5}, 3.0), got = at::zeros({5});
  if (world.rank() == 0) {
    auto sent = world.started().send(given, 1), received = world.started().receive(got, 1);
    while (!received.done()) {
    }
    received.wait();
    sent.wait();
    EXPECT_TRUE(got.eq(6).all().item<bool>());
  } else {
    world.receive(got, 0);
    world.send(got * 2, 0);
  }
}

TEST(MpiInterop, GroupOnACommunicatorOfTheProgram) {
  const Split split;
  {
    const MpiWorld world = mpi_world(split.comm);
    EXPECT_EQ(world.rank(), split.rank);
    EXPECT_EQ(world.size(), split.size);
    std::vector<int> ranks(static_cast<std::size_t>(split.size));
    std::iota(ranks.begin(), ranks.end(), 0);
    const auto group = backend(world, ranks);
    std::vector<at::Tensor> t{at::full({5}, 10.0 * split.colour + split.rank, at::kDouble)};
    for (int i = 0; i < 3; ++i) {
      // The program's own messages on the same ranks, in between, with the tags that groups use.
      int token = split.rank, other = -1;
      MPI_Sendrecv(&token, 1, MPI_INT, (split.rank + 1) % split.size, 0, &other, 1, MPI_INT,
                   (split.rank + split.size - 1) % split.size, 0, split.comm, MPI_STATUS_IGNORE);
      EXPECT_EQ(other, (split.rank + split.size - 1) % split.size);
      std::vector<at::Tensor> u{t[0].clone()};
      const auto work = group->allreduce(u, c10d::AllreduceOptions());
      MPI_Barrier(split.comm);
      work->wait();
      EXPECT_TRUE(u[0].eq(10.0 * split.colour * split.size + split.size * (split.size - 1) / 2.0)
                      .all()
                      .item<bool>());
    }
  }
  EXPECT_FALSE(mpi_is_finalized());
}

TEST(MpiInterop, InitializeDoesNotInitialiseTwiceNorFinalise) {
  int provided = -1;
  MPI_Query_thread(&provided);
  {
    // The program's level stands.
    const MpiWorld world = MpiWorld::initialize(MpiThreadLevel::multiple);
    EXPECT_EQ(static_cast<int>(world.thread_level()), provided == MPI_THREAD_MULTIPLE     ? 3
                                                      : provided == MPI_THREAD_SERIALIZED ? 2
                                                      : provided == MPI_THREAD_FUNNELED   ? 1
                                                                                          : 0);
    const auto group = backend(world, all_ranks(world));
    group->barrier(c10d::BarrierOptions())->wait();
    EXPECT_FALSE(mpi_library().empty());
    EXPECT_FALSE(world.host().empty());
  }
  EXPECT_FALSE(mpi_is_finalized());
  const MpiWorld again = MpiWorld::initialize();
  EXPECT_FALSE(mpi_is_finalized());
}

TEST(MpiInterop, WrongCommunicatorsAreRefused) {
  EXPECT_THROW(mpi_world(MPI_COMM_NULL), InvalidArgument);
  const Split split;
  int world_size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  if (world_size < 2) return;
  MPI_Comm inter = MPI_COMM_NULL;
  MPI_Intercomm_create(split.comm, split.size - 1, MPI_COMM_WORLD, 1 - split.colour, 1, &inter);
  EXPECT_THROW(mpi_world(inter), InvalidArgument);
  MPI_Comm_free(&inter);
}

// Each of its programs would be a job of one rank, and all would write the same files.
TEST(MpiInterop, AWorldOfOneUnderALauncherOfSeveralIsRefused) {
  const std::map<std::string, std::string> launcher = {
      {"TESSERA_RANK", "1"},       {"TESSERA_WORLD_SIZE", "2"}, {"TESSERA_LOCAL_RANK", "1"},
      {"TESSERA_LOCAL_SIZE", "2"}, {"TESSERA_NODE_RANK", "0"},  {"TESSERA_ADDRESS", "127.0.0.1"},
      {"TESSERA_PORT", "29500"}};
  ManagerOptions options;
  options.mpi = mpi_world(MPI_COMM_SELF);
  for (const auto& [name, value] : launcher) ::setenv(name.c_str(), value.c_str(), 1);
  try {
    (void)DistributedManager::initialize(options);
    ADD_FAILURE() << "two jobs of one rank";
  } catch (const ConfigurationError& error) {
    EXPECT_NE(std::string(error.what()).find("Start it with mpirun"), std::string::npos)
        << error.what();
  }
  ::setenv("TESSERA_WORLD_SIZE", "1", 1);
  ::setenv("TESSERA_RANK", "0", 1);
  ::setenv("TESSERA_LOCAL_RANK", "0", 1);
  ::setenv("TESSERA_LOCAL_SIZE", "1", 1);
  EXPECT_EQ(DistributedManager::initialize(options).world_size(), 1);
  for (const auto& [name, value] : launcher) ::unsetenv(name.c_str());
  EXPECT_EQ(DistributedManager::initialize(options).world_size(), 1);
}

}  // namespace tessera::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  if (argc > 1 && std::strcmp(argv[1], "multiple") == 0)
    tessera::test::level_wanted = MPI_THREAD_MULTIPLE;
  try {
    (void)tessera::mpi_world(MPI_COMM_WORLD);
    return EXIT_FAILURE;  // MPI is not initialised yet: this must be refused.
  } catch (const tessera::InvalidArgument&) {
  }
  int provided = 0;
  MPI_Init_thread(&argc, &argv, tessera::test::level_wanted, &provided);
  const int failed = RUN_ALL_TESTS();
  MPI_Finalize();
  return failed;
}
