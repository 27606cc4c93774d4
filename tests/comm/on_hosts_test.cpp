// What groups over several hosts of whose ranks some share one compute: values, messages, started
// calls, calls that differ, and the view that c10d has of them.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives_cases.h"
#include "on_hosts.h"
#include "tessera/comm/group/detail/reduction.h"

namespace tessera::on_hosts_test {
namespace {

using testing::run_on_hosts;
using torch::Tensor;

struct Place {
  const char* name;
  std::vector<int> hosts;
};

class OnHosts : public ::testing::TestWithParam<Place> {};

TEST_P(OnHosts, EqualTheReference) {
  run_on_hosts(GetParam().hosts, [](DistributedManager& manager) {
    const auto world = manager.world();
    ASSERT_EQ(world.backend(), "hosts");
    testing_cases::check_everything(world, {torch::kFloat, torch::kBFloat16, torch::kBool,
                                            torch::kComplexFloat, torch::kShort});
  });
}

TEST_P(OnHosts, EqualTheReferenceWithCollectiveChecks) {
  run_on_hosts(
      GetParam().hosts,
      [](DistributedManager& manager) {
        testing_cases::check_everything(manager.world(), {torch::kLong});
      },
      CheckLevel::collective);
}

TEST_P(OnHosts, ResultsHaveTheSameBitsOnAllRanksAndInEveryRun) {
  std::vector<Tensor> runs;
  for (int run = 0; run < 2; ++run)
    run_on_hosts(GetParam().hosts, [&](DistributedManager& manager) {
      const auto world = manager.world();
      auto random = at::detail::createCPUGenerator(77 + world.rank());
      std::vector<Tensor> results;
      for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf})
        for (const std::int64_t n : {1, 1000, 70001}) {
          auto t = torch::randn({n}, random, torch::kDouble).to(dtype);
          world.all_reduce(t);
          results.push_back(t.to(torch::kDouble));
        }
      const auto mine = torch::cat(results);
      const auto all = torch::empty({world.size(), mine.numel()}, torch::kDouble);
      world.all_gather(all, mine.unsqueeze(0));
      for (int r = 0; r < world.size(); ++r) EXPECT_TRUE(torch::equal(all[r], mine));
      if (world.rank() == 0) runs.push_back(mine);
    });
  ASSERT_EQ(runs.size(), 2U);
  EXPECT_TRUE(torch::equal(runs[0], runs[1]));
}

// Requests of all kinds at once, waited for in another order on each rank.
TEST_P(OnHosts, RequestsGoOnBesideEachOther) {
  run_on_hosts(GetParam().hosts, [](DistributedManager& manager) {
    const auto world = manager.world();
    const int n = world.size(), me = world.rank();
    std::vector<Tensor> sums, received, sent;
    std::vector<Request> requests;
    for (int i = 0; i < 4; ++i) {
      for (int peer = 0; peer < n; ++peer) {
        if (peer == me) continue;
        received.push_back(torch::zeros({100 + i}));
        sent.push_back(torch::full({100 + i}, 10.0 * me + i));
        requests.push_back(world.started().receive(received.back(), peer));
        requests.push_back(world.started().send(sent.back(), peer));
      }
      sums.push_back(torch::full({1000 * (i + 1)}, me + i, torch::kDouble));
      requests.push_back(world.started().all_reduce(sums.back()));
    }
    if (me % 2 == 0) std::ranges::reverse(requests);
    for (auto& request : requests) request.wait();
    std::size_t next = 0;
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(sums[i][0].item<double>(), n * i + n * (n - 1) / 2.0);
      for (int peer = 0; peer < n; ++peer) {
        if (peer == me) continue;
        EXPECT_EQ(received[next++][0].item<double>(), 10.0 * peer + i);
      }
    }
  });
}

TEST_P(OnHosts, TheC10dViewServesPlainLibtorch) {
  run_on_hosts(GetParam().hosts, [](DistributedManager& manager) {
    const auto world = manager.world();
    const auto group = world.process_group();
    const int n = world.size(), me = world.rank();
    std::vector<Tensor> tensors{torch::full({3, 2}, me + 1.0).t()};
    group->allreduce(tensors)->wait();
    EXPECT_EQ(tensors[0][1][2].item<double>(), n * (n + 1) / 2.0);
    std::vector<Tensor> mine{torch::full({2}, me, torch::kBool)};
    std::vector<std::vector<Tensor>> all(1);
    for (int r = 0; r < n; ++r) all[0].push_back(torch::zeros({2}, torch::kBool));
    group->allgather(all, mine)->wait();
    for (int r = 0; r < n; ++r) EXPECT_EQ(all[0][r][1].item<bool>(), r != 0);
    // Rounded once: 2048 + 1 + 1 in half, one after the other, stays 2048.
    std::vector<Tensor> halves{torch::full({4}, me == 0 ? 2048.0 : 1.0, torch::kHalf)};
    group->allreduce(halves)->wait();
    EXPECT_TRUE(
        torch::equal(halves[0], torch::full({4}, 2048.0 + n - 1, torch::kDouble).to(torch::kHalf)));
    c10d::AllreduceOptions average;
    average.reduceOp = c10d::ReduceOp::AVG;
    std::vector<Tensor> means{torch::full({5}, 1.0 * me, torch::kBFloat16)};
    group->allreduce(means, average)->wait();
    EXPECT_EQ(means[0][4].item<double>(),
              at::scalar_tensor((n - 1) / 2.0).to(torch::kBFloat16).item<double>());
    std::vector<Tensor> whole{torch::full({2 * n}, me + 1.0)}, share{torch::zeros({2})};
    c10d::ReduceScatterOptions scattered;
    scattered.reduceOp = c10d::ReduceOp::AVG;
    group->getBackend(c10::DeviceType::CPU)
        ->_reduce_scatter_base(share[0], whole[0], scattered)
        ->wait();
    EXPECT_EQ(share[0][1].item<double>(), (n + 1) / 2.0);
    std::vector<Tensor> ints{torch::ones({4}, torch::kInt)};
    EXPECT_THROW(group->allreduce(ints, average), InvalidArgument);
    std::vector<Tensor> several{torch::full({3}, me == 1, torch::kBool),
                                torch::full({2, 3}, 1.0 + me, torch::kDouble).t(),
                                torch::zeros({0}, torch::kHalf)};
    std::vector<std::vector<Tensor>> of_all(static_cast<std::size_t>(n));
    for (auto& of_rank : of_all)
      for (const auto& tensor : several) of_rank.push_back(torch::zeros_like(tensor));
    group->getBackend(c10::DeviceType::CPU)->allgather_coalesced(of_all, several)->wait();
    for (int r = 0; r < n; ++r) {
      EXPECT_EQ(of_all[r][0][2].item<bool>(), r == 1);
      EXPECT_TRUE(torch::equal(of_all[r][1], torch::full({3, 2}, 1.0 + r, torch::kDouble)));
    }
    of_all[0].pop_back();
    EXPECT_THROW(group->getBackend(c10::DeviceType::CPU)->allgather_coalesced(of_all, several),
                 InvalidArgument);
    group->getBackend(c10::DeviceType::CPU)->monitoredBarrier({}, true);
    group->barrier()->wait();
  });
}

// Rank 0 and the last one are on different hosts, so no memory shows the difference.
TEST_P(OnHosts, CallsThatDifferAreToldToAllRanks) {
  using Call = std::function<void(const Group&)>;
  const std::vector<std::pair<Call, Call>> cases{
      {[](const Group& g) { g.all_reduce(torch::ones({10})); },
       [](const Group& g) { g.all_reduce(torch::ones({10000})); }},
      {[](const Group& g) { g.barrier(); },
       [](const Group& g) { g.all_reduce(torch::ones({4}), ReduceOp::max); }},
      {[](const Group& g) {
         const Sizes two(static_cast<std::size_t>(g.size()), 2);
         g.all_to_all(torch::zeros({2 * g.size(), 5}), torch::ones({2 * g.size(), 5}), two, two);
       },
       [](const Group& g) {
         Sizes two(static_cast<std::size_t>(g.size()), 2), more(two);
         more[0] = 3;
         g.all_to_all(torch::zeros({2 * g.size(), 5}), torch::ones({2 * g.size() + 1, 5}), two,
                      more);
       }},
      {[](const Group& g) {
         Sizes sizes(static_cast<std::size_t>(g.size()), 2);
         sizes[0] = 3;
         g.all_gather(torch::ones({2 * g.size() + 1}), torch::ones({g.rank() == 0 ? 3 : 2}), sizes);
       },
       [](const Group& g) {
         Sizes sizes(static_cast<std::size_t>(g.size()), 2);
         sizes[0] = 4;
         g.all_gather(torch::ones({2 * g.size() + 2}), torch::ones({2}), sizes);
       }}};
  std::vector<std::thread> runs;
  for (std::size_t i = 0; i < cases.size(); ++i)
    runs.emplace_back([&, i] {
      std::atomic<int> told{0};
      run_on_hosts(GetParam().hosts, [&](DistributedManager& manager) {
        const auto world = manager.world();
        try {
          // Else the error of the others may meet a rank that is still making the group.
          world.barrier();
          (world.rank() == world.size() - 1 ? cases[i].second : cases[i].first)(world);
          world.all_reduce(torch::ones({2}));
          ADD_FAILURE() << "case " << i << ": no error on rank " << world.rank();
        } catch (const MismatchError& error) {
          ++told;
          EXPECT_NE(std::string(error.what()).find("called different things"), std::string::npos)
              << error.what();
        }
      });
      EXPECT_EQ(told, static_cast<int>(GetParam().hosts.size())) << "case " << i;
    });
  for (auto& run : runs) run.join();
}

// What Gloo has not, or not with NaN, through the view that c10d has of the backend.
TEST_P(OnHosts, TheC10dViewReducesWhatGlooDoesNot) {
  run_on_hosts(GetParam().hosts, [](DistributedManager& manager) {
    const auto group = manager.world().process_group();
    const int n = manager.world().size(), me = manager.world().rank();
    const auto reduced = [&](Tensor t, c10d::ReduceOp::RedOpType op) {
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      std::vector<Tensor> tensors{std::move(t)};
      group->allreduce(tensors, options)->wait();
      return tensors.front();
    };
    const double nan = std::numeric_limits<double>::quiet_NaN();
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
      const auto mine = torch::tensor({me - 1.5, -1.0 * me, me == 1 ? nan : 1.0}, dtype);
      const auto most = reduced(mine.clone(), c10d::ReduceOp::MAX),
                 least = reduced(mine.clone(), c10d::ReduceOp::MIN);
      EXPECT_EQ(most[0].item<double>(), n - 2.5);
      EXPECT_EQ(least[1].item<double>(), 1.0 - n);
      EXPECT_TRUE(std::isnan(most[2].item<double>()) && std::isnan(least[2].item<double>()));
    }
    const auto flags = torch::tensor({1, me == 0 ? 1 : 0, 0}, torch::kBool);
    EXPECT_TRUE(torch::equal(reduced(flags.clone(), c10d::ReduceOp::MAX),
                             torch::tensor({1, 1, 0}, torch::kBool)));
    EXPECT_TRUE(torch::equal(reduced(flags.clone(), c10d::ReduceOp::PRODUCT),
                             torch::tensor({1, 0, 0}, torch::kBool)));
    EXPECT_EQ(reduced(torch::full({2}, 30000, torch::kShort), c10d::ReduceOp::SUM)[1].item<int>(),
              static_cast<std::int16_t>(30000 * n));
    EXPECT_EQ(reduced(torch::full({2}, -me, torch::kShort), c10d::ReduceOp::MIN)[0].item<int>(),
              1 - n);
    EXPECT_THROW(reduced(flags.clone(), c10d::ReduceOp::SUM), InvalidArgument);
    // Complex numbers, in memory that is not in order too; and sums of what is weighted first.
    for (const auto dtype : {torch::kComplexFloat, torch::kComplexDouble}) {
      const c10::complex<double> z(me + 1.0, -0.5 * me),
          sum(n * (n + 1) / 2.0, -0.25 * n * (n - 1));
      const auto wide = torch::full({3, 2}, z, dtype);
      EXPECT_TRUE(torch::equal(reduced(wide.t().clone(), c10d::ReduceOp::SUM),
                               torch::full({2, 3}, sum, dtype)));
      EXPECT_TRUE(torch::equal(reduced(torch::full({2, 3}, z, dtype).t(), c10d::ReduceOp::SUM),
                               torch::full({3, 2}, sum, dtype)));
      EXPECT_TRUE(torch::allclose(reduced(wide.clone(), c10d::ReduceOp::AVG),
                                  torch::full({3, 2}, sum / static_cast<double>(n), dtype)));
      EXPECT_THROW(reduced(wide.clone(), c10d::ReduceOp::PRODUCT), InvalidArgument);
      EXPECT_THROW(reduced(wide.clone(), c10d::ReduceOp::MAX), InvalidArgument);
    }
    const auto weighted = [&](Tensor t, double weight) {
      c10d::AllreduceOptions options;
      options.reduceOp = detail::to_c10d(ReduceOp::Kind::premultiplied, weight);
      std::vector<Tensor> tensors{std::move(t)};
      group->allreduce(tensors, options)->wait();
      return tensors.front();
    };
    const double weights = 0.25 * n + 0.5 * n * (n - 1) / 2;
    for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kDouble, torch::kComplexFloat})
      EXPECT_TRUE(torch::equal(weighted(torch::full({5}, 2.0, dtype), 0.25 + 0.5 * me),
                               torch::full({5}, 2 * weights, dtype)))
          << dtype;
    EXPECT_THROW(weighted(torch::ones({2}, torch::kLong), 2), InvalidArgument);
    {
      c10d::ReduceScatterOptions mean;
      mean.reduceOp = c10d::ReduceOp::AVG;
      const c10::complex<double> z(1.0 * me, 2.0);
      Tensor share = torch::zeros({2}, torch::kComplexDouble),
             pairs = torch::full({2 * n}, z, torch::kComplexDouble);
      group->getBackend(c10::DeviceType::CPU)->_reduce_scatter_base(share, pairs, mean)->wait();
      const c10::complex<double> want((n - 1) / 2.0, 2.0);
      EXPECT_TRUE(torch::allclose(share, torch::full({2}, want, torch::kComplexDouble)));
      EXPECT_EQ(pairs[0].item<c10::complex<double>>(), z);
      std::vector<Tensor> on_root{torch::full({4}, z, torch::kComplexDouble)};
      c10d::ReduceOptions to_last;
      to_last.rootRank = n - 1;
      group->reduce(on_root, to_last)->wait();
      const c10::complex<double> total(n * (n - 1) / 2.0, 2.0 * n);
      EXPECT_EQ(on_root[0][3].item<c10::complex<double>>(), me == n - 1 ? total : z);
    }
    // A message from any rank would come on one of two ways.
    std::vector<Tensor> word{torch::zeros({2})};
    EXPECT_THROW(group->recvAnysource(word, 3), NotAvailable);
    std::vector<Tensor> whole{torch::full({2 * n}, me - 0.5), torch::full({n}, 1.0 * me)},
        shares{torch::zeros({2}), torch::zeros({1})};
    c10d::ReduceScatterOptions most;
    most.reduceOp = c10d::ReduceOp::MAX;
    group->getBackend(c10::DeviceType::CPU)
        ->reduce_scatter_tensor_coalesced(shares, whole, most)
        ->wait();
    EXPECT_EQ(shares[0][1].item<double>(), n - 1.5);
    EXPECT_EQ(shares[1][0].item<double>(), n - 1);
    // Rank r sends rank p a tensor of r + p elements, in memory that is not in order.
    std::vector<Tensor> sent, received;
    for (int peer = 0; peer < n; ++peer) {
      sent.push_back(torch::full({me + peer, 2}, 10.0 * me + peer).select(1, 1));
      received.push_back(torch::zeros({me + peer}));
    }
    group->alltoall(received, sent)->wait();
    for (int peer = 0; peer < n; ++peer)
      EXPECT_TRUE(torch::equal(received[peer], torch::full({me + peer}, 10.0 * peer + me)));
  });
}

INSTANTIATE_TEST_SUITE_P(Places, OnHosts,
                         ::testing::Values(Place{"TwoAndOne", {0, 0, 1}},
                                           Place{"TwoAndTwoInTurns", {0, 1, 0, 1}}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::on_hosts_test
