// A transport that the library does not know passes the tests of all collectives.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "collectives_cases.h"
#include "tessera/comm/group/detail/group_state.h"
#include "toy_transport.h"

namespace tessera::toy_transport_test {
namespace {

TEST(Toy, PassesTheTestsOfAllCollectives) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank)
      threads.emplace_back([&, rank] {
        detail::GroupSpec spec;
        spec.name = "toy";
        spec.ranks.resize(static_cast<std::size_t>(ranks));
        std::iota(spec.ranks.begin(), spec.ranks.end(), 0);
        spec.rank = rank;
        spec.timeout = std::chrono::minutes(1);
        spec.watch = std::make_shared<detail::GroupWatch>(spec.name, spec.ranks, rank, nullptr);
        const auto state = std::make_shared<detail::GroupState>(spec);
        if (ranks > 1)
          state->set_endpoint(c10::DeviceType::CPU,
                              std::make_shared<test::ToyTransport>(store, rank, ranks));
        const Group group(state);
        try {
          testing_cases::check_everything(group, testing_cases::all_dtypes());
          if (ranks == 1) return;
          // And as c10d sees it.
          const auto backend = state->endpoint(c10::DeviceType::CPU).transport->backend();
          std::vector<at::Tensor> mean{torch::full({3}, rank + 1.0, torch::kHalf)};
          c10d::AllreduceOptions average;
          average.reduceOp = c10d::ReduceOp::AVG;
          backend->allreduce(mean, average)->wait();
          EXPECT_EQ(mean[0][2].item<double>(), (ranks + 1) / 2.0);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    for (auto& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace tessera::toy_transport_test
