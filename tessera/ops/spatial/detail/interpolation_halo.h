#pragma once
// InterpolationHalo: one change of resolution of a field that is sharded in space (upsample_*:
// nearest, linear, cubic, with and without antialiasing), prepared for this rank. It runs below
// autograd on local tensors. All these operators are products of one-dimensional ones, each a
// sparse matrix.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/ops/halo/detail/field_halo.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

/// One of libtorch's interpolation operators.
struct Interpolation {
  /// Name of the operator: "upsample_bilinear2d".
  std::string name;
  /// Number of spatial dims.
  int inner;
  /// How many inputs on either side of an output's centre it may read; with antialiasing, in units
  /// of outputs if those are coarser.
  double reach;
  bool align_argument = true, nearest = false, antialias = false;
};

/// A row of a sparse matrix: inputs by their index, and the weight of each in the output.
using TapRow = std::vector<std::pair<std::int64_t, double>>;
using Taps = std::vector<TapRow>;

struct InterpolationCall {
  const Interpolation* op;
  /// Spatial sizes of the output.
  std::vector<std::int64_t> outputs;
  bool align = false;
  std::vector<std::optional<double>> scales;
  /// Options of the input tensor.
  at::TensorOptions options;
  bool channels_last = false;
};

/// The matrix of each spatial dim for inputs of sizes `inputs`. `of_backward`: the one whose
/// transpose libtorch's backward applies, which for nearest neighbours rounds differently than its
/// forward.
std::vector<Taps> interpolation_matrices(const InterpolationCall& call,
                                         const std::vector<std::int64_t>& inputs, bool of_backward);

class InterpolationHalo : FieldHalo {
 public:
  /// `x`, `y`: specs without partial axes, spatial dims (the last ones) sharded over the same axes.
  /// `plain`: the matrices are those of libtorch's operator. Collective over the mesh.
  InterpolationHalo(InterpolationCall call, ShardSpec x, const ShardSpec& y,
                    const std::vector<Taps>& matrices, bool plain);

  at::Tensor forward(const at::Tensor& x) const;
  at::Tensor adjoint(const at::Tensor& gradient) const;

 private:
  /// A matrix with `taps` pairs of an index and a weight in each row.
  struct Dense {
    std::size_t rows = 0, taps = 0;
    bool identity = false;
    std::vector<at::Tensor> index, weight;  // weight: undefined where all are 1
  };
  Dense dense(const Taps& taps, std::int64_t inputs) const;
  at::Tensor along(const at::Tensor& t, const Dense& matrix, std::size_t dim) const;
  void find_native();

  InterpolationCall call_;
  std::vector<Taps> whole_;              // of each spatial dim of the global field
  std::vector<Dense> matrix_, adjoint_;  // from the needed box to this rank's outputs, and back
  // libtorch's own operator is called, on a box of inputs; may differ between ranks
  bool native_ = false;
  Box native_in_, native_out_;  // the inputs and the outputs of libtorch's operator
};

}  // namespace tessera::detail
