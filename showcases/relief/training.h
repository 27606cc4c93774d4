#pragma once
// The training loop, and how good the network is on the part of the globe that it was not trained
// on.

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "field.h"
#include "network.h"

namespace relief {

struct TrainingOptions {
  std::uint64_t seed = 1;
  std::int64_t steps = 20;
  double learning_rate = 1e-2;
  NetworkOptions network = {};
};

/// The network after the training, and its losses in m^2, one a step. Each step sees two thirds of
/// the globe, all latitudes. Collective.
ReliefNet train(const Field& field, const TrainingOptions& options,
                const std::function<void(std::int64_t step, double loss)>& watch);

/// RMS errors in m over the third of the longitudes that training does not see, each point weighted
/// by its area.
struct Score {
  double interpolation = 0, network = 0;
};
Score score(ReliefNet& network, const Field& field);

/// A window of the fine grid on every rank: what the network sees (its coarse points repeated), the
/// interpolation, the network's and the truth; in m, [rows, columns] each. Collective.
std::vector<at::Tensor> look(ReliefNet& network, const Field& field, std::int64_t row,
                             std::int64_t column, std::int64_t rows, std::int64_t columns);

}  // namespace relief
