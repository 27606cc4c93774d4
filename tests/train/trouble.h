#pragma once
// What the tests of runs that go wrong share: exceptions at a station of one rank, and what each
// rank's call came to.

#include <chrono>

#include "cases.h"

namespace tessera::test {

using SteadyClock = std::chrono::steady_clock;

// Throws, on one rank, at a step and a station.
class Grenade : public Callback {
 public:
  Grenade(std::string where, std::int64_t step, bool armed)
      : where_(std::move(where)), step_(step), armed_(armed) {}
  std::string name() const override { return "grenade"; }
  void on_batch_start(Trainer& t, const MicroBatch&) override { pass("forward", t); }
  void on_after_backward(Trainer& t) override { pass("backward", t); }
  void on_before_step(Trainer& t, const StepResult&) override { pass("before", t); }
  void on_validation_start(Trainer& t) override { pass("validation", t); }
  void on_epoch_end(Trainer& t) override { pass("epoch", t); }
  void on_step_end(Trainer& t, const StepResult&) override { pass("after", t); }
  void save(Trainer& t, CheckpointState&, const std::string&) override { pass("save", t); }
  void loaded(Trainer& t, const CheckpointState&, const std::string&) override { pass("load", t); }

 private:
  void pass(const std::string& here, Trainer& trainer) {
    if (armed_ && here == where_ && trainer.step() == step_) throw Error("a grenade in " + here);
  }
  std::string where_;
  std::int64_t step_;
  bool armed_;
};

inline TrainerOptions saving(std::shared_ptr<Strategy> strategy, const std::string& folder) {
  TrainerOptions options;
  options.strategy = std::move(strategy);
  options.session.signals = false;
  options.max_epochs = 2;
  options.accumulate = 2;
  options.checkpoint.folder = folder;
  options.checkpoint.resume = true;
  return options;
}

// What each rank's call came to: "" or the message; how long the slowest one took.
struct Outcomes {
  std::vector<std::string> said;
  double seconds = 0;
};

inline Outcomes outcomes_on(int ranks, const std::function<void(DistributedManager&)>& body) {
  Outcomes all{std::vector<std::string>(static_cast<std::size_t>(ranks)), 0};
  const auto began = SteadyClock::now();
  try {
    run_threads(ranks,
                [&](DistributedManager& manager) {
                  at::set_num_threads(1);
                  try {
                    body(manager);
                  } catch (const std::exception& e) {
                    all.said[static_cast<std::size_t>(manager.rank())] = e.what();
                    throw;
                  } catch (...) {
                    all.said[static_cast<std::size_t>(manager.rank())] = "no std::exception";
                    throw;
                  }
                },
                {.timeout = std::chrono::seconds(60)});
  } catch (...) {  // each rank's own is kept
  }
  all.seconds = std::chrono::duration<double>(SteadyClock::now() - began).count();
  return all;
}

inline void expect_all_told(const Outcomes& all, const std::string& what) {
  for (std::size_t r = 0; r < all.said.size(); ++r)
    EXPECT_NE(all.said[r].find(what), std::string::npos) << "rank " << r << ": " << all.said[r];
  EXPECT_LT(all.seconds, 40) << what << ": the limit of the groups is 60 s";
}

inline std::vector<at::Tensor> run_with(DistributedManager& manager, TrainerOptions options,
                                        const std::string& where, std::int64_t step) {
  Regression task(remembering_net());
  const auto ema = std::make_shared<Ema>(0.8);
  options.callbacks.push_back(ema);
  options.callbacks.push_back(
      std::make_shared<Grenade>(where, step, manager.rank() == manager.world_size() - 1));
  Trainer(options).fit(task, ragged_batches(manager.rank(), 5),
                       ragged_batches(manager.rank() + 7, 2));
  auto all = task.values();
  for (const auto& [name, t] : ema->average()) all.push_back(t.clone());
  return all;
}

}  // namespace tessera::test
