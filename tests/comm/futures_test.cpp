// Callbacks of futures that make another call and wait for its future, while the other ranks are
// late: through c10d's view of a group, in memory and over several hosts.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "on_hosts.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/detail/manager_state.h"

namespace tessera::futures_test {
namespace {

using namespace std::chrono_literals;
using testing::fork_ranks;
using torch::Tensor;

class Futures : public ::testing::TestWithParam<std::vector<int>> {};

c10::intrusive_ptr<c10d::Work> started(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                       const Tensor& tensor) {
  std::vector<Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.asyncOp = true;
  return group->allreduce(tensors, options);
}

/// The sum of the ranks' tensors, of which a callback makes the next sum, and waits for it, `depth`
/// times. `begun` tells the last rank that this one is in the call; the last rank waits there.
double sum_of_sums(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Tensor& tensor,
                   int depth, const std::function<void(int)>& begun) {
  const bool late = group->getRank() == group->getSize() - 1;
  if (late) begun(depth);
  const auto last =
      started(group, tensor)
          ->getFuture()
          ->then(
              [&, depth](c10::ivalue::Future& done) {
                const auto sum = done.value().toTensorVector()[0].clone();
                return c10::IValue(depth == 0 ? sum[0].item<double>()
                                              : sum_of_sums(group, sum, depth - 1, begun));
              },
              c10::FloatType::get());
  if (!late) begun(depth);
  last->waitAndThrow();
  return last->value().toDouble();
}

TEST_P(Futures, ACallbackWaitsForTheFutureOfAnotherCall) {
  const auto& hosts = GetParam();
  const int ranks = static_cast<int>(hosts.size());
  const auto ends = fork_ranks(
      ranks,
      [&](const Launch& launch) -> std::string {
        at::set_num_threads(1);
        ManagerOptions options;
        options.timeout = 60s;
        const auto manager =
            testing::manager_on_host(launch, hosts[static_cast<std::size_t>(launch.rank)], options);
        const auto store = manager.state()->base().store;
        const auto group = manager.world().process_group();
        const auto begun = [&](int depth) {
          if (launch.rank < ranks - 1)
            store->set(concat("rank ", launch.rank, " at ", depth), std::vector<std::uint8_t>{1});
          else
            for (int r = 0; r < ranks - 1; ++r)
              store->wait({concat("rank ", r, " at ", depth)}, 50s);
        };
        const double sum = sum_of_sums(group, torch::ones({1000}), 3, begun);
        return concat(manager.world().backend(), " ", sum);
      },
      40s);
  const double sum = std::pow(ranks, 4);
  const char* backend = hosts.back() == 0 ? "shm" : "hosts";
  for (const auto& end : ends) EXPECT_EQ(end.report, concat(backend, " ", sum)) << end.ended;
}

INSTANTIATE_TEST_SUITE_P(Hosts, Futures,
                         ::testing::Values(std::vector<int>{0, 0}, std::vector<int>{0, 0, 0},
                                           std::vector<int>{0, 0, 1},
                                           std::vector<int>{0, 1, 1, 1}));

}  // namespace
}  // namespace tessera::futures_test
