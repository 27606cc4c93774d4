// What scripts/test_slurm lets Slurm stop and queue again: a training that saves on SIGUSR1, asks
// for its job to be queued again, and goes on from there.
//
//   slurm_job FOLDER          trains 12 steps, or what is left of them
//   slurm_job FOLDER STEP     where nothing was saved yet, waits after that step for a signal
//   slurm_job FOLDER STEP R   rank R kills itself after that step
//
// Each rank says "rank R: from step A to B, stopped by WHAT, values HASH" at its end, and the first
// one "waiting after step N".

#include <signal.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "support.h"
#include "tessera/base/hash.h"
#include "tessera/train/stop.h"

namespace tessera::test {
namespace {

class Wait : public Callback {
 public:
  Wait(std::int64_t step, int victim) : step_(step), victim_(victim) {}
  std::string name() const override { return "wait"; }
  void on_fit_start(Trainer& t) override { begun_ = t.step(); }
  void on_step_end(Trainer& t, const StepResult&) override {
    if (begun_ > 0 || t.step() != step_) return;
    if (t.strategy().rank() == victim_) ::raise(SIGKILL);
    if (victim_ >= 0) return;
    if (t.first_rank()) {
      std::printf("waiting after step %ld\n", static_cast<long>(step_));
      std::fflush(stdout);
    }
    const StopSignals signals;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(150);
    while (signals.received() == Stop::none && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::int64_t begun() const { return begun_; }

 private:
  std::int64_t step_, begun_ = 0;
  int victim_;
};

int run(const char* folder, std::int64_t step, int victim) {
  at::set_num_threads(1);
  const auto manager = DistributedManager::initialize();
  Regression task;
  TrainerOptions options;
  options.strategy = std::make_shared<DDPStrategy>(manager);
  options.max_epochs = 3;
  options.accumulate = 2;
  options.checkpoint.folder = folder;
  options.checkpoint.resume = true;
  options.requeue = true;
  const auto wait = std::make_shared<Wait>(step, victim);
  options.callbacks = {
      std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{.keep_last = 2}), wait};
  const FitResult result = Trainer(options).fit(task, ragged_batches(manager.rank(), 8));
  Hash hash;
  for (const at::Tensor& t : task.net->parameters())
    hash.bytes(t.contiguous().data_ptr(), t.nbytes());
  std::printf("rank %d: from step %ld to %ld, stopped by %s, values %llx\n", manager.rank(),
              static_cast<long>(wait->begun()), static_cast<long>(result.steps),
              to_string(result.stop).c_str(), static_cast<unsigned long long>(hash.value()));
  return 0;
}

}  // namespace
}  // namespace tessera::test

int main(int argc, char** argv) {
  if (argc < 2 || argc > 4) {
    std::fprintf(stderr, "usage: %s FOLDER [STEP [RANK]]\n", argv[0]);
    return 2;
  }
  return tessera::test::run(argv[1], argc > 2 ? std::atol(argv[2]) : 0,
                            argc > 3 ? std::atoi(argv[3]) : -1);
}
