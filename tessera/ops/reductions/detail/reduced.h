#pragma once
// Helpers shared by rules of reductions: which dims an operator reduces, and which remain.

#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail {

inline std::set<int> reduced_dims(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  std::set<int> dims;
  if (call.argument("dim") >= 0 && call.has("dim")) {
    for (const auto d : call.integers("dim"))
      if (!dims.insert(normal_dim(d, n)).second)
        throw InvalidArgument(call.name(), ": dim ", d, " is given twice");
  }
  if (dims.empty())
    for (int d = 0; d < n; ++d) dims.insert(d);
  if (n == 0) dims.clear();
  return dims;
}

inline bool keeps(const OpCall& call) {
  return call.argument("keepdim") >= 0 && call.boolean("keepdim");
}

inline Labels remaining(int n, const std::set<int>& dims, bool keep) {
  Labels out;
  for (int d = 0; d < n; ++d)
    if (!dims.contains(d))
      out.push_back(d);
    else if (keep)
      out.push_back(kUnsharded);
  return out;
}

inline std::vector<std::int64_t> shape_without(const std::vector<std::int64_t>& shape,
                                               const std::set<int>& dims, bool keep) {
  std::vector<std::int64_t> out;
  for (int d = 0; d < static_cast<int>(shape.size()); ++d)
    if (!dims.contains(d))
      out.push_back(shape[d]);
    else if (keep)
      out.push_back(1);
  return out;
}

/// The problem of an operator with `outputs` results that lack `dims`, or keep them with size 1.
inline LabelProblem over_dims(const OpCall& call, const std::set<int>& dims,
                              std::size_t outputs = 1) {
  const TensorInfo& x = call.tensor(0);
  LabelProblem p(call);
  p.inputs = {all_labels(x.spec.dims())};
  p.outputs.assign(outputs, remaining(x.spec.dims(), dims, keeps(call)));
  p.output_shapes.assign(outputs, shape_without(x.spec.shape(), dims, keeps(call)));
  p.contract = dims;
  return p;
}

inline LabelProblem reduction(const OpCall& call, ReduceOp::Kind op) {
  LabelProblem p = over_dims(call, reduced_dims(call));
  if (call.outputs()) p.output_shapes.clear();
  p.reduce = op;
  return p;
}

}  // namespace tessera::detail
