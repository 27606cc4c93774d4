#pragma once
// What nodes of a backward say about the gradients that they hand on, so that a reduction that
// would be wrong for them is refused instead of giving gradients that are n times too small or too
// large.

#include <functional>
#include <vector>

#include "tessera/gradient/sync.h"

namespace torch::autograd {
struct Node;
}

namespace tessera::detail {

/// Called by a node's backward: the gradients that it hands on are of this form over these ranks.
/// Tells all that reduce a parameter which they reach, by plain operators alone: the search ends at
/// nodes for which `stop` is true, whose gradients are sharded. Does nothing for fewer than two
/// ranks. Throws GradientError.
void announce_gradient(GradientForm form, const std::vector<int>& ranks,
                       const std::function<bool(const torch::autograd::Node&)>& stop);

/// Called by a node's backward: the gradients that it hands on are scaled for an average over these
/// ranks (mean_loss does that).
void announce_average(const std::vector<int>& ranks);

/// True if the node that is being evaluated, or `to`, gets a gradient that was announced as scaled
/// for an average over at least two of these ranks.
bool averaged_above(const std::vector<int>& ranks, const torch::autograd::Node* to = nullptr);

/// True if the backward that runs accumulates into this leaf: autograd::grad() does not.
bool accumulates_into(const at::Tensor& leaf);

/// How many ranks two lists share.
int shared_ranks(const std::vector<int>& a, const std::vector<int>& b);

}  // namespace tessera::detail
