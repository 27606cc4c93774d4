// Collectives of ranks that are threads, over both backends that allow it: values, special values,
// requests, sizes, subgroups, the c10d view.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

#include "collectives_cases.h"
#include "tessera/comm/job/threads.h"

namespace tessera::collectives_test {
namespace {

using testing_cases::Case;
using testing_cases::Checker;
using torch::Tensor;

ManagerOptions options_for(const std::string& backend, CheckLevel level = CheckLevel::local) {
  ManagerOptions options;
  options.backend = backend;
  options.timeout = std::chrono::seconds(60);
  options.check_level = level;
  return options;
}

class Collectives : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  void run(const std::function<void(DistributedManager&)>& body,
           CheckLevel level = CheckLevel::local) {
    const auto [backend, ranks] = GetParam();
    run_threads(ranks, body, options_for(backend, level));
  }
};

TEST_P(Collectives, EqualTheReferenceForEveryTypeSizeAndLayout) {
  run([](DistributedManager& manager) {
    testing_cases::check_everything(manager.world(), testing_cases::all_dtypes());
  });
}

TEST_P(Collectives, EqualTheReferenceWithCollectiveChecks) {
  run(
      [](DistributedManager& manager) {
        testing_cases::check_everything(manager.world(), {torch::kFloat, torch::kBool});
      },
      CheckLevel::collective);
}

TEST_P(Collectives, MoveEveryByteOfTypesWithoutArithmetic) {
  run([](DistributedManager& manager) {
    const auto world = manager.world();
    for (const auto dtype :
         {torch::kUInt16, torch::kUInt32, torch::kUInt64, torch::kFloat8_e4m3fn}) {
      const auto bytes = torch::arange(8 * world.size(), torch::kLong).to(torch::kByte);
      auto all = torch::zeros({8 * world.size()}, torch::kByte).view(dtype);
      world.all_gather(all, bytes.narrow(0, 8 * world.rank(), 8).clone().view(dtype));
      EXPECT_TRUE(torch::equal(all.view(torch::kByte), bytes));
      auto t = torch::zeros({2}, torch::kByte).view(torch::kUInt16);
      EXPECT_THROW(world.all_reduce(t), InvalidArgument);
    }
  });
}

TEST_P(Collectives, MinAndMaxPropagateNaNFromAnyRank) {
  run([](DistributedManager& manager) {
    const auto world = manager.world();
    const int n = world.size(), me = world.rank();
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16})
      for (const auto op : {ReduceOp::min, ReduceOp::max, ReduceOp::sum})
        for (int from = 0; from < n; ++from) {
          auto t = torch::full({5}, me - 1.0, dtype);
          t[0] = me == from ? std::numeric_limits<double>::quiet_NaN() : 1.0;
          t[1] = me == from ? std::numeric_limits<double>::infinity() : -1.0;
          t[2] = me == from ? -std::numeric_limits<double>::infinity() : -1.0;
          t[3] = me == from ? -0.0 : 0.0;
          world.all_reduce(t, op);
          EXPECT_TRUE(std::isnan(t[0].item<double>()))
              << c10::toString(dtype) << to_string(op.kind) << " NaN from " << from << " of " << n;
          const double inf = std::numeric_limits<double>::infinity();
          if (op == ReduceOp::max) {
            EXPECT_EQ(t[1].item<double>(), inf);
            EXPECT_EQ(t[2].item<double>(), n == 1 ? -inf : -1.0);
            EXPECT_EQ(t[4].item<double>(), n - 2.0);
          } else if (op == ReduceOp::min) {
            EXPECT_EQ(t[1].item<double>(), n == 1 ? inf : -1.0);
            EXPECT_EQ(t[2].item<double>(), -inf);
            EXPECT_EQ(t[4].item<double>(), -1.0);
          }
          auto s = torch::full({n}, 1.0, dtype), mine = torch::zeros({1}, dtype);
          if (me == from) s.fill_(std::numeric_limits<double>::quiet_NaN());
          world.reduce_scatter(mine, s, op);
          EXPECT_TRUE(std::isnan(mine.item<double>()));
        }
  });
}

TEST_P(Collectives, HalfPrecisionIsRoundedOnce) {
  run([](DistributedManager& manager) {
    const auto world = manager.world();
    const int n = world.size();
    // 2048 + 1 + 1 + 1 in half, added one after the other, stays 2048; rounded once it is 2052 for
    // n = 4 (ties to even of 2051).
    auto t = torch::full({3}, world.rank() == 0 ? 2048.0 : 1.0, torch::kHalf);
    world.all_reduce(t);
    EXPECT_TRUE(torch::equal(t, torch::full({3}, 2048.0 + n - 1, torch::kDouble).to(torch::kHalf)));
    // A sum that overflows half, whose mean does not.
    auto u = torch::full({3}, 60000.0, torch::kHalf);
    world.all_reduce(u, ReduceOp::avg);
    EXPECT_TRUE(torch::equal(u, torch::full({3}, 60000.0, torch::kHalf)));
  });
}

TEST_P(Collectives, WhatMakesNoSenseIsRefused) {
  run([](DistributedManager& manager) {
    const auto world = manager.world();
    auto refused = [&](c10::ScalarType dtype, ReduceOp op) {
      EXPECT_THROW(world.all_reduce(torch::ones({2}, dtype), op), InvalidArgument);
    };
    refused(torch::kComplexFloat, ReduceOp::max);
    refused(torch::kComplexDouble, ReduceOp::min);
    refused(torch::kLong, ReduceOp::avg);
    refused(torch::kInt, ReduceOp::premultiplied(0.5));
    refused(torch::kBool, ReduceOp::sum);
    auto t = torch::ones({2});
    EXPECT_THROW(world.broadcast(t, world.size()), InvalidArgument);
    EXPECT_THROW(world.broadcast(t, -1), InvalidArgument);
    EXPECT_THROW(world.broadcast(Tensor(), 0), InvalidArgument);
    EXPECT_THROW(world.all_reduce(torch::ones({1}).expand({4})), InvalidArgument);
    EXPECT_THROW(world.all_gather(torch::ones({world.size() + 1}), torch::ones({1})),
                 InvalidArgument);
    EXPECT_THROW(world.all_gather(torch::ones({world.size()}, torch::kDouble), torch::ones({1})),
                 InvalidArgument);
    EXPECT_THROW(world.all_gather(torch::ones({3}), torch::ones({1}), Sizes(world.size() + 1, 1)),
                 InvalidArgument);
    if (world.size() == 4) {
      // 2^64 + 4 rows are not four.
      Sizes wrapped(4, std::int64_t{1} << 62);
      for (auto& n : wrapped) n += 1;
      const auto four = torch::ones({4});
      EXPECT_THROW(world.all_to_all(torch::zeros({4}), four, wrapped, wrapped), InvalidArgument);
      wrapped[world.rank()] = 1;
      EXPECT_THROW(world.gather(torch::zeros({4}), torch::ones({1}), 0, wrapped), InvalidArgument);
    }
    EXPECT_THROW(world.send(t, world.size()), InvalidArgument);
    EXPECT_THROW(world.all_reduce(torch::eye(2).to_sparse()), InvalidArgument);
    world.all_reduce(t);  // and the group is as sound as before
    EXPECT_EQ(t[0].item<double>(), world.size());
  });
}

TEST_P(Collectives, ManyRequestsAtOnceWaitedForInAnyOrder) {
  run([](DistributedManager& manager) {
    const auto world = manager.world();
    std::vector<Tensor> tensors;
    std::vector<Request> requests;
    for (int i = 0; i < 20; ++i) {
      tensors.push_back(torch::full({i + 1}, world.rank() + i, torch::kDouble));
      requests.push_back(
          world.started().all_reduce(tensors.back(), i % 2 ? ReduceOp::max : ReduceOp::sum));
    }
    const int n = world.size();
    for (int i = 19; i >= 0; --i) {
      if ((i + world.rank()) % 3) requests[i].wait();
    }
    for (int i = 0; i < 20; ++i) {
      requests[i].wait();
      EXPECT_EQ(tensors[i][0].item<double>(), i % 2 ? n - 1 + i : n * i + n * (n - 1) / 2.0);
    }
  });
}

TEST_P(Collectives, ARequestThatIsPolledBecomesDone) {
  run([](DistributedManager& manager) {
    const auto world = manager.world();
    if (world.size() == 1) return;
    auto t = torch::full({2}, world.rank() * 1.0), u = torch::zeros({2});
    const int next = (world.rank() + 1) % world.size(),
              before = (world.rank() + world.size() - 1) % world.size();
    auto sent = world.started().send(t, next), received = world.started().receive(u, before);
    while (!sent.done() || !received.done()) std::this_thread::yield();
    sent.wait();
    received.wait();
    EXPECT_EQ(u[0].item<double>(), before);
  });
}

TEST_P(Collectives, ARequestThatIsDoneHoldsNoTensor) {
  run([](DistributedManager& manager) {
    const auto world = manager.world();
    // What lies with gaps is copied back at the end.
    Tensor t = torch::full({2, 6}, 1.0).slice(1, 0, 6, 2);
    Request request = world.started().all_reduce(t);
    request.wait();
    EXPECT_EQ(t[1][2].item<double>(), world.size());
    EXPECT_EQ(t.use_count(), 1);
  });
}

TEST_P(Collectives, BytesOfAnyLength) {
  run([](DistributedManager& manager) {
    const auto world = manager.world();
    const int n = world.size(), me = world.rank();
    auto word = [](int r) {
      return std::string(static_cast<std::size_t>(r * r), static_cast<char>('a' + r)) +
             std::string(r % 2, '\0');
    };
    std::vector<std::string> words;
    for (int r = 0; r < n; ++r) words.push_back(word(r));
    EXPECT_EQ(world.all_gather_bytes(word(me)), words);
    for (int root = 0; root < n; ++root) {
      EXPECT_EQ(world.broadcast_bytes(me == root ? word(root) : "?", root), word(root));
      EXPECT_EQ(world.gather_bytes(word(me), root),
                me == root ? words : std::vector<std::string>{});
      EXPECT_EQ(world.scatter_bytes(me == root ? words : std::vector<std::string>{}, root),
                word(me));
      // Refused on the root, and told to all: the group goes on.
      const auto why = [&] {
        try {
          world.scatter_bytes({"one", "too", "many", "for", "four"}, root);
        } catch (const InvalidArgument& e) {
          return std::string(e.what());
        }
        return std::string("nothing was thrown");
      }();
      EXPECT_NE(why.find("5 texts"), std::string::npos) << why;
    }
  });
}

TEST_P(Collectives, SubgroupsInAnyOrderOfRanks) {
  run([](DistributedManager& manager) {
    const int n = manager.world_size(), me = manager.rank();
    std::vector<int> reversed(n);
    for (int r = 0; r < n; ++r) reversed[r] = n - 1 - r;
    const auto group = manager.group(reversed);
    EXPECT_EQ(group.rank(), n - 1 - me);
    auto all = torch::zeros({n}, torch::kLong);
    group.all_gather(all, torch::tensor({std::int64_t{me}}));
    for (int i = 0; i < n; ++i) EXPECT_EQ(all[i].item<int>(), n - 1 - i);
    std::vector<int> alike;
    for (int r = me % 2; r < n; r += 2) alike.push_back(r);
    const auto half = manager.group(alike);
    auto t = torch::full({1}, me, torch::kLong);
    half.all_reduce(t);
    EXPECT_EQ(t.item<int>(), std::accumulate(alike.begin(), alike.end(), 0));
  });
}

TEST_P(Collectives, TheC10dViewServesPlainLibtorch) {
  run([](DistributedManager& manager) {
    const auto world = manager.world();
    if (world.size() == 1) return;
    const auto group = world.process_group();
    EXPECT_EQ(group->getRank(), world.rank());
    std::vector<Tensor> tensors{torch::full({3}, world.rank() + 1.0)};
    group->allreduce(tensors)->wait();
    EXPECT_EQ(tensors[0][0].item<double>(), world.size() * (world.size() + 1) / 2.0);
    group->barrier()->wait();
  });
}

TEST_P(Collectives, AWorkOfTheC10dViewIsNoSuccessBeforeAllRanksAreInIt) {
  if (std::get<0>(GetParam()) == "gloo") GTEST_SKIP() << "its works are c10d's own";
  std::atomic<bool> seen{false};
  run([&](DistributedManager& manager) {
    const auto world = manager.world();
    if (world.size() == 1) return;
    const auto backend = world.process_group()->getBackend(c10::DeviceType::CPU);
    while (world.rank() > 0 && !seen) std::this_thread::yield();
    std::vector<Tensor> tensors{torch::ones({3})};
    c10d::AllreduceOptions options;
    options.asyncOp = true;
    const auto work = backend->allreduce(tensors, options);
    if (world.rank() == 0) {
      EXPECT_FALSE(work->isSuccess());
      seen = true;
    }
    EXPECT_EQ(work->result().at(0)[2].item<double>(), world.size()) << "waits";
    EXPECT_TRUE(work->isSuccess());
  });
}

// Whoever waits for a work of c10d's looks at nothing meanwhile.
TEST_P(Collectives, AWorkOfTheC10dViewEndsWithItsGroup) {
  if (std::get<0>(GetParam()) == "gloo") GTEST_SKIP() << "its works are c10d's own";
  using Clock = std::chrono::steady_clock;
  std::atomic<bool> waits{false}, over{false};
  run([&](DistributedManager& manager) {
    const auto world = manager.world();
    if (world.size() == 1) return;
    const auto begin = Clock::now();
    if (world.rank() == 0) {
      std::vector<Tensor> tensors{torch::ones({3})};
      c10d::AllreduceOptions options;
      options.asyncOp = true;
      const auto backend = world.process_group()->getBackend(c10::DeviceType::CPU);
      const auto work = backend->allreduce(tensors, options);
      waits = true;
      EXPECT_ANY_THROW(work->wait());
      EXPECT_LT(Clock::now() - begin, std::chrono::seconds(5));
      over = true;
    }
    while (!waits) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (world.rank() == 1) world.abort("the disk is full");
    // A rank that leaves would end it too.
    while (!over && Clock::now() - begin < std::chrono::seconds(10)) std::this_thread::yield();
  });
}

TEST_P(Collectives, TheC10dViewTakesListsAndSeveralTensors) {
  if (std::get<0>(GetParam()) == "gloo") GTEST_SKIP() << "these calls are c10d's own";
  run([](DistributedManager& manager) {
    const auto world = manager.world();
    const int n = world.size(), me = world.rank();
    if (n == 1) return;
    const auto backend = world.process_group()->getBackend(c10::DeviceType::CPU);
    using Tensors = std::vector<Tensor>;
    const double sum = n * (n - 1) / 2.0;
    Tensors several{torch::full({3}, 1.0 * me), torch::full({2}, 2 * me, torch::kLong)};
    const auto work = backend->allreduce_coalesced(several);
    const auto future = work->getFuture();
    work->wait();
    future->waitAndThrow();
    EXPECT_EQ(future->value().toTensorVector().size(), 2U);
    EXPECT_EQ(several[0][2].item<double>(), sum);
    EXPECT_EQ(several[1][1].item<double>(), 2 * sum);
    // Rank r gives r and -r, of two and of one element.
    Tensors parts{torch::full({2}, 1.0 * me), torch::full({1}, -1.0 * me)};
    Tensors wholes{torch::zeros({2 * n}), torch::zeros({n})};
    backend->allgather_into_tensor_coalesced(wholes, parts)->wait();
    for (int r = 0; r < n; ++r) {
      EXPECT_EQ(wholes[0][2 * r + 1].item<double>(), r);
      EXPECT_EQ(wholes[1][r].item<double>(), -r);
    }
    backend->reduce_scatter_tensor_coalesced(parts, wholes)->wait();
    EXPECT_EQ(parts[0][1].item<double>(), n * me);
    EXPECT_EQ(parts[1][0].item<double>(), -n * me);
    Tensors to, from, mine{torch::full({2}, 1.0 * me)};
    std::vector<Tensors> list(1);
    for (int r = 0; r < n; ++r) {
      to.push_back(torch::zeros({r + me + 1}));
      from.push_back(torch::full({r + me + 1}, 10.0 * me + r));
      list[0].push_back(torch::zeros({2}));
    }
    backend->alltoall(to, from)->wait();
    for (int r = 0; r < n; ++r) EXPECT_EQ(to[r][me + r].item<double>(), 10.0 * r + me);
    backend->allgather(list, mine)->wait();
    for (int r = 0; r < n; ++r) EXPECT_EQ(list[0][r][1].item<double>(), r);
    // A list that does not fit is refused on the rank that gave it, before anything moves.
    to.pop_back();
    EXPECT_THROW(backend->alltoall(to, from), InvalidArgument);
    backend->barrier()->wait();
  });
}

TEST_P(Collectives, ConjugatedAndNegatedViewsAreResolved) {
  run([](DistributedManager& manager) {
    const auto world = manager.world();
    const c10::complex<double> z(1.0, 2.0 + world.rank());
    const auto conjugated = torch::full({2}, z, torch::kComplexDouble).conj();
    auto all = torch::zeros({2 * world.size()}, torch::kComplexDouble);
    world.all_gather(all, conjugated);
    for (int r = 0; r < world.size(); ++r)
      EXPECT_EQ(torch::imag(all)[2 * r].item<double>(), -2.0 - r);
    auto target = torch::zeros({2}, torch::kComplexDouble);
    auto view = target.conj();
    view.fill_(z);
    world.broadcast(view, 0);
    EXPECT_EQ(torch::imag(view.resolve_conj())[0].item<double>(), 2.0);
    EXPECT_EQ(torch::imag(target)[0].item<double>(), -2.0);
  });
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<std::string, int>>& info) {
  return std::get<0>(info.param) + std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Backends, Collectives,
                         ::testing::Combine(::testing::Values("threads", "gloo", "shm"),
                                            ::testing::Values(1, 2, 3, 4)),
                         name_of);

}  // namespace
}  // namespace tessera::collectives_test
