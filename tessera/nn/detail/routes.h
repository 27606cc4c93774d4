#pragma once
// Routes: where the tokens of one routing go, as numbers.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// Of each rank that has tokens, choice and expert: how many tokens. Ranks are outermost.
struct ChoiceCounts {
  std::int64_t ranks = 1, choices = 1, experts = 1;
  std::vector<std::int64_t> of;

  std::int64_t& at(std::int64_t r, std::int64_t j, std::int64_t e) {
    return of[static_cast<std::size_t>((r * choices + j) * experts + e)];
  }
  std::int64_t at(std::int64_t r, std::int64_t j, std::int64_t e) const {
    return of[static_cast<std::size_t>((r * choices + j) * experts + e)];
  }
  /// Of all choices.
  std::int64_t sum(std::int64_t r, std::int64_t e) const {
    std::int64_t all = 0;
    for (std::int64_t j = 0; j < choices; ++j) all += at(r, j, e);
    return all;
  }
};

struct Routes {
  at::Tensor probabilities;
  /// Of [tokens, experts]: every rank of the experts' axis has tokens of its own; none: plain.
  std::optional<ShardSpec> rows;
  /// Where results lie.
  std::vector<Placement> result;
  int axis = -1;
  std::optional<Group> ranks;
  /// Experts on each rank of the axis.
  Sizes experts;
  std::vector<std::int64_t> mine, chosen;
  std::int64_t left_out = 0, choices = 0;
  /// Tokens that leave, by expert, and their weights.
  at::Tensor token, weight;
  Sizes sent, received;
  /// Of the rows by expert their places among those received, and the other way.
  at::Tensor arrival, departure;

  /// Runs what may fail on one rank alone; the others, which would wait for it, are told.
  template <class Body>
  auto told(const char* what, const Body& body) const {
    try {
      return body();
    } catch (...) {
      if (rows) rethrow_to_all(what, *context_of(*rows));
      throw;
    }
  }

  /// The spec of the weights of experts as grouped products take them, and of their gradient.
  ShardSpec weights(at::IntArrayRef shape, bool gradient) const;
};

}  // namespace tessera::detail
