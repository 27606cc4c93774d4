// What the default check level promises: ranks that call different things, and tensors that no
// backend can use, end in typed errors, never in a crash. Ranks are threads.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <future>
#include <iterator>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/deadline.h"
#include "tessera/comm/backends/nccl/nccl.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/group/detail/memory.h"
#include "tessera/comm/group/detail/reduction.h"
#include "tessera/comm/job/threads.h"

namespace tessera::default_level_test {
namespace {

using torch::Tensor;
using Call = std::function<void(const Group&)>;

ManagerOptions over(const std::string& backend) {
  ManagerOptions options;
  options.backend = backend;
  options.timeout = std::chrono::seconds(60);
  return options;
}

struct Difference {
  std::string name;
  Call most, odd;
};

std::vector<Difference> differences() {
  const auto reduce = [](std::int64_t n, c10::ScalarType dtype = torch::kFloat,
                         ReduceOp op = ReduceOp::sum) -> Call {
    return [=](const Group& g) { g.all_reduce(torch::ones({n}, dtype), op); };
  };
  const auto gather = [](std::int64_t rows) -> Call {
    return [=](const Group& g) {
      Sizes sizes(static_cast<std::size_t>(g.size()), 2);
      sizes[0] = rows;
      const auto mine = sizes[static_cast<std::size_t>(g.rank())];
      g.all_gather(torch::ones({rows + 2 * (g.size() - 1), 3}), torch::ones({mine, 3}), sizes);
    };
  };
  // Rank `from` sends `rows` rows to rank 1, which waits for two.
  const auto exchange = [](std::int64_t rows) -> Call {
    return [=](const Group& g) {
      Sizes in(static_cast<std::size_t>(g.size()), 2), out(in);
      in[1] = g.rank() == 1 ? 2 : rows;
      const auto sum = 2 * (g.size() - 1) + in[1];
      g.all_to_all(torch::zeros({2 * g.size(), 5}), torch::ones({sum, 5}), out, in);
    };
  };
  return {
      {"fewer elements", reduce(100000), reduce(10)},
      {"more elements", reduce(10), reduce(100000)},
      {"float for double", reduce(64, torch::kDouble), reduce(64)},
      {"same bytes, another dtype", reduce(64), reduce(64, torch::kInt)},
      {"reduce operation", reduce(64, torch::kLong), reduce(64, torch::kLong, ReduceOp::max)},
      {"operation", reduce(64), [](const Group& g) { g.broadcast(torch::ones({64}), 0); }},
      {"barrier", reduce(64), [](const Group& g) { g.barrier(); }},
      {"root", [](const Group& g) { g.broadcast(torch::ones({64}), 0); },
       [](const Group& g) { g.broadcast(torch::ones({64}), 1); }},
      {"a root of its own", [](const Group& g) { g.broadcast(torch::ones({64}), 0); },
       [](const Group& g) { g.broadcast(torch::ones({64}), 2); }},
      {"broadcast", [](const Group& g) { g.broadcast(torch::ones({1 << 18}), 0); },
       [](const Group& g) { g.broadcast(torch::ones({3}), 0); }},
      {"part of a gather",
       [](const Group& g) { g.gather(torch::ones({4 * g.size()}), torch::ones({4}), 0); },
       [](const Group& g) { g.gather(torch::ones({9 * g.size()}), torch::ones({9}), 0); }},
      {"row sizes", gather(3), gather(4)},
      {"reduce_scatter",
       [](const Group& g) { g.reduce_scatter(torch::ones({4}), torch::ones({4 * g.size()})); },
       [](const Group& g) { g.reduce_scatter(torch::ones({7}), torch::ones({7 * g.size()})); }},
      {"sizes of all_to_all", exchange(2), exchange(9)},
      {"all_to_all with sizes", reduce(64), exchange(2)},
      {"started",
       [](const Group& g) {
         auto t = torch::ones({5000});
         g.started().all_reduce(t).wait();
       },
       [](const Group& g) {
         auto t = torch::ones({50});
         g.started().all_reduce(t).wait();
       }},
  };
}

class DefaultLevel : public ::testing::TestWithParam<std::string> {};

// All cases at the same time: each lasts about as long as the group takes to look for a difference.
TEST_P(DefaultLevel, RanksThatCallDifferentThingsGetAMismatchErrorEach) {
  const auto cases = differences();
  std::vector<std::thread> runs;
  for (const auto& difference : cases)
    runs.emplace_back([&] {
      std::atomic<int> told{0};
      try {
        run_threads(
            3,
            [&](DistributedManager& manager) {
              const auto world = manager.world();
              try {
                // Else the error of the others may meet a rank that is still making the group.
                world.barrier();
                (world.rank() == 2 ? difference.odd : difference.most)(world);
                // A rank that needed nothing of the odd one hears of it at its next call.
                world.all_reduce(torch::ones({2}));
                ADD_FAILURE() << difference.name << ": no error on rank " << world.rank();
              } catch (const MismatchError& e) {
                ++told;
                EXPECT_NE(std::string(e.what()).find("called different things"), std::string::npos)
                    << difference.name << ": " << e.what();
              }
            },
            over(GetParam()));
      } catch (const std::exception& e) {
        ADD_FAILURE() << difference.name << ": " << e.what();
      }
      EXPECT_EQ(told, 3) << difference.name;
    });
  for (auto& run : runs) run.join();
}

TEST_P(DefaultLevel, BothEndsOfAMessageThatDoesNotFitThrow) {
  struct Ends {
    std::string name;
    Tensor sent, received;
  };
  const std::vector<Ends> cases{
      {"longer", torch::ones({1000}), torch::ones({500})},
      {"shorter", torch::ones({500}), torch::ones({1000})},
      {"dtype", torch::ones({100}), torch::ones({100}, torch::kDouble)},
      {"same bytes", torch::ones({100}), torch::ones({100}, torch::kInt)}};
  std::vector<std::thread> runs;
  for (const auto& ends : cases)
    runs.emplace_back([&] {
      std::atomic<int> told{0};
      try {
        run_threads(
            2,
            [&](DistributedManager& manager) {
              const auto world = manager.world();
              try {
                if (world.rank() == 0)
                  world.send(ends.sent, 1);
                else
                  world.receive(ends.received, 0);
                ADD_FAILURE() << ends.name << ": no error on rank " << world.rank();
              } catch (const MismatchError&) {
                ++told;
              }
            },
            over(GetParam()));
      } catch (const std::exception& e) {
        ADD_FAILURE() << ends.name << ": " << e.what();
      }
      EXPECT_EQ(told, 2) << ends.name;
    });
  for (auto& run : runs) run.join();
}

// A slow rank is no mismatch: what was said at the store is taken back.
TEST_P(DefaultLevel, ALateRankIsWaitedFor) {
  run_threads(
      2,
      [&](DistributedManager& manager) {
        const auto world = manager.world();
        auto t = torch::ones({4}), got = torch::zeros({3});
        if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1400));
        world.all_reduce(t);
        EXPECT_EQ(t[3].item<float>(), 2);
        if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1400));
        world.rank() == 1 ? world.send(torch::ones({3}), 0) : world.receive(got, 1);
        if (world.rank() == 0) {
          EXPECT_EQ(got[2].item<float>(), 1);
        }
      },
      over(GetParam()));
}

struct Bad {
  std::string name;
  Call call;
};

std::vector<Bad> unusable() {
  const auto reduces = [](std::function<Tensor()> make) -> Call {
    return [=](const Group& g) { g.all_reduce(make()); };
  };
  const auto around = [](const Group& g) { return (g.rank() + 1) % g.size(); };
  const auto back = [](const Group& g) { return (g.rank() + g.size() - 1) % g.size(); };
  return {
      {"undefined", reduces([] { return Tensor(); })},
      {"sparse", reduces([] { return torch::ones({2, 2}).to_sparse(); })},
      {"nested", reduces([] {
         return at::_nested_tensor_from_tensor_list({torch::ones({2}), torch::ones({3})});
       })},
      {"quantized",
       reduces([] { return at::quantize_per_tensor(torch::ones({4}), 0.5, 0, torch::kQInt8); })},
      {"zeros without memory", reduces([] { return at::_efficientzerotensor({4}); })},
      {"freed memory", reduces([] {
         auto t = torch::ones({1000});
         t.storage().unsafeGetStorageImpl()->set_nbytes(16);
         return t;
       })},
      {"expanded", reduces([] { return torch::ones({1}).expand({3}); })},
      {"overlapping strides", reduces([] { return torch::ones({9}).as_strided({3, 3}, {1, 1}); })},
      {"a quantized message",
       [=](const Group& g) {
         const auto q = at::quantize_per_tensor(torch::ones({4}), 0.5, 0, torch::kQInt8);
         g.exchange({{Message::Kind::send, q, around(g)},
                     {Message::Kind::receive, torch::ones({4}), back(g)}});
       }},
      {"sent from where something is received",
       [=](const Group& g) {
         auto t = torch::ones({8});
         g.exchange({{Message::Kind::send, t, around(g)}, {Message::Kind::receive, t, back(g)}});
       }},
      {"two receives in one place",
       [=](const Group& g) {
         auto t = torch::ones({8});
         g.exchange({{Message::Kind::receive, t.narrow(0, 0, 5), back(g)},
                     {Message::Kind::receive, t.narrow(0, 4, 4), back(g)},
                     {Message::Kind::send, torch::ones({5}), around(g)},
                     {Message::Kind::send, torch::ones({4}), around(g)}});
       }},
  };
}

TEST_P(DefaultLevel, UnusableTensorsAreRefusedAndTheGroupGoesOn) {
  for (const auto level : {CheckLevel::local, CheckLevel::collective})
    run_threads(
        2,
        [&](DistributedManager& manager) {
          auto world = manager.world();
          world.set_check_level(level);
          for (const auto& bad : unusable()) {
            EXPECT_THROW(bad.call(world), InvalidArgument) << bad.name;
            auto t = torch::ones({4});
            world.all_reduce(t);
            EXPECT_EQ(t[3].item<float>(), 2) << bad.name;
          }
        },
        over(GetParam()));
}

TEST_P(DefaultLevel, ZerosWithoutMemoryTravelAsZeros) {
  run_threads(
      2,
      [&](DistributedManager& manager) {
        const auto world = manager.world();
        const auto zeros = at::_efficientzerotensor({3});
        auto all = torch::ones({6});
        world.all_gather(all, zeros);
        EXPECT_TRUE(all.equal(torch::zeros({6})));
        auto part = torch::ones({3});
        world.reduce_scatter(part, at::_efficientzerotensor({6}));
        EXPECT_TRUE(part.equal(torch::zeros({3})));
        auto got = torch::ones({3});
        world.exchange({{Message::Kind::send, zeros, 1 - world.rank()},
                        {Message::Kind::receive, got, 1 - world.rank()}});
        EXPECT_TRUE(got.equal(torch::zeros({3})));
        auto sum = torch::full({3}, 5.0);
        world.reduce(world.rank() == 0 ? sum : zeros, 0);
        if (world.rank() == 0) {
          EXPECT_EQ(sum[0].item<float>(), 5);
        }
      },
      over(GetParam()));
}

TEST_P(DefaultLevel, TheLongestLimitIsNoLimit) {
  run_threads(
      2,
      [&](DistributedManager& manager) {
        const auto world = manager.world();
        auto t = torch::ones({4});
        world.all_reduce(t, ReduceOp::sum, {.timeout = std::chrono::milliseconds::max()});
        world.rank() == 0 ? world.send(t, 1, {.timeout = std::chrono::milliseconds::max()})
                          : world.receive(t, 0, {.timeout = std::chrono::milliseconds::max()});
        EXPECT_EQ(t[0].item<float>(), 2);
      },
      over(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Backends, DefaultLevel, ::testing::Values("threads", "gloo", "shm"),
                         [](const auto& info) { return info.param; });

// What a device has no CPU loop for.
TEST(Reduction, OrderKeysByOperatorsEqualThoseOfTheLoop) {
  const auto inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  for (const auto dtype : {torch::kFloat, torch::kDouble})
    for (const auto op : {ReduceOp::Kind::min, ReduceOp::Kind::max}) {
      const auto values =
          torch::cat({torch::randn({100}, torch::kDouble),
                      torch::tensor({0.0, -0.0, inf, -inf, nan, 1e-310, -1e-40}, torch::kDouble)})
              .to(dtype);
      const auto keys = detail::order_keys(values, op, /*on_cpu=*/true);
      EXPECT_TRUE(keys.equal(detail::order_keys(values, op, /*on_cpu=*/false)));
      auto loop = torch::empty_like(values), operators = torch::empty_like(values);
      detail::from_order_keys(loop, keys, op, /*on_cpu=*/true);
      detail::from_order_keys(operators, keys, op, /*on_cpu=*/false);
      EXPECT_TRUE(at::allclose(loop, operators, 0, 0, /*equal_nan=*/true));
      EXPECT_TRUE(at::allclose(values, operators, 0, 0, /*equal_nan=*/true));
    }
}

// Who waits for the reason of a failure hears at once that there will be none.
TEST(Watch, AMemberThatHasLeftEndsTheWaitForNews) {
  struct Silent : detail::FaultChannel {
    void announce(const std::string&, const std::vector<int>&,
                  const detail::Poison&) noexcept override {}
    std::vector<detail::RollEntry> roll_call(const std::string&, const std::vector<int>&,
                                             std::chrono::milliseconds) noexcept override {
      return {};
    }
  };
  detail::GroupWatch watch("test", {0, 1}, 0, std::make_shared<Silent>());
  std::thread other([&watch] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    watch.note_left(1, "rank 1 has left");
  });
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(watch.await_news(std::chrono::seconds(15)));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  other.join();
}

// A call that a stream waits for, and no thread: its limit ends the group all the same.
TEST(Guarded, ACallThatNobodyWaitsForEndsAtItsLimit) {
  class Never : public c10d::Work {
    bool isCompleted() override { return false; }
  };
  class Complete : public c10d::Work {
    bool isCompleted() override { return true; }
  };
  detail::GroupSpec spec;
  spec.name = "test";
  spec.ranks = {0, 1};
  spec.backend = "gloo";
  spec.timeout = std::chrono::seconds(60);
  spec.watch = std::make_shared<detail::GroupWatch>(spec.name, spec.ranks, 0, nullptr);
  detail::GroupState group(spec);
  const auto soon = deadline_after(std::chrono::milliseconds(50));
  group.guard({c10::make_intrusive<Complete>(), soon, "broadcast", 0, {}, true});
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  EXPECT_EQ(spec.watch->poison(), nullptr);
  group.guard({c10::make_intrusive<Never>(), soon, "all_reduce", 1, {}, true});
  const auto limit = deadline_after(std::chrono::seconds(20));
  while (!spec.watch->poison() && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_THROW(spec.watch->require_healthy("all_reduce", 2), TimeoutError);
}

TEST(Connecting, HasTheLimitOfTheGroup) {
  class Slow : public c10d::Backend {
   public:
    explicit Slow(std::shared_future<void> answer)
        : c10d::Backend(0, 2), answer_(std::move(answer)) {}
    const std::string getBackendName() const override { return "slow"; }
    void eagerConnectSingleDevice(at::Device) override {
      answer_.wait_for(std::chrono::seconds(60));
      throw std::runtime_error("no route");
    }

   private:
    std::shared_future<void> answer_;
  };
  std::promise<void> answer;
  const c10::intrusive_ptr<c10d::Backend> backend =
      c10::make_intrusive<Slow>(answer.get_future().share());
  EXPECT_THROW(connect_within(backend, at::Device("cuda:0"), std::chrono::milliseconds(50)),
               TimeoutError);
  answer.set_value();
  EXPECT_THROW(connect_within(backend, at::Device("cuda:0"), std::chrono::milliseconds::max()),
               std::runtime_error);
}

// Against brute force: the addresses of all elements.
TEST(Memory, SharedElementsAreFoundForAllStrides) {
  torch::manual_seed(1);
  const auto base = torch::zeros({400});
  const auto addresses = [](const Tensor& t) {
    std::vector<const void*> all;
    for (std::int64_t i = 0; i < t.numel(); ++i) {
      auto left = i;
      std::int64_t offset = 0;
      for (std::int64_t d = t.dim() - 1; d >= 0; --d) {
        offset += left % t.size(d) * t.stride(d);
        left /= t.size(d);
      }
      all.push_back(t.data_ptr<float>() + offset);
    }
    std::ranges::sort(all);
    return all;
  };
  const auto number = [](std::int64_t from, std::int64_t to) {
    return torch::randint(from, to, {1}).item<std::int64_t>();
  };
  std::vector<Tensor> views;
  for (int i = 0; i < 40; ++i) {
    views.push_back(base.as_strided({number(1, 4), number(1, 5)}, {number(0, 12), number(0, 4)},
                                    number(0, 60)));
    const auto grid = base.view({20, 20});
    views.push_back(grid.narrow(0, number(0, 17), 3).narrow(1, number(0, 17), number(1, 3)));
    views.push_back(base.narrow(0, number(0, 50), number(1, 20)));
  }
  int overlaps = 0;
  for (std::size_t i = 0; i < views.size(); ++i) {
    const auto mine = addresses(views[i]);
    const bool twice = std::ranges::adjacent_find(mine) != mine.end();
    EXPECT_EQ(detail::shares_elements(views[i]), twice) << views[i].sizes() << views[i].strides();
    for (std::size_t j = 0; j < i; ++j) {
      const auto theirs = addresses(views[j]);
      std::vector<const void*> both;
      std::set_intersection(mine.begin(), mine.end(), theirs.begin(), theirs.end(),
                            std::back_inserter(both));
      overlaps += both.empty() ? 0 : 1;
      EXPECT_EQ(detail::share_elements(views[i], views[j]), !both.empty())
          << views[i].sizes() << views[i].strides() << views[i].storage_offset() << " and "
          << views[j].sizes() << views[j].strides() << views[j].storage_offset();
    }
  }
  EXPECT_GT(overlaps, 100);
}

}  // namespace
}  // namespace tessera::default_level_test
