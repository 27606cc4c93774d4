#pragma once
// The training: the library's trainer on a mesh. What it works on is sharded, over samples and over
// latitudes.

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "network.h"
#include "winds_data.h"

namespace winds {

struct TrainingOptions {
  std::uint64_t seed = 1;
  std::int64_t epochs = 10;
  double learning_rate = 2e-3;
  double weight_decay = 1e-2;
  /// The folder to save in after every epoch, and to go on from; empty: neither.
  std::string checkpoint = {};
  NetworkOptions network;
};

/// The mean squared error in (m/s)^2 over samples, both winds and all points.
at::Tensor squared_error(const at::Tensor& forecast, const at::Tensor& target,
                         const at::Tensor& sigma);

struct Step {
  std::int64_t epoch;
  /// From 0, over all epochs.
  std::int64_t number;
  std::int64_t of;
  /// Over all samples of the batch and all latitudes.
  double loss;
};

/// The network with its averaged weights (see below), replicated over the data's mesh; `watch` is
/// called after each step. AdamW, its rate falling as a cosine; the result is the exponential
/// average of the weights over the steps, which forgets the noise of single batches.
WindNet train(const WindsData& data, const TrainingOptions& options,
              const std::function<void(const Step&)>& watch);

/// The network's forecast of `months` after the training, in m/s, of them this rank's own: [own
/// months, 2, own lat, lon]. Collective.
at::Tensor forecast(WindNet& network, const WindsData& data, Months months);

}  // namespace winds
