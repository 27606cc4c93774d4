// Sorts, scans and picks along one dim, which must be whole; the others may be sharded.

#include <ATen/ops/zeros_like.h>

#include <set>
#include <vector>

#include "tessera/ops/reductions/reduced.h"
#include "tessera/ops/rules/decomposition.h"
#include "tessera/ops/rules/labels.h"
#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail::sort_and_scan_rules {

namespace {

// Results with and without the reduced dim, all of one shape, and the dim whole: max.dim, argmax,
// median...
Plan along_reduced(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  const auto dims = reduced_dims(call);
  LabelProblem p(call);
  Labels in = all_labels(n);
  for (const int d : dims) in[d] = kWhole;
  p.inputs = {in};
  p.outputs.assign(call.schema().returns().size(), remaining(n, dims, keeps(call)));
  if (!call.outputs())
    p.output_shapes.assign(p.outputs.size(),
                           shape_without(call.tensor(0).spec.shape(), dims, keeps(call)));
  return solve(p);
}

// Same number of dims in and out, `dim` whole, the others free: softmax, cumsum, sort, topk,
// flip...
Plan along(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  std::set<int> whole;
  for (const char* name : {"dim", "dims"}) {
    if (call.argument(name) < 0 || !call.has(name)) continue;
    for (const auto d : call.integers(name)) whole.insert(static_cast<int>(normal_dim(d, n)));
  }
  if (whole.empty()) {
    for (int d = 0; d < n; ++d) whole.insert(d);
  }
  LabelProblem p(call);
  Labels labels = all_labels(n);
  for (const int d : whole) {
    if (d < n) labels[d] = kWhole;
  }
  for (const TensorInfo& t : call.tensors()) {
    Labels own = t.spec.dims() == n ? labels : Labels(t.spec.dims(), kWhole);
    for (int d = 0; d < t.spec.dims() && t.spec.dims() == n; ++d) {
      if (t.spec.shape()[d] == call.tensor(0).spec.shape()[d]) continue;
      own[d] = labels[d] = kWhole;  // gather with a smaller index
    }
    p.inputs.push_back(own);
  }
  for (Labels& own : p.inputs) {
    for (std::size_t d = 0; d < own.size() && own.size() == labels.size(); ++d) {
      if (labels[d] == kWhole) own[d] = kWhole;
    }
  }
  p.outputs.assign(call.schema().returns().size(), labels);
  // of a backward the result is shaped as what was differentiated
  const TensorInfo* self = call.find("self");
  if (!call.outputs())
    p.output_shapes.assign(p.outputs.size(), (self ? *self : call.tensor(0)).spec.shape());
  return solve(p);
}

// Zeros of `sizes` that are cut as `like`, whose dims are the same but for `dim`, along which they
// are whole.
at::Tensor zeros_along(const at::Tensor& like, std::int64_t dim, c10::SymIntArrayRef sizes) {
  const at::Tensor slice =
      like.size(dim) == 0 ? like.new_zeros({}).reshape(std::vector<std::int64_t>(like.dim(), 1))
                          : like.narrow(dim, 0, 1);
  return at::zeros_like(slice.expand_symint(sizes));
}

// Of max.dim, sort, topk, kthvalue, mode...: the gradient goes where the values came from.
at::Tensor value_selecting_reduction_backward(const at::Tensor& grad, std::int64_t dim,
                                              const at::Tensor& indices, c10::SymIntArrayRef sizes,
                                              bool keepdim) {
  if (sizes.empty()) return grad.reshape({}) * 1;
  const bool unsqueeze = !keepdim;
  const at::Tensor g = unsqueeze ? grad.unsqueeze(dim) : grad,
                   at = unsqueeze ? indices.unsqueeze(dim) : indices;
  return zeros_along(g, dim, sizes).scatter(dim, at, g);
}

at::Tensor cummaxmin_backward(const at::Tensor& grad, const at::Tensor& input,
                              const at::Tensor& indices, std::int64_t dim) {
  if (input.numel() == 0) return input;
  return at::zeros_like(input).scatter_add(dim, indices, grad);
}

const bool registered = [] {
  for (const char* op :
       {"aten::max.dim", "aten::min.dim", "aten::argmax", "aten::argmin", "aten::median.dim",
        "aten::nanmedian.dim", "aten::mode", "aten::kthvalue", "aten::logsumexp"}) {
    register_rule(op, along_reduced);
  }
  for (const char* op : {"aten::cumsum", "aten::cumprod", "aten::logcumsumexp", "aten::sort",
                         "aten::sort.stable", "aten::topk", "aten::_safe_softmax", "aten::cummax",
                         "aten::cummin", "aten::glu", "aten::glu_backward", "aten::linalg_cross"}) {
    register_rule(op, along);
  }
  register_decomposition("value_selecting_reduction_backward", value_selecting_reduction_backward);
  register_decomposition("cummaxmin_backward", cummaxmin_backward);
  return true;
}();

}  // namespace

}  // namespace tessera::detail::sort_and_scan_rules
