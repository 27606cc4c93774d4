// A run that is interrupted in any step, in the middle of an accumulation and while a save is in
// progress in the background, goes on with other numbers of ranks and other strategies: the same
// samples in the same order, values to round-off.

#include "elsewhere.h"
#include "trouble.h"

namespace tessera::test {

TEST(ResumedElsewhere, InterruptedInEveryStepOverRanksAndStrategies) {
  const std::vector<Place> places{{Layout::ddp, 3},     {Layout::sharded, 2}, {Layout::tensor, 4},
                                  {Layout::domain, 3},  {Layout::ddp, 1},     {Layout::domain, 2},
                                  {Layout::sharded, 4}, {Layout::tensor, 2}};
  ReadLog log;
  const FieldRun expected = fields_alone(log);
  ASSERT_EQ(expected.result.steps, kFieldSteps);
  const Reads order = log.merged(1);
  ASSERT_EQ(order.size(), static_cast<std::size_t>(micro_of_step(kFieldSteps)));

  // `step`: in which it is interrupted, after the backward pass of its first micro-batch; -1:
  // never.
  const auto run = [&](const Place& place, const std::string& folder, std::int64_t step) {
    const std::string what = concat(to_string(place), ", interrupted in step ", step);
    ReadLog reads;
    std::int64_t from = 0;
    std::mutex mutex;
    const Outcomes told = outcomes_on(place.ranks, [&](DistributedManager& manager) {
      struct Begin : Callback {
        std::string name() const override { return "begin"; }
        void on_fit_start(Trainer& trainer) override { note(trainer.step()); }
        std::function<void(std::int64_t)> note;
      };
      const auto begin = std::make_shared<Begin>();
      begin->note = [&](std::int64_t at) {
        const std::lock_guard lock(mutex);
        from = at;
      };
      const FieldRun got = train_fields(
          strategy_of(manager, place.layout), readers_of(place), manager.rank(), folder, reads,
          {begin, std::make_shared<Grenade>("backward", step,
                                            manager.rank() == manager.world_size() - 1)});
      EXPECT_EQ(got.result.steps, kFieldSteps) << what;
      expect_near(got.values, expected.values, what);
    });
    for (const std::string& said : told.said) {
      if (step < 0)
        EXPECT_EQ(said, "") << what;
      else
        EXPECT_NE(said.find("a grenade in backward"), std::string::npos) << what << ": " << said;
    }
    // From where it went on, every micro-batch had the samples that it has in the undisturbed run.
    const Reads got = reads.merged(place.ranks);
    const auto first = static_cast<std::size_t>(micro_of_step(from));
    if (step < 0) {
      EXPECT_EQ(first + got.size(), order.size()) << what;
    } else {
      EXPECT_GE(first + got.size(), static_cast<std::size_t>(micro_of_step(step))) << what;
    }
    EXPECT_LE(first + got.size(), order.size()) << what;
    for (std::size_t i = 0; i < got.size() && first + i < order.size(); ++i)
      EXPECT_EQ(got[i], order[first + i]) << what << ", micro-batch " << first + i;
    return from;
  };

  for (std::int64_t first = 0; first < kFieldSteps; ++first) {
    const Folder folder;
    auto next = static_cast<std::size_t>(first) * 3;
    for (std::int64_t step = first; step < kFieldSteps; step += 2) {
      const std::int64_t from = run(places[next++ % places.size()], folder.path(), step);
      // What is lost is at most the save that was in progress.
      if (step > first) {
        EXPECT_GE(from, step - 3) << "before step " << step;
      }
    }
    const std::int64_t from = run(places[next % places.size()], folder.path(), -1);
    const std::int64_t last = first + (kFieldSteps - 1 - first) / 2 * 2;
    EXPECT_GE(from, last - 1);
  }
}

}  // namespace tessera::test
