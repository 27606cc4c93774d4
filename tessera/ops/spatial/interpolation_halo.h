#pragma once
// One change of resolution of a field that is cut in space (upsample_*: nearest, linear, cubic,
// with and without antialiasing), made ready to run on this rank: below autograd, on locals. All
// these operators are products of one-dimensional ones, each a sparse matrix.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/ops/halo/halo.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// One of libtorch's operators.
struct Interpolation {
  /// "upsample_bilinear2d"
  std::string name;
  /// Spatial dims.
  int inner;
  /// Inputs on either side of an output's centre that it may read; with antialiasing, in outputs
  /// where those are coarser.
  double reach;
  bool align_argument = true, nearest = false, antialias = false;
};

/// A sparse matrix: output o is the sum of weight[k] * input index[k] for k in [offset[o], offset[o
/// + 1]).
struct Taps {
  std::vector<std::int64_t> offset{0}, index;
  std::vector<double> weight;
  std::int64_t rows() const { return static_cast<std::int64_t>(offset.size()) - 1; }
  bool operator==(const Taps&) const = default;
};

struct InterpolationCall {
  const Interpolation* op;
  /// Sizes.
  std::vector<std::int64_t> outputs;
  bool align = false;
  std::vector<std::optional<double>> scales;
  /// Of the input.
  at::TensorOptions options;
  bool channels_last = false;
};

/// The matrix of each spatial dim, from `inputs` sizes. `of_backward`: whose transpose libtorch's
/// backward is, which for nearest neighbours rounds otherwise than its forward.
std::vector<Taps> interpolation_matrices(const InterpolationCall& call,
                                         const std::vector<std::int64_t>& inputs, bool of_backward);

class InterpolationHalo {
 public:
  /// `x`, `y`: without partial axes, spatial dims (the last ones) cut over the same axes. `plain`:
  /// the matrices are those of libtorch's operator. Collective over the mesh.
  InterpolationHalo(InterpolationCall call, ShardSpec x, ShardSpec y, std::vector<Taps> matrices,
                    bool plain);

  at::Tensor forward(const at::Tensor& x) const;
  at::Tensor adjoint(const at::Tensor& gradient) const;

 private:
  /// A matrix as `taps` pairs of an index and a weight for each row.
  struct Dense {
    std::int64_t rows = 0, taps = 0;
    bool identity = false;
    std::vector<at::Tensor> index, weight;  // weight: undefined where all are 1
  };
  Dense dense(const Taps& taps, std::int64_t inputs) const;
  at::Tensor along(const at::Tensor& t, const Dense& matrix, std::size_t dim) const;
  void find_native();
  std::size_t lead() const { return out_.size() - call_.outputs.size(); }

  InterpolationCall call_;
  ShardSpec x_, y_;
  std::vector<Taps> whole_;              // of each spatial dim
  std::vector<Dense> matrix_, adjoint_;  // from the needed box to this rank's outputs, and back
  Box out_;                              // this rank's
  Halo halo_;
  // libtorch's own operator is called, on a box of inputs; each rank's own affair
  bool native_ = false;
  Box native_in_, native_out_;  // what libtorch's operator is called on, and what it gives
};

}  // namespace tessera::detail
