// gpt: a small language model of bytes, trained on the book of Genesis on data x sharded x tensor x
// pipeline ranks.
//
//   gpt --data 2 --pipeline 2 --report gpt.html
//   gpt --data 2 --tensor 2 --report gpt.html     starts its four ranks itself
//   tessera run -n 4 -- gpt --data 2 --tensor 2 --checkpoint run    stop it at any time, and go on
//   tessera run -n 3 -- gpt --tensor 3 --checkpoint run             with other ranks
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "report.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/manager.h"
#include "tessera/launch/local_run.h"
#include "tessera/train/stop.h"
#include "training.h"

namespace {

struct Settings {
  gpt::Options training;
  int data = 1, sharded = 1, tensor = 1, pipeline = 1;
  int ranks() const { return data * sharded * tensor * pipeline; }
  std::string report, backend = "auto";
};

Settings read_settings(int argc, char** argv) {
  Settings settings;
  gpt::Options& o = settings.training;
  o.text = GPT_TEXT;
  CLI::App app{"Trains a small GPT on the bytes of a text"};
  app.add_option("--data", settings.data, "Ranks that share the samples of a step")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--sharded", settings.sharded,
                 "Ranks that share samples, parameters and Adam's moments")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--tensor", settings.tensor, "Ranks that share heads, features and vocabulary")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--pipeline", settings.pipeline, "Ranks that share the layers, one after another")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--schedule", o.schedule,
                 "Of the pipeline: gpipe, 1f1b, interleaved, zb-h1, zb-v or list")
      ->capture_default_str();
  app.add_option("--micro-batches", o.micro_batches,
                 "Of the pipeline: parts of the samples that a rank of --data has of a step")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_flag("--sequence", o.sequence,
               "Shard norms and what lies between the layers along the sequence, over the ranks of "
               "--tensor");
  app.add_option("--report", settings.report, "Write a report in HTML to this file");
  app.add_option("--checkpoint", o.checkpoint, "Save here, and go on from here");
  app.add_option("--save-every", o.save_every, "Steps between checkpoints")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--text", o.text, "ASCII text, one byte a token")->capture_default_str();
  app.add_option("--prompt", o.prompt, "ASCII text that samples go on from")
      ->check([](const std::string& text) {
        const bool ascii = std::ranges::all_of(
            text, [](char c) { return static_cast<unsigned char>(c) < gpt::vocabulary; });
        return !text.empty() && ascii ? "" : "is empty or not ASCII";
      })
      ->capture_default_str();
  app.add_option("--steps", o.steps, "To be done in all")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch", o.batch, "Samples of a step, over all ranks")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--length", o.network.length, "Bytes that are looked back on")
      ->check(CLI::Range(2, 65536))
      ->capture_default_str();
  app.add_option("--width", o.network.width, "Of the network")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--heads", o.network.heads, "Of attention; they need not divide by --tensor")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--layers", o.network.layers, "Transformer blocks")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--dropout", o.network.dropout, "Of what each layer adds")
      ->check(CLI::Range(0.0, 0.9))
      ->capture_default_str();
  app.add_option("--learning-rate", o.learning_rate, "Of AdamW, at its highest")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--validate-every", o.validate_every,
                 "Steps between looks at the text held out, each with a sample of text")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--backend", settings.backend,
                 "What ranks speak over: auto (memory inside a host), gloo, shm, mpi")
      ->capture_default_str();
  app.add_option("--seed", o.seed, "Of the weights, the order of samples and dropout")
      ->capture_default_str();
  app.add_flag("--double", o.float64,
               "Train in float64: the loss curve is then the same, to round-off, on every mesh");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return settings;
}

void run(const Settings& settings) {
  tessera::ManagerOptions how;
  how.backend = settings.backend;
  auto manager = tessera::DistributedManager::initialize(how);
  if (settings.ranks() != manager.world_size())
    throw tessera::InvalidArgument(
        tessera::concat("--data ", settings.data, " --sharded ", settings.sharded, " --tensor ",
                        settings.tensor, " --pipeline ", settings.pipeline, " need ",
                        settings.ranks(), " ranks; there are ", manager.world_size()));
  std::vector<tessera::Axis> axes{
      {"data", settings.data}, {"sharded", settings.sharded}, {"tensor", settings.tensor}};
  if (settings.pipeline > 1) axes.insert(axes.begin(), {"pipe", settings.pipeline});
  const auto mesh = manager.mesh(tessera::Mesh(axes));
  // A signal that comes while the report is written does not end it.
  const tessera::StopSignals signals;
  const bool first = manager.rank() == 0;
  const gpt::Options& o = settings.training;
  const gpt::Result result = gpt::train(mesh, o, [&](std::int64_t step, double loss) {
    if (first && (step % 50 == 0 || step == 1 || step == o.steps)) {
      std::printf("step %lld: %.3f bits a byte\n", static_cast<long long>(step),
                  loss / std::log(2.0));
      std::fflush(stdout);
    }
  });
  if (!first) return;
  std::cout << result.plan;
  if (!result.samples.empty()) std::cout << '\n' << o.prompt << result.samples.back().text << '\n';
  if (settings.report.empty()) return;
  const bool genesis = o.text == GPT_TEXT;
  const std::string text = std::filesystem::path(o.text).filename().string();
  const std::size_t steps = result.losses.size();
  gpt::write_report(
      result,
      {{"ranks", tessera::concat(manager.world_size(), ", started by ", manager.launch().launcher,
                                 ", ", at::get_num_threads(), " thread(s) each")},
       {"mesh",
        tessera::concat(
            "data ", settings.data, " × sharded ", settings.sharded, " × tensor ", settings.tensor,
            " × pipeline ", settings.pipeline, o.sequence ? ", sharded along the sequence" : "",
            settings.pipeline > 1
                ? tessera::concat(", ", o.schedule, ", ", o.micro_batches, " micro-batches")
                : std::string())},
       {"backend", tessera::concat(manager.world().backend(), " on ", manager.device().str())},
       {"libtorch", TORCH_VERSION},
       {"network", tessera::concat(o.network.layers, " layers, width ", o.network.width, ", ",
                                   o.network.heads, " heads, ", result.weights, " weights, ",
                                   o.float64 ? "float64" : "float32")},
       {"training", tessera::concat(steps, " steps of ", o.batch, " × ", o.network.length,
                                    " bytes, AdamW, seed ", o.seed)},
       {"time", tessera::concat(std::lround(result.seconds), " s, samples of text included")},
       {"text", genesis ? "Genesis, King James Version, public domain" : text}},
      genesis ? "the book of Genesis" : tessera::concat("the text ", text), o.prompt,
      settings.report);
  std::cout << "report: " << settings.report << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Settings settings = read_settings(argc, argv);
    if (const auto status = tessera::start_local_ranks(settings.ranks(), argc, argv))
      return *status;
    run(settings);
  } catch (const std::exception& error) {
    std::cerr << "gpt: " << error.what() << '\n';
    return 1;
  }
}
