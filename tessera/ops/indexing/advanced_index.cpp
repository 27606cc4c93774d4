// x[i, j, ...] and x[i, j, ...] = y by lists of index tensors, and by masks.

#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/broadcast_tensors.h>

#include <numeric>

#include "tessera/ops/indexing/detail/dim_shard.h"
#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail::advanced_index_rules {
namespace {

bool is_mask(const TensorInfo& t) { return t.dtype == at::kBool || t.dtype == at::kByte; }

// Which dims of self a list of index tensors covers, and the shape and position of the dims that
// they make.
struct Advanced {
  std::vector<const TensorInfo*> indices;
  std::vector<int> dims;  // of self, one per index
  bool masks = false;
  Shape broadcast;
  int at = 0;  // position of the broadcast dims in the result
  Shape result;
  Labels result_labels;  // dims of self, and kIndex + i

  explicit Advanced(const OpCall& call) {
    const TensorInfo& x = *call.find("self");
    const int list = call.argument("indices");
    for (const TensorInfo& t : call.tensors()) {
      if (t.argument != list) continue;
      indices.push_back(&t);
      dims.push_back(t.element);
      masks |= is_mask(t);
      broadcast_with(broadcast, t.spec.shape());
    }
    // A mask covers several dims from where it stands on.
    TORCH_CHECK_INDEX(masks || dims.empty() || dims.back() < x.spec.dims(), call.name(), ": ",
                      dims.back() + 1, " indices of a tensor of ", x.spec.dims(), " dims");
    bool adjacent = true;
    for (std::size_t i = 1; i < dims.size(); ++i) adjacent &= dims[i] == dims[i - 1] + 1;
    at = adjacent && !dims.empty() ? dims.front() : 0;
    for (int d = 0; d < x.spec.dims(); ++d) {
      if (std::ranges::find(dims, d) != dims.end()) continue;
      result.push_back(x.spec.shape()[d]);
      result_labels.push_back(d);
    }
    const auto before = std::min<std::ptrdiff_t>(at, std::ssize(result));
    result.insert(result.begin() + before, broadcast.begin(), broadcast.end());
    Labels of_index(broadcast.size());
    std::iota(of_index.begin(), of_index.end(), kIndex);
    result_labels.insert(result_labels.begin() + before, of_index.begin(), of_index.end());
  }
};

Plan index(const OpCall& call) {
  const TensorInfo& x = *call.find("self");
  const Advanced a(call);
  if (a.masks || a.indices.empty() || x.argument != 0) return on_gathered(call);
  const int n = x.spec.dims();
  LabelProblem p(call, {all_labels(n)}, {a.result_labels}, {a.result});
  if (a.dims.size() > 1 || !has_sums(x.dtype))
    for (const int d : a.dims) p.inputs[0][d] = kUnsharded;
  else
    p.contract = {a.dims[0]};
  for (const TensorInfo* t : a.indices) {
    Labels labels = broadcast_labels(call, *t, a.broadcast);
    for (int& label : labels)
      if (label != kUnsharded) label += kIndex;
    p.inputs.push_back(std::move(labels));
  }
  p.linear_in = {0};
  Plan plan = solve(p);
  if (const auto* out = call.outputs(); out && (*out)[0].shape == a.result)
    plan.outputs[0].strides = (*out)[0].strides;
  const int d = a.dims[0];
  if (a.dims.size() > 1 || !plan.inputs[0]->is_sharded(d)) return plan;
  plan.local = [d, part = part_of(*plan.inputs[0], d), local = plan.outputs[0].spec.local_shape()](
                   const OperatorHandle&, Stack s) {
    const at::Tensor at = s[1].toListRef()[d].toTensor();
    part.check(at, "index", true);
    return Stack{slices_here(s[0].toTensor(), d, part.global(at), part, local)};
  };
  return plan;
}

// x[mask] = values, or x[..., mask, ...] = values: a value for each place where the mask is true,
// in the order of the global tensor. The mask and the values are replicated; each rank finds by the
// mask which of them are written to its shard.
Plan put_where(const OpCall& call, const Advanced& a) {
  const TensorInfo &x = *call.find("self"), &mask = *a.indices[0], &values = *call.find("values");
  const int n = x.spec.dims(), first = a.dims[0], covered = mask.spec.dims();
  if (values.dtype != x.dtype)
    throw InvalidArgument(call.name(), ": values are ", c10::toString(values.dtype),
                          ", and self is ", c10::toString(x.dtype), "; convert them");
  const Labels all = all_labels(n);
  Plan plan = solve(
      {call, {all, unsharded_labels(mask), unsharded_labels(values)}, {all}, {x.spec.shape()}});
  const ShardSpec& spec = *plan.inputs[0];
  plan.local = [first, covered, shape = spec.shape(), offset = spec.local_offset(),
                local = spec.local_shape(),
                in_place = call.in_place()](const OperatorHandle& op, Stack stack) {
    const at::Tensor whole = stack[1].toListRef()[first].toTensor().to(at::kBool);
    at::Tensor values = stack[2].toTensor(), mine = whole;
    at::Tensor which = whole.reshape(-1).cumsum(0).view(whole.sizes()) - 1;
    const std::int64_t count = whole.sum().item<std::int64_t>();
    Shape made(shape.begin(), shape.begin() + first);
    made.push_back(count);
    made.insert(made.end(), shape.begin() + first + covered, shape.end());
    TORCH_CHECK_INDEX(at::is_expandable_to(values.sizes(), made), "index_put: values of shape ",
                      values.sizes(), " for a selection of shape ", at::IntArrayRef(made));
    values = values.expand(made);
    for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
      if (d >= first && d < first + covered) {
        mine = mine.narrow(d - first, offset[d], local[d]);
        which = which.narrow(d - first, offset[d], local[d]);
      } else {
        values = values.narrow(d < first ? d : d - covered + 1, offset[d], local[d]);
      }
    }
    const at::Tensor self = stack[0].toTensor(), own = which.masked_select(mine);
    if (own.numel() == 0) return Stack{in_place ? self : self.clone()};
    c10::List<std::optional<at::Tensor>> list;
    list.resize(first);
    for (const at::Tensor& positions : mine.nonzero_numpy()) list.push_back(positions);
    stack[1] = list;
    stack[2] = values.index_select(first, own);
    op.callBoxed(stack);
    return stack;
  };
  return plan;
}

// Where an index is a mask, which is sharded like the dims that it covers.
Plan put_by_masks(const OpCall& call, const Advanced& a) {
  const TensorInfo &x = *call.find("self"), &values = *call.find("values");
  const int n = x.spec.dims();
  LabelProblem p(call, {}, {all_labels(n)}, {x.spec.shape()});
  if (a.indices.size() == 1 && a.indices[0]->spec.dims() > 0) {
    const Shape& mask = a.indices[0]->spec.shape();
    const auto covered = static_cast<std::ptrdiff_t>(mask.size());
    if (a.dims[0] + covered > n ||
        !std::equal(mask.begin(), mask.end(), x.spec.shape().begin() + a.dims[0]))
      throw InvalidArgument(call.name(), ": a mask of shape ", list(mask), " at dim ", a.dims[0],
                            " of a tensor of shape ", list(x.spec.shape()),
                            "; give one value per element that it selects from");
    if (values.spec.numel() != 1) return put_where(call, a);
  }
  // One value where the mask is true.
  const bool one = a.indices.size() == 1 && values.spec.numel() == 1;
  if (!one && !call.in_place()) return on_gathered(call);
  p.inputs = {one ? all_labels(n) : Labels(n, kUnsharded)};
  for (const TensorInfo* t : a.indices) {
    Labels labels(t->spec.dims(), kUnsharded);
    for (int i = 0; one && i < t->spec.dims(); ++i) labels[i] = a.dims[0] + i;
    p.inputs.push_back(std::move(labels));
  }
  p.inputs.push_back(unsharded_labels(values));
  if (!one) p.outputs = {Labels(n, kUnsharded)};
  return solve(p);
}

Plan index_put(const OpCall& call) {
  const TensorInfo &x = *call.find("self"), &values = *call.find("values");
  const int n = x.spec.dims();
  const Advanced a(call);
  if (a.masks) return put_by_masks(call, a);
  LabelProblem p(call, {all_labels(n)}, {all_labels(n)}, {x.spec.shape()});
  for (const TensorInfo* t : a.indices) p.inputs.push_back(unsharded_labels(*t));
  Labels of_values;
  const Shape& s = values.spec.shape();
  for (std::size_t i = 0; i < s.size(); ++i) {
    const std::size_t r = a.result.size() - s.size() + i;
    const bool free =
        s.size() <= a.result.size() && s[i] == a.result[r] && a.result_labels[r] < kIndex;
    of_values.push_back(free ? a.result_labels[r] : kUnsharded);
  }
  p.inputs.push_back(of_values);
  Plan plan = solve(p);
  const ShardSpec& spec = *plan.inputs[0];
  if (std::ranges::none_of(a.dims, [&](int d) { return spec.is_sharded(d); })) return plan;
  Shape local = a.result;
  for (std::size_t i = 0; i < local.size(); ++i)
    if (a.result_labels[i] < kIndex) local[i] = spec.local_shape()[a.result_labels[i]];
  const auto parts = mapped(a.dims, [&](int d) { return part_of(spec, d); });
  plan.local = [dims = a.dims, parts, local, at = a.at, count = a.broadcast.size()](
                   const OperatorHandle& op, Stack stack) {
    auto given = at::broadcast_tensors(
        mapped(dims, [&](int d) { return stack[1].toListRef()[d].toTensor(); }));
    at::Tensor mine;
    for (std::size_t i = 0; i < dims.size(); ++i) {
      parts[i].check(given[i], "index_put", true);
      given[i] = parts[i].global(given[i].reshape(-1));
      const at::Tensor m = parts[i].mine(given[i]);
      mine = mine.defined() ? mine.logical_and(m) : m;
    }
    const at::Tensor positions = mine.nonzero().view(-1);
    c10::List<std::optional<at::Tensor>> list;
    for (int d = 0; d <= dims.back(); ++d) {
      const auto it = std::ranges::find(dims, d);
      const auto i = static_cast<std::size_t>(it - dims.begin());
      list.push_back(it == dims.end() ? std::nullopt
                                      : std::optional<at::Tensor>(
                                            given[i].index_select(0, positions) - parts[i].begin));
    }
    // The dims of the index are flattened.
    at::Tensor v = stack[2].toTensor().expand(local);
    v = count == 0 ? v.unsqueeze(at) : v.flatten(at, at + static_cast<std::int64_t>(count) - 1);
    stack[1] = list;
    stack[2] = v.index_select(at, positions);
    op.callBoxed(stack);
    return stack;
  };
  return plan;
}

const AtStart registered([] {
  register_rule("aten::index.Tensor", index);
  register_rules(
      {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_index_put_impl"},
      index_put);
});

}  // namespace
}  // namespace tessera::detail::advanced_index_rules
