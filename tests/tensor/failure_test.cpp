// An error that one rank alone sees ends the waits of the others with an error of a type of its
// own; where all ranks catch theirs, everything goes on.

#include "support.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::test {
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

}  // namespace
}  // namespace tessera::test
