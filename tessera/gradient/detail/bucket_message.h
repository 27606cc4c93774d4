#pragma once
// BucketMessage: the gradients of a bucket that are reduced over the same ranks, in one flat tensor
// that is all-reduced over one group, or reduce-scattered over one and then all-reduced over
// another.

#include <optional>
#include <vector>

#include "tessera/gradient/reducer.h"

namespace tessera::detail {

class BucketMessage {
 public:
  struct Item {
    std::size_t parameter;
    UnreducedGradient gradient;
    /// Its place in the flat tensor; after wait() the reduced value.
    at::Tensor reduced = {};
    /// The dtype of the gradient.
    at::ScalarType dtype = at::kFloat;
  };

  BucketMessage(const UnreducedGradient& like, ReduceOp op)
      : group_(like.group),
        scatter_(like.scatter),
        scatters_(like.scatter_dim >= 0),
        op_(op),
        dtype_(like.message) {}

  bool scatters() const { return scatters_; }
  const std::vector<Item>& items() const { return items_; }
  /// True if `gradient` is reduced over the same groups.
  bool takes(const UnreducedGradient& gradient) const {
    return gradient.group == group_ && gradient.message == dtype_ &&
           (gradient.scatter_dim >= 0) == scatters_ && (!scatters_ || gradient.scatter == scatter_);
  }
  void add(std::size_t parameter, UnreducedGradient gradient) {
    items_.push_back({parameter, std::move(gradient)});
  }

  /// Packs the gradients into the flat tensor and releases them.
  void pack();
  void start();
  /// Waits for a reduce-scatter and starts the all-reduce that follows it; nothing otherwise.
  void next();
  /// Waits for the reduced values, in the dtypes of the gradients.
  void wait();

 private:
  at::Tensor flat() const;
  void pack_full();
  void pack_scattered();

  Group group_, scatter_;
  bool scatters_ = false;
  ReduceOp op_;
  std::optional<at::ScalarType> dtype_;
  std::vector<Item> items_;
  /// What is sent, and what this rank keeps of a reduce-scatter.
  at::Tensor flat_, kept_;
  /// The rows of the flat tensor that belong to each rank of scatter_.
  Sizes rows_;
  Request request_;
  bool second_ = false;
};

}  // namespace tessera::detail
