#pragma once
// Parameters that stages of several ranks share.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/pipeline/detail/plan.h"

namespace tessera::detail {

class TiedParameters {
 public:
  TiedParameters() = default;
  /// Collective over the pipeline's group: finds who shares what, and makes the values those of the
  /// first position that holds one. Throws InvalidArgument on every rank where shapes differ, or
  /// how they are sharded.
  explicit TiedParameters(const PipelinePlan& plan);
  /// Before a step: gradients of earlier steps count once, on the first position.
  void begin() const;
  /// After the step's backwards, on all positions that hold one: the sum becomes the gradient of
  /// each.
  void sum(const PipelinePlan& plan) const;
  /// Of this rank, those that are the same parameter as one of an earlier position, or of this one.
  std::vector<at::Tensor> repeated() const;

 private:
  struct Tie {
    std::string name;
    std::vector<at::Tensor> mine;
    /// Global ranks.
    std::vector<int> ranks;
    bool first = false;
  };
  std::vector<Tie> ties_;
};

}  // namespace tessera::detail
