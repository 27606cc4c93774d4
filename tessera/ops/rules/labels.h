#pragma once
// Rules by labels, the machinery under index_rule(): dims with the same label are the same dim. mm
// is "m k, k n -> m n": a label of the output may be sharded, one that is summed over may be too
// and leaves a Partial result. solve() looks, axis by axis, for the placement that moves the least.
//
//   LabelProblem p(call);
//   p.inputs = {{M, K}, {K, N}};
//   p.outputs = {{M, N}};
//   p.contract = {K};
//   return solve(p);

#include <set>
#include <vector>

#include "tessera/tensor/dispatch/rule.h"

namespace tessera::detail {

/// The label of a dim that must not be sharded.
inline constexpr int kWhole = -1;
using Labels = std::vector<int>;

struct LabelProblem {
  explicit LabelProblem(const OpCall& c) : call(c) {}

  const OpCall& call;
  /// One for each of call.tensors().
  std::vector<Labels> inputs;
  /// One for each tensor returned.
  std::vector<Labels> outputs;
  /// Empty: as call.outputs() says.
  std::vector<std::vector<std::int64_t>> output_shapes;
  /// Labels that an output may lack; it is Partial where they are sharded.
  std::set<int> contract;
  /// How such a Partial output is reduced.
  ReduceOp::Kind reduce = ReduceOp::Kind::sum;
  /// Inputs that are added to what is reduced (a bias): one rank adds them where it is Partial.
  std::set<int> additive;

  /// What a partial input (sum or avg) may do. `together`: the operator is linear in all its tensor
  /// inputs at once (add). `one`: in each of `linear_in`, the others fixed (mul, mm).
  enum class Linear : unsigned char { no, together, one } linear = Linear::no;
  std::set<int> linear_in;
};

/// Specs of inputs and outputs. Throws InvalidArgument where an input has not as many dims as
/// labels, ShardingError where an in-place operator would have to redistribute its target.
Plan solve(const LabelProblem& problem);

/// 0, 1, ..., n - 1.
Labels all_labels(std::int64_t n);
std::int64_t normal_dim(std::int64_t dim, std::int64_t dims);

/// The first `free` of n dims have labels, 0, 1, ...; those after them are whole.
Labels first_dims_free(int n, int free);
/// The last `whole` of n dims are whole; those before them have labels, 0, 1, ...
Labels last_dims_whole(int n, int whole);
/// No dim has a label.
Labels whole_labels(const TensorInfo& tensor);
/// Gives labels to the inputs of these arguments, where they have as many dims; all others are
/// whole.
void label_arguments(LabelProblem& problem,
                     const std::vector<std::pair<const char*, Labels>>& labels);
/// Whether the terms of a Partial value of type `from` may be converted to `to` one by one: not
/// floating-point ones to whole numbers (each would be rounded), nor booleans (their sum is "any"),
/// nor narrow whole numbers to wider ones (their sum may wrap).
bool terms_can_be_cast(at::ScalarType from, at::ScalarType to);
/// {0, 1, ..., n - 1}.
std::set<int> first_dims(int n);

/// Only dim 0, the samples, may be sharded; all else is whole.
Plan per_sample(const OpCall& call);

/// All inputs are gathered, because each element of the results, or their shape, may depend on
/// every element of them. Subject to Policies::redistribution.
Plan on_whole(const OpCall& call);

/// Partial axes become Replicate.
ShardSpec without_partial(const ShardSpec& spec);
/// A spec of another shape on the same mesh: dim d of it is cut like dim from[d] of `like` (-1: not
/// cut), whose extent it must have, unless `parts` gives other parts for it; Partial axes stay
/// partial if `partial`.
ShardSpec mapped_spec(const ShardSpec& like, const std::vector<std::int64_t>& shape,
                      const std::vector<int>& from, bool partial,
                      const std::vector<std::pair<int, Partition>>& parts = {});
/// Replicate on every axis that shards one of `dims`.
ShardSpec with_whole_dims(const ShardSpec& spec, const std::set<int>& dims);

}  // namespace tessera::detail
