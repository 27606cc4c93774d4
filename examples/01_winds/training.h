#pragma once
// The training loop: an ordinary one, data parallel.

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "network.h"
#include "winds_data.h"

namespace winds {

struct TrainingOptions {
  std::uint64_t seed = 1;
  std::int64_t epochs = 10;
  double learning_rate = 2e-3;
  double weight_decay = 1e-2;
  NetworkOptions network;
};

/// The mean squared error in (m/s)^2 over samples, both winds and all points.
at::Tensor squared_error(const at::Tensor& forecast, const at::Tensor& target, const at::Tensor& sigma);

struct Step {
  std::int64_t epoch;
  std::int64_t number;  ///< From 0, over all epochs.
  std::int64_t of;
  double loss;  ///< Over all ranks' samples of the batch.
};

/// The network with its averaged weights (see below), the same on every rank; `watch` is called after each step.
/// AdamW, its rate falling as a cosine; the result is the exponential average of the weights over the steps, which forgets the noise of single
/// batches.
WindNet train(const WindsData& data, const tessera::Group& group, const TrainingOptions& options,
              const std::function<void(const Step&, WindNet& average)>& watch);

/// The network's forecast of `months` after the training, in m/s: [months, 2, lat, lon].
at::Tensor forecast(WindNet& network, const WindsData& data, Months months);

}  // namespace winds
