// tokens: a small language model of bytes, trained data-parallel on the book of Genesis.
//
//   tessera run -n 2 -- tokens --checkpoint runs/tokens    stop it at any time, and start it again
//     with another -n

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>

#include "tessera/comm/job/manager.h"
#include "tessera/train/strategies.h"
#include "training.h"

namespace {

struct Settings {
  tokens::Options training;
  std::string backend = "auto";
};

Settings read_settings(int argc, char** argv) {
  Settings settings;
  tokens::Options& options = settings.training;
  options.text = TOKENS_DATA;
  CLI::App app{"Trains a small language model on the bytes of a text"};
  app.add_option("--text", options.text, "ASCII text; it is mapped into memory, one byte a token")
      ->capture_default_str();
  app.add_option("--checkpoint", options.checkpoint,
                 "Save in this folder, and go on from what is there; SIGTERM saves and ends");
  app.add_option("--steps", options.steps, "To be done in all")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch", options.batch, "Samples of a step, over all ranks")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--row", options.row, "Bytes that a sample predicts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--save-every", options.save_every, "Steps between checkpoints")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--hidden", options.hidden, "Width of the network")
      ->check(CLI::Range(2, 4096))
      ->capture_default_str();
  app.add_option("--learning-rate", options.learning_rate, "Of Adam")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Of the weights and of the order of samples")
      ->capture_default_str();
  app.add_option("--backend", settings.backend,
                 "What ranks speak over: auto (memory inside a host), gloo, shm, mpi")
      ->capture_default_str();
  app.add_option("--workers", options.workers, "Threads that read ahead")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_flag(
      "--double", options.float64,
      "Train in float64: the loss curve is then the same, to round-off, for every number of ranks");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return settings;
}

void run(const Settings& settings) {
  const tokens::Options& options = settings.training;
  tessera::ManagerOptions how;
  how.backend = settings.backend;
  auto manager = tessera::DistributedManager::initialize(how);
  const bool first = manager.rank() == 0;
  const auto strategy = std::make_shared<tessera::DDPStrategy>(manager);
  auto model = tokens::train(strategy, options, [&](const tokens::Step& step) {
    const auto done = step.number + 1, epoch = step.epoch + 1;
    if (first && (done % 50 == 0 || done == 1 || done == static_cast<std::uint64_t>(options.steps)))
      std::printf("step %llu, epoch %llu: %.3f bits a byte\n",
                  static_cast<unsigned long long>(done), static_cast<unsigned long long>(epoch),
                  step.loss / std::log(2.0));
    std::fflush(stdout);
  });
  if (first)
    std::cout << "\nAnd God said" << tokens::continue_text(model, "And God said", 200, options.seed)
              << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(read_settings(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << "tokens: " << error.what() << '\n';
    return 1;
  }
}
