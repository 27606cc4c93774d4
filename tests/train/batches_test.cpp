// Ranks with different numbers of batches: agreed before anything is computed, never a hang.

#include <mutex>
#include <set>
#include <thread>

#include "support.h"

namespace tessera::test {

namespace {

// `count` batches of two rows, whose length is known beforehand or not.
std::shared_ptr<BatchSource> counted(int rank, std::int64_t count, bool known) {
  const auto make = [rank](std::int64_t i) {
    return make_batch({at::full({2, 3}, 10.0 * rank + static_cast<double>(i), at::kDouble),
                       at::zeros({2, 2}, at::kDouble)});
  };
  if (!known) {
    return batches_of([=](std::uint64_t, std::uint64_t i) -> std::optional<MicroBatch> {
      if (static_cast<std::int64_t>(i) >= count) return std::nullopt;
      return make(static_cast<std::int64_t>(i));
    });
  }
  std::vector<MicroBatch> all;
  for (std::int64_t i = 0; i < count; ++i) all.push_back(make(i));
  return batches_of(std::move(all));
}

// Batches of each rank: drawn, some with none.
std::vector<std::int64_t> counts_of(Draw& draw, int ranks) {
  std::vector<std::int64_t> counts;
  for (int r = 0; r < ranks; ++r) counts.push_back(draw.below(4));
  return counts;
}

}  // namespace

TEST(AgreedBatches, EveryPolicyOnDrawnLengths) {
  Draw draw(3);
  for (int round = 0; round < 40; ++round) {
    const int ranks = draw.between(1, 4);
    const auto counts = counts_of(draw, ranks);
    std::vector<bool> known;
    const bool all_known = draw.chance(50);
    for (int r = 0; r < ranks; ++r) known.push_back(all_known || draw.chance(30));
    const std::int64_t most = *std::ranges::max_element(counts);
    const std::int64_t fewest = *std::ranges::min_element(counts);
    for (const UnevenData policy :
         {UnevenData::error, UnevenData::drop, UnevenData::pad, UnevenData::weight_zero}) {
      on_threads(ranks, [&](DistributedManager& manager) {
        const int me = manager.rank();
        ManualStrategy strategy(manager);
        AgreedBatches batches(counted(me, counts[me], known[me]), strategy, policy);
        for (int epoch = 0; epoch < 2; ++epoch) {  // the second one from where the first ended
          std::int64_t got = 0, real = 0;
          bool refused = false;
          try {
            batches.start_epoch(epoch);
            while (auto batch = batches.next()) {
              EXPECT_EQ(static_cast<std::int64_t>(batch->index), got);
              ++got;
              if (batch->real > 0) {
                EXPECT_EQ(batch->tensors[0][0][0].item<double>(), 10.0 * me + got - 1);
                ++real;
                continue;
              }
              ASSERT_EQ(batch->tensors.size(), 2u);
              EXPECT_EQ(batch->tensors[0].size(1), 3);
              if (policy == UnevenData::pad) {
                EXPECT_EQ(batch->rows, 2);
                EXPECT_FALSE(batch->mask.any().item<bool>());
              } else {
                EXPECT_EQ(batch->tensors[0].size(0), 0);
              }
            }
          } catch (const UnevenDataError&) {
            refused = true;
          }
          if (policy == UnevenData::error) {
            EXPECT_EQ(refused, most != fewest);
            if (refused) return;
          }
          EXPECT_EQ(got, policy == UnevenData::drop ? fewest : most);
          EXPECT_EQ(real, policy == UnevenData::drop ? fewest : counts[me]);
        }
      });
    }
  }
}

TEST(AgreedBatches, UnevenTrainingEqualsOneProcessAndSoDoesValidation) {
  // Rank r has 3 - r batches.
  for (const bool known : {false, true}) {
    for (const UnevenData policy : {UnevenData::pad, UnevenData::weight_zero}) {
      std::vector<at::Tensor> expected;
      double loss = 0;
      {
        Regression task;
        TrainerOptions options;
        options.max_epochs = 2;
        const auto joined =
            batches_of([=](std::uint64_t, std::uint64_t i) -> std::optional<MicroBatch> {
              if (i >= 3) return std::nullopt;
              std::vector<at::Tensor> x, y;
              for (int r = 0; r < 3; ++r) {
                if (static_cast<int>(i) >= 3 - r) continue;
                x.push_back(at::full({2, 3}, 10.0 * r + static_cast<double>(i), at::kDouble));
                y.push_back(at::zeros({2, 2}, at::kDouble));
              }
              return make_batch({at::cat(x), at::cat(y)});
            });
        loss = Trainer(options).fit(task, joined, joined).metrics.at("val/loss");
        expected = task.values();
      }
      on_threads(3, [&](DistributedManager& manager) {
        Regression task;
        TrainerOptions options;
        options.strategy = std::make_shared<DDPStrategy>(manager);
        options.max_epochs = 2;
        options.uneven = policy;
        options.uneven_validation = policy;
        const int me = manager.rank();
        const FitResult result =
            Trainer(options).fit(task, counted(me, 3 - me, known), counted(me, 3 - me, known));
        EXPECT_EQ(result.steps, 6);
        expect_near(task.values(), expected, "uneven");
        EXPECT_NEAR(result.metrics.at("val/loss"), loss, 1e-10 * loss);
        EXPECT_EQ(result.metrics.at("val/rows"), 12);
      });
    }
  }
}

TEST(AgreedBatches, ErrorsNameTheRanksThatHaveEnded) {
  on_threads(3, [](DistributedManager& manager) {
    ManualStrategy strategy(manager);
    AgreedBatches batches(counted(manager.rank(), manager.rank() == 1 ? 1 : 2, false), strategy,
                          UnevenData::error);
    batches.start_epoch(0);
    EXPECT_TRUE(batches.next());
    try {
      batches.next();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const UnevenDataError& e) {
      EXPECT_NE(std::string(e.what()).find("ranks [1] have ended"), std::string::npos) << e.what();
    }
  });
}

TEST(AgreedBatches, NamesReachARankThatHasHadNoBatch) {
  for (const UnevenData policy : {UnevenData::pad, UnevenData::weight_zero}) {
    on_threads(2, [&](DistributedManager& manager) {
      std::vector<MicroBatch> mine;
      if (manager.rank() == 1) {
        mine.push_back(make_batch({at::ones({2, 3}, at::kDouble), at::zeros({2}, at::kLong)}));
        mine.back().names = {"inputs/wind speed", "target"};
      }
      ManualStrategy strategy(manager);
      AgreedBatches batches(batches_of(mine), strategy, policy);
      batches.start_epoch(0);
      const auto batch = batches.next();
      ASSERT_TRUE(batch);
      EXPECT_EQ(batch->real, manager.rank() == 1 ? 2 : 0);
      EXPECT_EQ(batch->fields().under("inputs").at("wind speed").size(1), 3);
      EXPECT_EQ(batch->field("target").scalar_type(), at::kLong);
      EXPECT_FALSE(batches.next());
    });
  }
}

TEST(BatchSource, LoadersGoOnInTheMiddleOfAnEpoch) {
  const auto data = std::make_shared<TensorDataset>(
      std::vector<at::Tensor>{at::arange(11, at::kDouble).unsqueeze(1)});
  const auto make = [&](const DistributedManager& manager) {
    SampleOrderOptions order;
    order.samples = 11;
    order.seed = 4;
    const Mesh mesh({{"data", manager.world_size()}});
    return std::make_unique<Loader>(std::vector<std::shared_ptr<const Dataset>>{data},
                                    std::make_shared<FixedOrder>(order, BatchSchedule(4)),
                                    batch_mapping(mesh, {"data"}), manager.rank());
  };
  on_threads(2, [&](DistributedManager& manager) {
    ManualStrategy strategy(manager);
    std::vector<std::vector<at::Tensor>> seen(2);
    std::vector<std::string> states;
    const auto loader = make(manager);
    AgreedBatches batches(batches_of(*loader), strategy, UnevenData::error);
    for (int epoch = 0; epoch < 2; ++epoch) {
      batches.start_epoch(epoch);
      for (;;) {
        states.push_back(batches.source().state());
        const auto batch = batches.next();
        if (!batch) break;
        seen[epoch].push_back(batch->tensors[0].clone());
      }
    }
    ASSERT_EQ(seen[0].size(), 3u);
    ASSERT_EQ(states.size(), 8u);
    for (std::size_t at = 0; at < 4; ++at) {  // the end of the epoch among them
      const auto again = make(manager);
      AgreedBatches resumed(batches_of(*again), strategy, UnevenData::error);
      resumed.source().restore(states[at]);
      resumed.resume(0, at);
      for (std::size_t i = at; i < 3; ++i) {
        const auto batch = resumed.next();
        ASSERT_TRUE(batch);
        EXPECT_EQ(batch->index, i);
        EXPECT_TRUE(batch->tensors[0].equal(seen[0][i]));
      }
      EXPECT_FALSE(resumed.next());
      resumed.start_epoch(1);
      for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(resumed.next()->tensors[0].equal(seen[1][i]));
    }
    EXPECT_THROW(batches.source().restore("nonsense"), Error);
  });
}

TEST(PeriodicVote, AllStopAtTheSameCallWithFewVotes) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    std::mutex mutex;
    std::set<int> stopped;
    on_threads(ranks, [&](DistributedManager& manager) {
      ManualStrategy strategy(manager);
      PeriodicVote vote(strategy, std::chrono::milliseconds(20));
      int call = 0;
      for (; call < 100000; ++call) {
        // The last rank alone asks.
        if (vote.poll(manager.rank() == ranks - 1 && call >= 3000)) break;
        if (call % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      EXPECT_GE(call, 3000);
      EXPECT_LT(call, 100000);
      EXPECT_LT(vote.votes(), 1000u);
      EXPECT_TRUE(vote.poll(false));
      const std::lock_guard lock(mutex);
      stopped.insert(call);
    });
    EXPECT_EQ(stopped.size(), 1u);
  }
}

}  // namespace tessera::test
