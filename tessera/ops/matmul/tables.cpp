// Rules by table, for operators that need no more than to be told which dims are free: matrices in
// the last dims and batches before them; a tensor looked up in another that is whole; and those
// that must see the whole of their inputs.

#include <ATen/core/function_schema.h>

#include <algorithm>
#include <map>

#include "tessera/base/text.h"
#include "tessera/ops/rules/empty_parts.h"
#include "tessera/ops/rules/labels.h"
#include "tessera/tensor/errors.h"

namespace tessera::detail {

namespace {

using Shape = std::vector<std::int64_t>;

// ---- batches of matrices ----

/// Dims at the end of each argument that belong to one problem; all others are batches, aligned at
/// the end.
using Trailing = std::map<std::string, int>;

// The right-hand side of a system may be a vector a matrix.
bool is_vector_of(const OpCall& call, const TensorInfo& b, const TensorInfo& a) {
  if (b.spec.dims() == 1) return true;
  const Shape& m = a.spec.shape();
  return call.argument("left") != -1
             ? b.spec.dims() == a.spec.dims() - 1 &&
                   std::equal(m.begin(), m.end() - 1, b.spec.shape().begin())
             : b.spec.dims() == a.spec.dims() - 1;
}

Plan batched(const OpCall& call, const Trailing& trailing) {
  const auto* outputs = call.outputs();
  if (!outputs) return on_whole(call);
  const auto own = [&](const TensorInfo& t) {
    const std::string& name = call.schema().arguments()[t.argument].name();
    const auto it = trailing.find(name);
    const int n = it == trailing.end() ? 2 : it->second;
    return n < 0 ? (is_vector_of(call, t, call.tensor(0)) ? 1 : 2) : n;
  };
  int batches = 0;
  for (const TensorInfo& t : call.tensors()) batches = std::max(batches, t.spec.dims() - own(t));
  Shape extent(batches, 1);
  for (const TensorInfo& t : call.tensors()) {
    const int lead = t.spec.dims() - own(t);
    for (int d = 0; d < lead; ++d) {
      if (t.spec.shape()[d] != 1) extent[batches - lead + d] = t.spec.shape()[d];
    }
  }
  LabelProblem p(call);
  for (const TensorInfo& t : call.tensors()) {
    Labels labels(t.spec.dims(), kWhole);
    const int lead = t.spec.dims() - own(t);
    for (int d = 0; d < lead; ++d) {
      if (t.spec.shape()[d] == extent[batches - lead + d]) labels[d] = batches - lead + d;
    }
    p.inputs.push_back(std::move(labels));
  }
  for (const OutputInfo& out : *outputs) {
    Labels labels(out.shape.size(), kWhole);
    for (int d = 0; d < batches && d < static_cast<int>(out.shape.size()) && out.defined; ++d) {
      if (out.shape[d] == extent[d]) labels[d] = d;
    }
    p.outputs.push_back(std::move(labels));
    // A result without some batch dim would be wrong on every rank but one: then all is whole.
    for (int d = 0; d < batches; ++d) {
      if (out.defined && out.shape != Shape{0} &&
          (d >= static_cast<int>(out.shape.size()) || out.shape[d] != extent[d]))
        return on_whole(call);
    }
    if (out.defined && out.shape == Shape{0} && batches > 0) return on_whole(call);
  }
  return solve(p);
}

// ---- images: [samples, channels, ...] or [channels, ...], the last `inner` dims whole ----

Labels last_unsharded(int n, int inner) {
  Labels labels = all_labels(n);
  for (int d = std::max(n - inner, 0); d < n; ++d) labels[d] = kWhole;
  return labels;
}

// The size of the input is an argument.
template <int inner>
Plan upsample_backward(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  Shape size = call.integers("input_size");
  LabelProblem p(call);
  p.inputs = {last_unsharded(n, inner)};
  p.outputs = p.inputs;
  p.output_shapes = {size};
  Plan plan = solve(p);
  for (int d = 0; d < n - inner; ++d) size[d] = plan.inputs[0]->local_shape()[d];
  plan.arguments = {{call.argument("input_size"), c10::IValue(c10::List<std::int64_t>(size))}};
  plan.outputs[0].strides = std::nullopt;
  return plan;
}

// Only samples are free.
Plan samples(const OpCall& call) {
  const auto* outputs = call.outputs();
  if (!outputs) return on_whole(call);
  const std::int64_t count = call.tensor(0).spec.dims() > 0 ? call.tensor(0).spec.shape()[0] : 0;
  LabelProblem p(call);
  for (const TensorInfo& t : call.tensors()) {
    p.inputs.push_back(last_unsharded(t.spec.dims(), t.spec.dims() - 1));
    if (t.spec.dims() == 0 || t.spec.shape()[0] != count) return on_whole(call);
  }
  for (const OutputInfo& out : *outputs) {
    if (out.defined && (out.shape.empty() || out.shape[0] != count)) return on_whole(call);
    p.outputs.push_back(
        last_unsharded(static_cast<int>(out.shape.size()), static_cast<int>(out.shape.size()) - 1));
  }
  return solve(p);
}

// ---- looked up: the first tensor is free, the others are whole ----

Plan looked_up(const OpCall& call) {
  const auto* outputs = call.outputs();
  const Shape& shape = call.tensor(0).spec.shape();
  const int n = static_cast<int>(shape.size());
  LabelProblem p(call);
  for (const TensorInfo& t : call.tensors())
    p.inputs.push_back(&t == &call.tensor(0) ? all_labels(n) : Labels(t.spec.dims(), kWhole));
  p.outputs = {all_labels(n)};
  if (!outputs) p.output_shapes = {shape};
  return solve(p);
}

// ---- distances between the rows of two matrices ----

enum : int { kRows = 100, kOthers };

Plan distances(const OpCall& call) {
  const TensorInfo& a = *call.find("x1");
  const TensorInfo& b = *call.find("x2");
  const int n = a.spec.dims();
  if (n != b.spec.dims() ||
      !std::equal(a.spec.shape().begin(), a.spec.shape().end() - 2, b.spec.shape().begin()))
    return on_whole(call);
  Labels x1 = last_unsharded(n, 2), x2 = x1, out = x1;
  x1[n - 2] = out[n - 2] = kRows;
  x2[n - 2] = out[n - 1] = kOthers;
  LabelProblem p(call);
  const bool backward = call.argument("cdist") >= 0;
  for (const TensorInfo& t : call.tensors())
    p.inputs.push_back(&t == &a ? x1 : &t == &b ? x2 : out);
  p.outputs = {backward ? x1 : out};
  Shape shape = a.spec.shape();
  if (!backward) shape[n - 1] = b.spec.shape()[n - 2];
  p.output_shapes = {shape};
  if (backward) p.contract = {kOthers};
  return solve(p);
}

// Of the ranks' parts: whether any is wrong is for each rank to say.
Plan checked(const OpCall&) { return {}; }

const bool tables_registered = [] {
  const std::vector<std::pair<std::vector<const char*>, Trailing>> linear_algebra = {
      {{"linalg_inv_ex",
        "linalg_lu_factor_ex",
        "linalg_lu",
        "linalg_cholesky_ex",
        "cholesky_inverse",
        "linalg_qr",
        "geqrf",
        "_linalg_svd",
        "_linalg_eigh",
        "linalg_eig",
        "linalg_eigvals",
        "_linalg_eigvals",
        "_linalg_det",
        "_linalg_slogdet",
        "linalg_ldl_factor_ex",
        "linalg_matrix_exp",
        "cholesky_solve",
        "linalg_solve_triangular",
        "triangular_solve",
        "linalg_matrix_sqrth",
        "linalg_polar",
        "cholesky",
        "inverse"},
       {}},
      {{"lu_unpack"}, {{"LU_pivots", 1}}},
      {{"linalg_lu_solve"}, {{"pivots", 1}}},
      {{"linalg_ldl_solve"}, {{"pivots", 1}}},
      {{"linalg_householder_product", "ormqr"}, {{"tau", 1}, {"input2", 1}}},
      {{"linalg_pinv.atol_rtol_tensor"}, {{"atol", 0}, {"rtol", 0}}},
      {{"_linalg_solve_ex"}, {{"B", -1}}},
      {{"linalg_lstsq"}, {{"b", -1}}},
  };
  for (const auto& [ops, trailing] : linear_algebra) {
    for (const char* op : ops)
      register_rule(concat("aten::", op), guarded([trailing = trailing](const OpCall& c) {
                      return batched(c, trailing);
                    }));
  }
  register_rule("aten::_linalg_check_errors", checked);
  // Called by themselves; what interpolates above autograd (interpolation.cpp) has gradients of its
  // own.
  for (const char* op : {"upsample_nearest1d_backward", "_upsample_nearest_exact1d_backward",
                         "upsample_linear1d_backward"})
    register_rule(concat("aten::", op), guarded(upsample_backward<1>));
  for (const char* op : {"upsample_nearest2d_backward", "_upsample_nearest_exact2d_backward",
                         "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
                         "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward",
                         "_upsample_lanczos2d_aa_backward"})
    register_rule(concat("aten::", op), guarded(upsample_backward<2>));
  for (const char* op : {"upsample_nearest3d_backward", "_upsample_nearest_exact3d_backward",
                         "upsample_trilinear3d_backward"})
    register_rule(concat("aten::", op), guarded(upsample_backward<3>));
  for (const char* op :
       {"grid_sampler_2d", "grid_sampler_3d", "grid_sampler_2d_backward",
        "grid_sampler_3d_backward", "fractional_max_pool2d", "fractional_max_pool3d",
        "fractional_max_pool2d_backward", "fractional_max_pool3d_backward"})
    register_rule(concat("aten::", op), guarded(samples));
  for (const char* op : {"isin.Tensor_Tensor", "isin.Tensor_Scalar", "bucketize.Tensor"})
    register_rule(concat("aten::", op), looked_up);
  for (const char* op : {"_cdist_forward", "_cdist_backward"})
    register_rule(concat("aten::", op), guarded(distances));
  // Values that leave to the host among them.
  for (const char* op : {"_local_scalar_dense",
                         "equal",
                         "masked_select",
                         "take",
                         "median",
                         "nanmedian",
                         "histc",
                         "bincount",
                         "histogram",
                         "_histogramdd_bin_edges",
                         "_histogramdd_from_bin_cts",
                         "_histogramdd_from_bin_tensors",
                         "_unique",
                         "_unique2",
                         "unique_dim",
                         "unique_consecutive",
                         "unique_dim_consecutive",
                         "nonzero",
                         "nonzero_static",
                         "segment_reduce",
                         "_segment_reduce_backward",
                         "_pdist_forward",
                         "_pdist_backward",
                         "_ctc_loss",
                         "_ctc_loss_backward",
                         "block_diag",
                         "_chunk_cat",
                         "repeat_interleave.Tensor",
                         "hash_tensor",
                         "_trilinear",
                         "multi_margin_loss",
                         "multi_margin_loss_backward",
                         "multilabel_margin_loss_forward",
                         "multilabel_margin_loss_backward",
                         "isin.Scalar_Tensor",
                         "bucketize.Scalar",
                         "searchsorted",
                         "_cholesky_solve_helper",
                         "tril_indices",
                         "_compute_linear_combination"})
    register_rule(concat("aten::", op), on_whole);
  return true;
}();

}  // namespace

}  // namespace tessera::detail
