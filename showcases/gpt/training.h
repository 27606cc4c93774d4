#pragma once
// Trains the GPT on a text, on any mesh of data x sharded x tensor x pipeline ranks, through the
// trainer.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "network.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/nn/tensor_parallel.h"
#include "tessera/schedule/schedule.h"

namespace gpt {

struct Options {
  /// ASCII; the last tenth is held out.
  std::string text;
  NetworkOptions network;
  /// Samples of a step, over all ranks.
  std::int64_t batch = 16;
  /// To be done in all, those before a restart included.
  std::int64_t steps = 400;
  /// The run ends here, as if it were stopped; below 0: it does not.
  std::int64_t stop_at = -1;
  double learning_rate = 3e-3;
  /// Steps between validations, each with a sample of text.
  std::int64_t validate_every = 100;
  /// What such a sample goes on from (ASCII), and its bytes.
  std::string prompt = "And God said";
  int sample = 240;
  std::uint64_t seed = 1;
  bool float64 = false;
  /// The data between sharded layers are sharded along their sequence.
  bool sequence = false;
  /// Of a pipeline: see schedule_named(). Parts of the samples that a data rank has of a step.
  std::string schedule = "1f1b";
  int micro_batches = 4;
  /// Saves here, and goes on from here if there is something; empty: neither.
  std::string checkpoint;
  std::int64_t save_every = 100;
};

/// How those of the network's layers that are here lie on the axis "tensor".
tessera::LayerShardings layers_of(const Network& network);

/// "gpipe", "1f1b", "interleaved" (two stages a rank), "zb-h1", "zb-v" (two stages a rank), or
/// "list": made for stages of equal costs, two on each rank, there and back. Throws
/// tessera::InvalidArgument for another name, with these.
tessera::PipelineSchedule schedule_named(const std::string& name, int ranks, int micro_batches);

/// Of one rank, in bytes.
struct Memory {
  std::int64_t parameters = 0;
  /// Adam's two moments.
  std::int64_t moments = 0;
  /// The most that tensors of the training took at once.
  std::int64_t tensors = 0;
  std::int64_t process = 0;
};

struct Sample {
  std::int64_t step;
  /// Nats a byte, of what was held out.
  double loss;
  std::string text;
};

struct Result {
  Network network = nullptr;
  /// Of the complete network.
  std::int64_t weights = 0;
  /// Step, counted from 1, and its loss: mean over all ranks' samples, nats a byte.
  std::vector<std::pair<std::int64_t, double>> losses;
  std::vector<Sample> samples;
  /// By rank; complete on every rank.
  std::vector<Memory> memory;
  /// What the layers became, of a pipeline those of this rank's stages; empty without a mesh.
  std::string plan;
  /// Of a pipeline: when each action of the last step ran, drawn, and the share of its time that
  /// ranks waited, on every rank.
  std::string timeline;
  double waited = 0;
  double seconds = 0;
};

/// Collective over the mesh, which has the axes "data", "sharded" (samples and parameters) and
/// "tensor", may have "pipe" (stages) before them, and covers the world; without one this process
/// trains alone. `watch` is called after each step with its number and loss. SIGTERM ends the run
/// after the step, or while a sample is written, and what there is by then is the result. Throws
/// tessera::InvalidArgument for a text that is not ASCII or too short, an unknown schedule, and
/// more stages than layers.
Result train(const std::optional<tessera::DeviceMesh>& mesh, const Options& options,
             const std::function<void(std::int64_t step, double loss)>& watch = {});

}  // namespace gpt
