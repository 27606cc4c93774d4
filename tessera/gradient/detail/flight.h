#pragma once
// Flight: gradients that travel together: one flat tensor, reduced over one group, or
// reduce-scattered over one and then reduced over another.

#include <vector>

#include "tessera/gradient/reducer.h"

namespace tessera::detail {

class Flight {
 public:
  struct Item {
    std::size_t parameter;
    OwedGradient owed;
    at::Tensor part = {};  // its place in the flat tensor; after wait() the reduced value
  };

  Flight(const OwedGradient& like, ReduceOp op)
      : group_(like.group), scatter_(like.scatter), scatters_(like.scatter_dim >= 0), op_(op) {}

  bool scatters() const { return scatters_; }
  const std::vector<Item>& items() const { return items_; }
  /// Whether `owed` goes over the same groups.
  bool takes(const OwedGradient& owed) const {
    return owed.group == group_ && (owed.scatter_dim >= 0) == scatters_ &&
           (!scatters_ || owed.scatter == scatter_);
  }
  void add(std::size_t parameter, OwedGradient owed) {
    items_.push_back({parameter, std::move(owed)});
  }

  /// Copies the values; they are let go.
  void pack();
  void start();
  /// Starts the second step of what was scattered.
  void next();
  void wait();

 private:
  void pack_whole();
  void pack_scattered();

  Group group_, scatter_;
  bool scatters_ = false;
  ReduceOp op_;
  std::vector<Item> items_;
  at::Tensor flat_, kept_;  // what is sent; of a reduce-scatter, what stays here
  Sizes rows_;              // of the flat tensor, for each rank of scatter_
  Request request_;
  bool second_ = false;
};

}  // namespace tessera::detail
