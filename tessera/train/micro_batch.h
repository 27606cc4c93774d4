#pragma once
// MicroBatch: what one rank trains on at once; an optimizer step may have several.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera {

struct MicroBatch {
  /// The batch dim in front.
  std::vector<at::Tensor> tensors;
  /// Rows of this rank.
  std::int64_t rows = 0;
  /// Rows of this rank that count: the weight of its mean unless the task says otherwise. 0: a rank
  /// that has run out of data and takes part so that no other one waits.
  std::int64_t real = 0;
  /// Bool [rows], true where a row counts; undefined if all do.
  at::Tensor mask;
  /// Within the epoch, the same on every rank.
  std::uint64_t index = 0;
};

}  // namespace tessera
