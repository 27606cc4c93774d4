// An error that one rank alone sees ends the waits of the others with an error of a type of its
// own; where all ranks catch theirs, everything goes on.

#include "support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::test::failure_test {
namespace {

// An index that is out of range on one rank alone: the others look up what is there.
void look_up(const DeviceMesh& mesh, int bad, int ranks) {
  const at::Tensor values = at::arange(ranks * 3, at::kDouble).view({ranks, 3});
  at::Tensor index = at::zeros({ranks, 1}, at::kLong);
  if (bad >= 0) index[bad][0] = 7;
  const at::Tensor found = at::gather(distribute_tensor(values, mesh, {Shard(0)}), 1,
                                      distribute_tensor(index, mesh, {Shard(0)}));
  EXPECT_DOUBLE_EQ(found.sum().item<double>(), 3.0 * ranks * (ranks - 1) / 2);
}

enum class Seen : char { nothing, own, peer };

Seen seen(const std::function<void()>& step) {
  try {
    step();
  } catch (const PeerFailedError& e) {
    EXPECT_EQ(e.ranks().size(), 1u);
    EXPECT_NE(std::string(e.what()).find("aten::gather"), std::string::npos) << e.what();
    return Seen::peer;
  } catch (const CommError& e) {
    ADD_FAILURE() << e.what();
  } catch (const std::exception&) {
    return Seen::own;
  }
  return Seen::nothing;
}

void on(int ranks, const char* backend, const std::function<void(DistributedManager&)>& body) {
  run_threads(ranks,
              [&](DistributedManager& manager) {
                at::set_num_threads(1);
                seed(0);
                body(manager);
              },
              {.backend = backend, .timeout = std::chrono::seconds(20)});
}

class Failure : public ::testing::TestWithParam<const char*> {};

TEST_P(Failure, OfOneRankIsCaughtByAll) {
  for (const int ranks : {2, 3}) {
    on(ranks, GetParam(), [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", ranks}});
      // The first one before any group was made.
      for (int step = 0; step < 6; ++step) {
        const int bad = step % 2 == 0 ? (step / 2) % ranks : -1;
        const Seen saw = seen([&] {
          look_up(mesh, bad, ranks);
          mesh.all().barrier();
        });
        EXPECT_EQ(saw, bad < 0 ? Seen::nothing : bad == manager.rank() ? Seen::own : Seen::peer);
        mesh.all().barrier();
        EXPECT_DOUBLE_EQ(distribute_tensor(at::ones({5}), mesh, {Shard(0)}).sum().item<double>(),
                         5);
      }
    });
  }
}

TEST_P(Failure, OfAllRanksAtOnceIsOne) {
  on(3, GetParam(), [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    for (int step = 0; step < 3; ++step) {
      EXPECT_ANY_THROW({
        at::gather(distribute_tensor(at::ones({3, 3}), mesh, {Shard(0)}), 1,
                   distribute_tensor(at::full({3, 1}, 9, at::kLong), mesh, {Shard(0)}));
        mesh.all().barrier();
      });
      mesh.all().barrier();
    }
    look_up(mesh, -1, 3);
  });
}

TEST_P(Failure, EndsGroupsAlongEveryAxisAndNoOthers) {
  on(4, GetParam(), [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"a", 2}, {"b", 2}});
    const int pair = manager.rank() / 2;
    const auto half = manager.mesh(Mesh({{"x", 2}}, {2 * pair, 2 * pair + 1}));
    const auto grid = [&] {
      const at::Tensor t =
          distribute_tensor(at::arange(12, at::kDouble).view({4, 3}), mesh, {Shard(0), Shard(1)});
      EXPECT_DOUBLE_EQ(t.sum(1).square().sum().item<double>(), 9 + 144 + 441 + 900);
    };
    grid();
    Group world = manager.world();
    // Of a mesh of two ranks: the other two hear nothing.
    const Seen saw = seen([&] {
      look_up(half, pair == 0 ? 1 : -1, 2);
      half.all().barrier();
    });
    EXPECT_EQ(saw, pair == 1 ? Seen::nothing : manager.rank() == 1 ? Seen::own : Seen::peer);
    world.barrier();
    grid();
    look_up(half, -1, 2);
    // Of the whole mesh: groups along rows and columns, and the halves', are made anew.
    const Seen next = seen([&] {
      const at::Tensor values = at::ones({4, 3}, at::kDouble);
      at::Tensor index = at::zeros({4, 1}, at::kLong);
      index[0][0] = 5;
      at::gather(distribute_tensor(values, mesh, {Shard(0), Replicate()}), 1,
                 distribute_tensor(index, mesh, {Shard(0), Replicate()}));
      mesh.all().barrier();
    });
    EXPECT_EQ(next, manager.rank() < 2 ? Seen::own : Seen::peer);
    manager.world().barrier();
    grid();
    look_up(half, -1, 2);
    EXPECT_THROW(world.barrier(), PeerFailedError) << "a group of before";
  });
}

TEST_P(Failure, IsReportedAtTheNextCallWhereNoneIsPending) {
  on(2, GetParam(), [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    look_up(mesh, -1, 2);
    if (manager.rank() == 0) {
      EXPECT_EQ(seen([&] { look_up(mesh, 0, 2); }), Seen::own);
    } else {
      EXPECT_EQ(seen([&] {
                  for (;;) look_up(mesh, -1, 2);
                }),
                Seen::peer);
    }
    mesh.all().barrier();
    for (int i = 0; i < 3; ++i) look_up(mesh, -1, 2);
  });
}

// Ranks that fail alike several times, without a call between, have failed as often.
TEST_P(Failure, OfAllRanksSeveralTimes) {
  on(3, GetParam(), [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const at::Tensor values = distribute_tensor(at::ones({3, 3}), mesh, {Shard(0)}),
                     index = distribute_tensor(at::full({3, 1}, 9, at::kLong), mesh, {Shard(0)});
    for (int round = 0; round < 5; ++round) {
      for (int i = 0; i <= round; ++i) EXPECT_THROW(at::gather(values, 1, index), c10::Error);
      look_up(mesh, -1, 3);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Over, Failure, ::testing::Values("threads", "gloo"));

// What is kept between steps survives it: plans, halos, the reducer of gradients.
TEST(AfterAFailure, TrainingGoesOn) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow});
    const at::Tensor field = randn({1, 2, 8, 6}, at::kDouble);
    torch::nn::Conv2d plain(torch::nn::Conv2dOptions(2, 2, 3).padding(1)),
        net(torch::nn::Conv2dOptions(2, 2, 3).padding(1));
    for (auto* each : {&plain, &net}) {
      (*each)->to(at::kDouble);
      fill(**each, 3);
    }
    distribute_module(*net, mesh);
    const auto step = [](torch::nn::Conv2d& of, const at::Tensor& x) {
      for (auto& p : of->parameters()) p.mutable_grad() = at::Tensor();
      of(x).square().sum().backward();
      const at::NoGradGuard guard;
      for (auto& p : of->parameters()) p.sub_(p.grad(), 1e-3);
    };
    for (int i = 0; i < 4; ++i) {
      step(plain, field);
      step(net, distribute_tensor(field, mesh, {Shard(2)}));
      const Seen saw = seen([&] {
        look_up(mesh, i % 2, 2);
        mesh.all().barrier();
      });
      EXPECT_EQ(saw, manager.rank() == i % 2 ? Seen::own : Seen::peer);
      mesh.all().barrier();
    }
    for (std::size_t i = 0; i < plain->parameters().size(); ++i)
      EXPECT_LT(difference(net->parameters()[i], plain->parameters()[i]), 1e-12);
  });
}

// A rank alone fails, and the others make `draws` draws before they hear of it.
void fail_and_draw(const DeviceMesh& mesh, int bad, const std::function<void()>& draws) {
  const int ranks = mesh.mesh().size();
  at::Tensor index = at::zeros({ranks, 1}, at::kLong);
  index[bad][0] = 7;
  EXPECT_ANY_THROW({
    at::gather(distribute_tensor(at::ones({ranks, 3}), mesh, {Shard(0)}), 1,
               distribute_tensor(index, mesh, {Shard(0)}));
    draws();
    mesh.all().barrier();
  });
  mesh.all().barrier();
}

// Numbers of a replicated tensor, which all ranks must have drawn alike.
at::Tensor drawn_alike(const DeviceMesh& mesh, const char* where) {
  const at::Tensor mine =
      to_local(at::dropout(distribute_tensor(at::ones({64}, at::kDouble), mesh, {Replicate()}), 0.5,
                           true))
          .contiguous();
  const at::Tensor all = at::empty({mesh.all().size(), 64}, at::kDouble);
  mesh.all().all_gather(all, mine);
  for (const at::Tensor& each : all.unbind()) EXPECT_TRUE(each.equal(mine)) << where;
  return mine;
}

TEST_P(Failure, LeavesRandomNumbersInStep) {
  for (const int ranks : {2, 3}) {
    on(ranks, GetParam(), [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", ranks}}),
                 alone = manager.mesh(Mesh({{"x", 1}}, {manager.rank()}));
      const auto draw = [&] {
        return at::rand_like(distribute_tensor(at::ones({5}, at::kDouble), mesh, {Shard(0)}));
      };
      const auto draws = [&](int n) {
        return [n, &draw] {
          for (int i = 0; i < n; ++i) draw();
        };
      };
      drawn_alike(mesh, "before");
      const std::uint64_t seed = random_state(manager).seed;
      const std::uint64_t before = random_state(manager).stream;
      // Those who drew had drawn three times: all go on from there.
      fail_and_draw(mesh, 0, draws(3));
      const at::Tensor got = drawn_alike(mesh, "after");
      const RandomState now = random_state(manager);
      EXPECT_TRUE((now == RandomState{seed, before + 4}));
      set_random_state(manager, {seed, before + 3});
      const at::Tensor one = at::dropout(
          distribute_tensor(at::ones({64}, at::kDouble), alone, {Replicate()}), 0.5, true);
      EXPECT_TRUE(to_local(one).equal(got)) << "as one process that drew as often";
      set_random_state(manager, now);
      drawn_alike(mesh, "again");
      // Failures without a draw between them, of different ranks.
      fail_and_draw(mesh, ranks - 1, draws(2));
      fail_and_draw(mesh, 0, draws(1));
      drawn_alike(mesh, "after two");
      EXPECT_TRUE(whole(draw()).equal(whole(draw())) == false);
    });
  }
}

// A forward is drawn again: what was read before the failure, or before the ranks met after it.
TEST_P(Failure, LeavesReadStatesOfRandomNumbersInStep) {
  on(2, GetParam(), [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const RandomState first = random_state(manager);
    const at::Tensor drawn = drawn_alike(mesh, "before");
    fail_and_draw(mesh, 0, [&] { drawn_alike(mesh, "not compared"); });
    const RandomState apart = random_state(manager);
    const at::Tensor after = drawn_alike(mesh, "after");
    const RandomState next = random_state(manager);
    // Drawn before the failure.
    set_random_state(manager, first);
    EXPECT_TRUE(drawn_alike(mesh, "of before").equal(drawn));
    // Read where the ranks were apart.
    set_random_state(manager, apart);
    EXPECT_TRUE(drawn_alike(mesh, "of where they were apart").equal(after));
    set_random_state(manager, next);
    const at::Tensor later = drawn_alike(mesh, "where they had met");
    EXPECT_FALSE(later.equal(after));
    // Ranks that have met need not do so again where one puts back what it read since.
    const at::Tensor x = distribute_tensor(at::ones({5}, at::kDouble), mesh, {Replicate()});
    CommTraceScope trace(manager);
    const RandomState kept = random_state(manager);
    at::rand_like(x);
    set_random_state(manager, kept);
    at::rand_like(x);
    EXPECT_TRUE(trace->summary().empty()) << trace->table();
  });
}

// Ranks that compared something once have perhaps not all heard the answer.
TEST(AfterAFailure, WhatWasAgreedOnIsComparedAnew) {
  constexpr std::uint64_t kA = 1, kB = 2;
  detail::Agreed agreed(8);
  agreed.add({0, 1}, 0, kA);
  agreed.add({0, 2}, 0, kA);
  EXPECT_TRUE(agreed.contains({0, 1}, 0, kA));
  EXPECT_FALSE(agreed.contains({0, 1}, 1, kA));
  agreed.add({0, 1}, 1, kB);
  EXPECT_TRUE(agreed.contains({0, 1}, 1, kB));
  EXPECT_FALSE(agreed.contains({0, 1}, 1, kA));
  EXPECT_TRUE(agreed.contains({0, 2}, 0, kA));
  // And locals whose spec was asked for before.
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    for (int bad = 0; bad < 3; ++bad) {
      from_local(at::ones({2}), mesh, {Shard(0)});
      fail_and_draw(mesh, bad, [&] { from_local(at::ones({2 + bad}), mesh, {Shard(0)}); });
      for (int n = 2; n < 6; ++n)
        EXPECT_EQ(from_local(at::ones({n}), mesh, {Shard(0)}).size(0), 3 * n);
    }
  });
}

}  // namespace
}  // namespace tessera::test::failure_test
