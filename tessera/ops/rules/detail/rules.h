#pragma once
// What rules of operators are written with; their sources include this one header.
//
// Rules by labels, on which index_rule() is built: dims with the same label are the same dim. mm is
// "m k, k n -> m n": a label of the output may be sharded; one that is summed over may be sharded
// too, and leaves a Partial result. solve() searches, axis by axis, the placement that moves the
// least.
//
//   LabelProblem p(call, {{M, K}, {K, N}}, {{M, N}});
//   p.contract = {K};
//   return solve(p);
//
// Decompositions: operators that libtorch implements in one kernel, or composes of others in a way
// that does not suit shards, written with operators that have rules; for sharded tensors alone.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <set>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/base/host_lock.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/plan_cache.h"
#include "tessera/tensor/dispatch/rule.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/internal/boxes.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail {

// What rules write everywhere: sizes or strides, one per dim, and a local function's arguments.
using Shape = std::vector<std::int64_t>;
using c10::OperatorHandle;
using torch::jit::Stack;

/// Registers a file's rules when the library is loaded: const AtStart registered([] { ... });
struct AtStart {
  explicit AtStart(void (*body)()) { body(); }
};

/// Registers one rule for several operators.
void register_rules(std::initializer_list<const char*> ops, const Rule& rule,
                    const RuleOptions& options = {});

/// The label of a dim that must not be sharded.
inline constexpr int kUnsharded = -1;
using Labels = std::vector<int>;

struct LabelProblem {
  explicit LabelProblem(const OpCall& c) : call(c) {}
  LabelProblem(const OpCall& c, std::vector<Labels> of_inputs, std::vector<Labels> of_outputs,
               std::vector<Shape> shapes = {})
      : call(c),
        inputs(std::move(of_inputs)),
        outputs(std::move(of_outputs)),
        output_shapes(std::move(shapes)) {}

  const OpCall& call;
  /// Labels of each of call.tensors().
  std::vector<Labels> inputs;
  /// Labels of each tensor returned.
  std::vector<Labels> outputs;
  /// Shapes of the outputs; empty: those of call.outputs().
  std::vector<Shape> output_shapes;
  /// Labels that an output may lack; it is Partial where they are sharded.
  std::set<int> contract;
  /// How such a Partial output is reduced.
  ReduceOp::Kind reduce = ReduceOp::Kind::sum;
  /// Inputs that are added to what is reduced (a bias): one rank adds them where it is Partial.
  std::set<int> additive;

  /// Where a partial input (sum or avg) may stay so: the operator is linear in all its tensors at
  /// once (add), or in each of these, the others fixed (mul, mm).
  bool linear_together = false;
  std::set<int> linear_in;
};

/// The plan with specs of inputs and outputs. Throws InvalidArgument if an input does not have as
/// many dims as labels, ShardingError if an in-place operator would have to redistribute its
/// target.
Plan solve(const LabelProblem& problem);

/// The labels 0, 1, ..., n - 1.
Labels all_labels(std::int64_t n);
int normal_dim(std::int64_t dim, std::int64_t dims);

/// Labels 0, 1, ... for the first `free` of n dims; those after them must not be sharded.
Labels first_dims_free(int n, int free);
/// Labels 0, 1, ... for the dims before the last `whole` of n, which must not be sharded.
Labels last_dims_unsharded(int n, int whole);
/// Labels of a tensor of which no dim may be sharded.
Labels unsharded_labels(const TensorInfo& tensor);
/// Makes `shape` the one that tensors of it and of shape `s` are broadcast to, if they can be.
inline void broadcast_with(Shape& shape, at::IntArrayRef s) {
  if (s.size() > shape.size()) shape.insert(shape.begin(), s.size() - shape.size(), 1);
  for (std::size_t d = 0; d < s.size(); ++d)
    if (s[d] != 1) shape[shape.size() - s.size() + d] = s[d];
}
/// The dims of a tensor that is broadcast to `shape`, by those of `shape`: they are aligned at the
/// end, and those of size 1 have no label. Throws InvalidArgument if it is not broadcast to that:
/// some meta kernels do not check it (masked_fill_), and a shard of the target may fit by chance.
inline Labels broadcast_labels(const OpCall& call, const TensorInfo& t,
                               const std::vector<std::int64_t>& shape) {
  const auto& s = t.spec.shape();
  Labels labels;
  for (std::size_t d = 0; d < s.size(); ++d) {
    const std::size_t out = shape.size() - s.size() + d;
    if (s.size() > shape.size() || (s[d] != 1 && s[d] != shape[out]))
      throw InvalidArgument(call.name(), ": ", call.schema().arguments()[t.argument].name(),
                            " of shape ", list(s), " does not broadcast to ", list(shape));
    labels.push_back(s[d] == shape[out] ? static_cast<int>(out) : kUnsharded);
  }
  return labels;
}
/// Gives labels to the inputs of these arguments, if they have as many dims; no dim of other inputs
/// may be sharded.
void label_arguments(LabelProblem& problem,
                     const std::vector<std::pair<const char*, Labels>>& labels);
/// True if the ranks' values of this input, if it is Partial, may be converted to the dtype of the
/// first result separately: not floating-point ones to integers (each would be rounded), nor
/// booleans (their sum is "any"), nor narrow integers to wider ones (their sum may wrap).
bool summands_keep_type(const OpCall& call, const TensorInfo& t);
/// The same of all inputs.
bool all_summands_keep_type(const OpCall& call);
/// {0, 1, ..., n - 1}.
std::set<int> first_dims(int n);
/// A tensor of one dim as dim `d` of `dims`, the others of size 1.
inline at::Tensor as_dim(const at::Tensor& t, std::int64_t d, std::int64_t dims) {
  Shape shape(dims, 1);
  shape[d] = t.numel();
  return t.view(shape);
}
/// Row-major positions in an array of these sizes as one coordinate per dim.
std::vector<at::Tensor> coordinates(at::Tensor positions, const Shape& sizes);

/// A plan in which only dim 0, the samples, may be sharded.
Plan per_sample(const OpCall& call);

/// A plan in which all inputs are gathered, because each element of the results, or their shape,
/// may depend on every element of them. Subject to Policies::redistribution.
Plan on_gathered(const OpCall& call);

/// A spec of another shape on the same mesh: its dim d is sharded like dim from[d] of `like` (-1:
/// not sharded), whose extent it must have unless `parts` gives another partition for it; Partial
/// axes stay partial if `partial`.
ShardSpec mapped_spec(const ShardSpec& like, const std::vector<std::int64_t>& shape,
                      const std::vector<int>& from, bool partial,
                      const std::vector<std::pair<int, Partition>>& parts = {});
/// The spec with Replicate on every axis that shards one of `dims`.
ShardSpec with_unsharded_dims(const ShardSpec& spec, const std::set<int>& dims);

/// Returns a rule that plans as `rule` does, but does not call the operator on a rank whose shard
/// of an input is empty while the global input is not: the results there are made without it, empty
/// or, if they are Partial, zero. Only for operators whose every result is sharded with the empty
/// dim or summed over it.
Rule guarded(Rule rule);
/// Zeros for every result, as a kernel would have made them: the first of the dtype of the first
/// argument, the others of that which `of_others` returns.
LocalFunction zeros_of(const Plan& plan, at::ScalarType (*of_others)(const Stack&));

// ---- decompositions ----

/// Zeros of `sizes` that are sharded as `like`, whose dims are the same except for `dim`, which is
/// not sharded.
at::Tensor zeros_along(const at::Tensor& like, std::int64_t dim, c10::SymIntArrayRef sizes);

torch::Library& decompositions_above_autograd();
/// For inference mode, in which no kernels above autograd run.
torch::Library& decompositions_below_autograd();

/// `function`, whose errors an interpreter gets by their class.
template <class R, class... Arguments>
auto by_class(R (*function)(Arguments...)) {
  return [function](Arguments... arguments) -> R {
    try {
      return function(std::forward<Arguments>(arguments)...);
    } catch (const Error&) {
      raising([] { throw; });
      throw;
    }
  };
}

/// Registers `function` (or, for a boxed kernel, a factory that returns a torch::CppFunction) to
/// run in place of aten::`name` on sharded tensors, above autograd, so that its gradient is that of
/// what it calls.
template <class Function>
void register_decomposition(const char* name, Function function) {
  for (torch::Library* library :
       {&decompositions_above_autograd(), &decompositions_below_autograd()}) {
    if constexpr (std::is_invocable_r_v<torch::CppFunction, Function>)
      library->impl(name, function());
    else if constexpr (std::is_pointer_v<Function>)
      library->impl(name, by_class(function));
    else
      library->impl(name, function);
  }
}

// ---- reductions of small tensors over ranks, within a rule's local function ----

/// The mesh axes that shard a dim.
inline std::vector<int> axes_that_shard(const ShardSpec& spec, int dim) {
  return spec.dims() > 0 ? spec.dim(dim).axes : std::vector<int>();
}

/// Returns the axes on which `out` would be Partial, and makes it replicated there, because the
/// local function reduces over them itself.
inline std::vector<int> reduce_inside(Plan::Output& out) {
  auto axes = axes_where(out.spec.placements(), [](const auto& p) { return p.is_partial(); });
  out.spec = without_partial(out.spec);
  return axes;
}

/// Reduces a tensor over the ranks of some mesh axes; every rank gets the result, in a tensor of
/// its own or, if there are no axes, the one given.
struct OverRanks {
  std::shared_ptr<MeshContext> context;
  std::vector<int> axes;
  /// Name of the calls in traces and errors.
  const char* name;

  at::Tensor operator()(const at::Tensor& t, ReduceOp op = ReduceOp::sum) const {
    at::Tensor all = t.contiguous();
    if (!axes.empty()) context->mesh.group(axes).all_reduce(all, op, {.name = name});
    return all;
  }
};

/// `Tag` tells caches of one type of value apart.
template <class Value, class Tag>
class ThreadCache {
 public:
  /// The value of `key`, made by `make()` the first time. Pointers in a key must be kept alive by
  /// the value. When 1024 values are held all are dropped.
  template <class Make>
  static Value find_or_make(Key key, const Make& make) {
    static thread_local std::unordered_map<Key, Value, KeyHash, KeyEqual> all;
    if (const auto found = all.find(key); found != all.end()) return found->second;
    Value value = make();
    if (all.size() >= 1024) all.clear();
    all.emplace(std::move(key), value);
    return value;
  }
};

}  // namespace tessera::detail
