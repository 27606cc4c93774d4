#pragma once
// What the showcases share in which a network trains while a solver runs: insitu and pillar.

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace online {

struct Training {
  /// Pairs of states to learn from.
  std::int64_t windows = 60;
  /// Solver steps between the two states of a pair.
  std::int64_t steps_a_window = 4;
  /// Of the weights, for each pair.
  std::int64_t updates = 4;
  double learning_rate = 4e-3;
  /// The folder to save in, and to go on from, on any number of ranks: the solver's state, the
  /// network and its optimizer; empty: neither.
  std::string folder = {};
  /// Windows between checkpoints.
  std::int64_t save_every = 20;
};

/// After training, over windows that were not trained on: root mean square errors of h against the
/// solver's.
struct Score {
  double surrogate = 0;
  /// Of "nothing changes".
  double persistence = 0;
  /// Of each update.
  std::vector<double> losses;
  double mass_before = 0, mass_after = 0;
};

/// Judges forecasts over `judged` windows that `advance` makes of `state`, whose dim 1 has h first.
inline void judge(Score& score, const at::Tensor& state, std::int64_t judged,
                  const std::function<at::Tensor(const at::Tensor&)>& forecast,
                  const std::function<void()>& advance) {
  const torch::NoGradGuard no_grad;
  const auto error = [&](const at::Tensor& t) {
    const at::Tensor difference = t.select(1, 0) - state.select(1, 0);
    return difference.square().mean().item<double>() / static_cast<double>(judged);
  };
  for (std::int64_t w = 0; w < judged; ++w) {
    const at::Tensor before = state.clone(), then = forecast(before);
    advance();
    score.surrogate += error(then);
    score.persistence += error(before);
  }
  score.surrogate = std::sqrt(score.surrogate);
  score.persistence = std::sqrt(score.persistence);
}

}  // namespace online
