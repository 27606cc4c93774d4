#pragma once
// Helpers shared by rules of reductions: which dims an operator reduces, and which remain.

#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail {

inline std::set<int> reduced_dims(const OpCall& call) {
  const int n = call.tensor(0).spec.dims();
  std::set<int> dims;
  if (call.has("dim")) {
    for (const auto d : call.integers("dim"))
      if (!dims.insert(normal_dim(d, n)).second)
        throw InvalidArgument(call.name(), ": dim ", d, " is given twice");
  }
  return dims.empty() || n == 0 ? first_dims(n) : dims;
}

inline bool keeps(const OpCall& call) {
  return call.argument("keepdim") >= 0 && call.boolean("keepdim");
}

/// What `each` has of each dim, without `dims`, or with `instead` of them if they are kept.
template <class T>
std::vector<T> without(const std::vector<T>& each, const std::set<int>& dims, bool keep,
                       T instead) {
  std::vector<T> out;
  for (int d = 0; d < static_cast<int>(each.size()); ++d)
    if (!dims.contains(d))
      out.push_back(each[d]);
    else if (keep)
      out.push_back(instead);
  return out;
}

/// The problem of an operator with `outputs` results that lack `dims`, or keep them with size 1.
inline LabelProblem over_dims(const OpCall& call, const std::set<int>& dims,
                              std::size_t outputs = 1) {
  const Shape& shape = call.tensor(0).spec.shape();
  const Labels all = all_labels(call.tensor(0).spec.dims());
  LabelProblem p(call, {all}, std::vector(outputs, without(all, dims, keeps(call), kUnsharded)),
                 std::vector(outputs, without<std::int64_t>(shape, dims, keeps(call), 1)));
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
