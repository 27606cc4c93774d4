// Elements picked and written by index. Indices speak of the global tensor. Along a sharded dim
// each rank deals with those that fall into its part: it picks zeros for the others, so that the
// result is a partial sum, or leaves them to the ranks that own them. Nothing but indices and what
// is picked or written moves.

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/broadcast_tensors.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "tessera/base/text.h"
#include "tessera/ops/rules/labels.h"
#include "tessera/tensor/dispatch/rule.h"
#include "tessera/tensor/errors.h"

namespace tessera::detail {

namespace {

using Shape = std::vector<std::int64_t>;
constexpr int kIndex = 100;  // labels of the index' own dims: kIndex, kIndex + 1, ...

// This rank's part of a dim of the global tensor.
struct Part {
  std::int64_t begin, size, extent;

  void check(const at::Tensor& index, const char* op) const {
    if (index.numel() == 0) return;
    const bool ok = index.ge(-extent).logical_and(index.lt(extent)).all().item<bool>();
    TORCH_CHECK_INDEX(ok, op, ": an index is out of range for a dim of size ", extent);
  }
  // Negative ones count from the end.
  at::Tensor global(const at::Tensor& index) const {
    return at::where(index.lt(0), index + extent, index);
  }
  at::Tensor mine(const at::Tensor& global_index) const {
    return global_index.ge(begin).logical_and(global_index.lt(begin + size));
  }
};

Part part_of(const ShardSpec& spec, int d) {
  return {spec.local_offset()[d], spec.local_shape()[d], spec.shape()[d]};
}

Labels except(int n, int d, int label) {
  Labels labels = all_labels(n);
  labels[d] = label;
  return labels;
}

// `picked` where `mine` (the index' shape, at dim `at` of the result), zero elsewhere.
at::Tensor masked(const at::Tensor& picked, const at::Tensor& mine, std::int64_t at) {
  Shape shape(picked.dim(), 1);
  for (std::int64_t i = 0; i < mine.dim(); ++i) shape[at + i] = mine.size(i);
  return picked.masked_fill(mine.logical_not().view(shape), 0);
}

// ---- picking ----

Plan index_select(const OpCall& call) {
  const TensorInfo &x = *call.find("self"), &index = *call.find("index");
  const int n = x.spec.dims();
  if (n == 0 || index.spec.dims() == 0) return on_whole(call);
  const int d = static_cast<int>(normal_dim(call.integer("dim"), n));
  LabelProblem p(call);
  p.inputs = {all_labels(n), {kIndex}};
  p.outputs = {except(n, d, kIndex)};
  Shape shape = x.spec.shape();
  shape[d] = index.spec.shape()[0];
  p.output_shapes = {shape};
  p.contract = {d};
  p.linear = LabelProblem::Linear::one;
  p.linear_in = {0};
  Plan plan = solve(p);
  if (!plan.inputs[0]->is_sharded(d)) return plan;
  plan.local = [d, part = part_of(*plan.inputs[0], d), local = plan.outputs[0].spec.local_shape()](
                   const c10::OperatorHandle&, torch::jit::Stack a) {
    const at::Tensor &t = a[0].toTensor(), &given = a[2].toTensor();
    part.check(given, "index_select");
    if (part.size == 0) return torch::jit::Stack{t.new_zeros(local)};
    const at::Tensor at = part.global(given);
    return torch::jit::Stack{
        masked(t.index_select(d, (at - part.begin).clamp(0, part.size - 1)), part.mine(at), d)};
  };
  return plan;
}

// Dims in which the index is as large as the tensors are free; in the others positions of index and
// tensor would be cut apart.
Labels aligned_labels(const OpCall& call, int d) {
  const TensorInfo& index = *call.find("index");
  Labels labels = all_labels(index.spec.dims());
  for (int i = 0; i < index.spec.dims(); ++i) {
    for (const TensorInfo& t : call.tensors()) {
      if (i != d && t.spec.shape()[i] != index.spec.shape()[i]) labels[i] = kWhole;
    }
  }
  return labels;
}

Plan gather(const OpCall& call) {
  const TensorInfo &x = *call.find("self"), &index = *call.find("index");
  const int n = x.spec.dims();
  if (n == 0 || index.spec.dims() != n) return on_whole(call);
  const int d = static_cast<int>(normal_dim(call.integer("dim"), n));
  const Labels labels = aligned_labels(call, d);
  LabelProblem p(call);
  Labels of_index = labels;
  of_index[d] = kIndex;
  p.inputs = {labels, of_index};
  p.outputs = {of_index};
  p.output_shapes = {index.spec.shape()};
  p.contract = {d};
  p.linear = LabelProblem::Linear::one;
  p.linear_in = {0};
  Plan plan = solve(p);
  if (!plan.inputs[0]->is_sharded(d)) return plan;
  plan.local = [d, part = part_of(*plan.inputs[0], d)](const c10::OperatorHandle&,
                                                       torch::jit::Stack a) {
    const at::Tensor &t = a[0].toTensor(), &at = a[2].toTensor();
    TORCH_CHECK_INDEX(
        at.numel() == 0 || at.ge(0).logical_and(at.lt(part.extent)).all().item<bool>(),
        "gather: an index is out of range");
    if (part.size == 0) return torch::jit::Stack{t.new_zeros(at.sizes())};
    return torch::jit::Stack{t.gather(d, (at - part.begin).clamp(0, part.size - 1))
                                 .masked_fill(part.mine(at).logical_not(), 0)};
  };
  return plan;
}

Plan embedding(const OpCall& call) {
  const TensorInfo &weight = *call.find("weight"), &indices = *call.find("indices");
  const int n = indices.spec.dims();
  LabelProblem p(call);
  p.inputs = {{kIndex, n}, all_labels(n)};
  p.outputs = {all_labels(n + 1)};
  Shape shape = indices.spec.shape();
  shape.push_back(weight.spec.shape()[1]);
  p.output_shapes = {shape};
  p.contract = {kIndex};
  p.linear = LabelProblem::Linear::one;
  p.linear_in = {0};
  Plan plan = solve(p);
  if (!plan.inputs[0]->is_sharded(0)) return plan;
  plan.local = [part = part_of(*plan.inputs[0], 0), local = plan.outputs[0].spec.local_shape()](
                   const c10::OperatorHandle&, torch::jit::Stack a) {
    const at::Tensor &t = a[0].toTensor(), &at = a[1].toTensor();
    TORCH_CHECK_INDEX(
        at.numel() == 0 || at.ge(0).logical_and(at.lt(part.extent)).all().item<bool>(),
        "embedding: an index is out of range");
    if (part.size == 0) return torch::jit::Stack{t.new_zeros(local)};
    const at::Tensor rows =
        t.index_select(0, (at - part.begin).clamp(0, part.size - 1).reshape(-1)).view(local);
    return torch::jit::Stack{masked(rows, part.mine(at), 0)};
  };
  return plan;
}

// ---- advanced indexing ----

bool is_mask(const TensorInfo& t) { return t.dtype == at::kBool || t.dtype == at::kByte; }

// Which dims of self a list of index tensors covers, and the shape and place of what they make.
struct Advanced {
  std::vector<const TensorInfo*> indices;
  std::vector<int> dims;  // of self, one for each index
  bool masks = false;
  Shape broadcast;
  int at = 0;  // where the broadcast dims stand in the result
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
      const Shape& s = t.spec.shape();
      if (s.size() > broadcast.size())
        broadcast.insert(broadcast.begin(), s.size() - broadcast.size(), 1);
      for (std::size_t i = 0; i < s.size(); ++i) {
        auto& n = broadcast[broadcast.size() - s.size() + i];
        if (s[i] != 1) n = s[i];
      }
    }
    bool adjacent = true;
    for (std::size_t i = 1; i < dims.size(); ++i) adjacent &= dims[i] == dims[i - 1] + 1;
    at = adjacent && !dims.empty() ? dims.front() : 0;
    for (int d = 0; d < x.spec.dims(); ++d) {
      if (static_cast<int>(result.size()) == at) insert();
      if (covers(d)) continue;
      result.push_back(x.spec.shape()[d]);
      result_labels.push_back(d);
    }
    if (!inserted_) insert();
  }
  bool covers(int d) const { return std::find(dims.begin(), dims.end(), d) != dims.end(); }

 private:
  void insert() {
    if (inserted_) return;
    inserted_ = true;
    for (std::size_t i = 0; i < broadcast.size(); ++i) {
      result.push_back(broadcast[i]);
      result_labels.push_back(kIndex + static_cast<int>(i));
    }
  }
  bool inserted_ = false;
};

Plan index(const OpCall& call) {
  const TensorInfo& x = *call.find("self");
  const Advanced a(call);
  if (a.masks || a.indices.empty() || x.argument != 0) return on_whole(call);
  const int n = x.spec.dims();
  LabelProblem p(call);
  Labels self = all_labels(n);
  if (a.dims.size() > 1) {
    for (const int d : a.dims) self[d] = kWhole;
  } else {
    p.contract = {a.dims[0]};
  }
  p.inputs = {self};
  for (const TensorInfo* t : a.indices) {
    const Shape& s = t->spec.shape();
    Labels labels;
    for (std::size_t i = 0; i < s.size(); ++i) {
      const std::size_t b = a.broadcast.size() - s.size() + i;
      labels.push_back(s[i] == a.broadcast[b] ? kIndex + static_cast<int>(b) : kWhole);
    }
    p.inputs.push_back(std::move(labels));
  }
  p.outputs = {a.result_labels};
  p.output_shapes = {a.result};
  p.linear = LabelProblem::Linear::one;
  p.linear_in = {0};
  Plan plan = solve(p);
  if (const auto* out = call.outputs(); out && (*out)[0].shape == a.result)
    plan.outputs[0].strides = (*out)[0].strides;
  const int d = a.dims[0];
  if (a.dims.size() > 1 || !plan.inputs[0]->is_sharded(d)) return plan;
  plan.local = [d, part = part_of(*plan.inputs[0], d), local = plan.outputs[0].spec.local_shape()](
                   const c10::OperatorHandle&, torch::jit::Stack s) {
    const at::Tensor t = s[0].toTensor(), given = s[1].toListRef()[d].toTensor();
    part.check(given, "index");
    if (part.size == 0) return torch::jit::Stack{t.new_zeros(local)};
    const at::Tensor at = part.global(given);
    const at::Tensor rows =
        t.index_select(d, (at - part.begin).clamp(0, part.size - 1).reshape(-1)).view(local);
    return torch::jit::Stack{masked(rows, part.mine(at), d)};
  };
  return plan;
}

// ---- writing ----

Plan index_put(const OpCall& call) {
  const TensorInfo &x = *call.find("self"), &values = *call.find("values");
  const int n = x.spec.dims();
  const Advanced a(call);
  LabelProblem p(call);
  p.outputs = {all_labels(n)};
  p.output_shapes = {x.spec.shape()};
  if (a.masks) {
    // One value where the mask says: the mask is cut as the dims that it covers.
    const bool one = a.indices.size() == 1 && values.spec.numel() == 1;
    if (!one && !call.in_place()) return on_whole(call);
    p.inputs = {one ? all_labels(n) : Labels(n, kWhole)};
    for (const TensorInfo* t : a.indices) {
      Labels labels(t->spec.dims(), kWhole);
      for (int i = 0; one && i < t->spec.dims(); ++i) labels[i] = a.dims[0] + i;
      p.inputs.push_back(std::move(labels));
    }
    p.inputs.push_back(Labels(values.spec.dims(), kWhole));
    if (!one) p.outputs = {Labels(n, kWhole)};
    return solve(p);
  }
  p.inputs = {all_labels(n)};
  for (const TensorInfo* t : a.indices) p.inputs.push_back(Labels(t->spec.dims(), kWhole));
  Labels of_values;
  const Shape& s = values.spec.shape();
  for (std::size_t i = 0; i < s.size(); ++i) {
    const std::size_t r = a.result.size() - s.size() + i;
    const bool free =
        s.size() <= a.result.size() && s[i] == a.result[r] && a.result_labels[r] < kIndex;
    of_values.push_back(free ? a.result_labels[r] : kWhole);
  }
  p.inputs.push_back(of_values);
  Plan plan = solve(p);
  const ShardSpec& spec = *plan.inputs[0];
  bool cut = false;
  for (const int d : a.dims) cut |= spec.is_sharded(d);
  if (!cut) return plan;
  Shape local = a.result;
  for (std::size_t i = 0; i < local.size(); ++i) {
    if (a.result_labels[i] < kIndex) local[i] = spec.local_shape()[a.result_labels[i]];
  }
  std::vector<Part> parts;
  for (const int d : a.dims) parts.push_back(part_of(spec, d));
  plan.local = [dims = a.dims, parts, local, at = a.at, count = a.broadcast.size()](
                   const c10::OperatorHandle& op, torch::jit::Stack stack) {
    std::vector<at::Tensor> given;
    for (const int d : dims) given.push_back(stack[1].toListRef()[d].toTensor());
    given = at::broadcast_tensors(given);
    at::Tensor mine;
    for (std::size_t i = 0; i < dims.size(); ++i) {
      parts[i].check(given[i], "index_put");
      given[i] = parts[i].global(given[i].reshape(-1));
      const at::Tensor m = parts[i].mine(given[i]);
      mine = mine.defined() ? mine.logical_and(m) : m;
    }
    const at::Tensor positions = mine.nonzero().view(-1);
    c10::List<std::optional<at::Tensor>> list;
    for (int d = 0; d <= dims.back(); ++d) {
      const auto it = std::find(dims.begin(), dims.end(), d);
      const auto i = static_cast<std::size_t>(it - dims.begin());
      list.push_back(it == dims.end() ? std::nullopt
                                      : std::optional<at::Tensor>(
                                            given[i].index_select(0, positions) - parts[i].begin));
    }
    // The dims of the index become one.
    at::Tensor v = stack[2].toTensor().expand(local);
    v = count == 0 ? v.unsqueeze(at) : v.flatten(at, at + static_cast<std::int64_t>(count) - 1);
    stack[1] = list;
    stack[2] = v.index_select(at, positions);
    op.callBoxed(stack);
    return stack;
  };
  return plan;
}

// index_add, index_copy, index_fill, index_reduce: whole slices along a dim.
Plan slices(const OpCall& call, bool adds) {
  const TensorInfo &x = *call.find("self"), &index = *call.find("index");
  const TensorInfo* source = call.find("source");
  const int n = x.spec.dims();
  if (n == 0) return on_whole(call);
  const int d = static_cast<int>(normal_dim(call.integer("dim"), n));
  const bool sums = adds && index.spec.dims() == 1;
  LabelProblem p(call);
  for (const TensorInfo& t : call.tensors()) {
    if (&t == &x) {
      p.inputs.push_back(all_labels(n));
    } else if (&t == source && t.spec.dims() == n) {
      p.inputs.push_back(except(n, d, sums ? kIndex : kWhole));
    } else {
      p.inputs.push_back(Labels(t.spec.dims(), &t == &index && sums ? kIndex : kWhole));
    }
  }
  p.outputs = {all_labels(n)};
  p.output_shapes = {x.spec.shape()};
  if (sums) {
    p.contract = {kIndex};
    p.additive = {0};
  }
  Plan plan = solve(p);
  plan.local = [d, part = part_of(*plan.inputs[0], d), cut = plan.inputs[0]->is_sharded(d),
                has_source = source != nullptr,
                in_place = call.in_place()](const c10::OperatorHandle& op, torch::jit::Stack a) {
    if (cut) {
      const at::Tensor given = a[2].toTensor().reshape(-1);
      part.check(given, "index of slices");
      const at::Tensor at = part.global(given), positions = part.mine(at).nonzero().view(-1);
      a[2] = at.index_select(0, positions) - part.begin;
      if (has_source) a[3] = a[3].toTensor().index_select(d, positions);
    }
    const at::Tensor self = a[0].toTensor();
    // some kernels expect a slice
    if (a[2].toTensor().numel() == 0 || self.numel() == 0)
      return torch::jit::Stack{in_place ? self : self.clone()};
    op.callBoxed(a);
    return a;
  };
  return plan;
}

// Elements along a dim. Those of other ranks go into a slice behind the local one, which is cut
// off.
Plan scatter(const OpCall& call, bool adds) {
  const TensorInfo &x = *call.find("self"), &index = *call.find("index");
  const TensorInfo* src = call.find("src");
  const int n = x.spec.dims();
  bool same_dims = n > 0;
  for (const TensorInfo& t : call.tensors())
    same_dims &= t.spec.dims() == n || (&t != &x && &t != &index && &t != src);
  if (!same_dims) return on_whole(call);
  const int d = static_cast<int>(normal_dim(call.integer("dim"), n));
  const Labels labels = aligned_labels(call, d);
  const bool sums = adds && src && src->spec.shape()[d] == index.spec.shape()[d];
  LabelProblem p(call);
  for (const TensorInfo& t : call.tensors()) {
    Labels own = &t == &x || &t == &index || &t == src ? labels : Labels(t.spec.dims(), kWhole);
    if (&t == &index || &t == src) own[d] = sums ? kIndex : kWhole;
    p.inputs.push_back(std::move(own));
  }
  p.outputs = {labels};
  p.output_shapes = {x.spec.shape()};
  if (sums) {
    p.contract = {kIndex};
    p.additive = {0};
  }
  Plan plan = solve(p);
  if (!plan.inputs[0]->is_sharded(d)) return plan;
  plan.local = [d, part = part_of(*plan.inputs[0], d), in_place = call.in_place()](
                   const c10::OperatorHandle& op, torch::jit::Stack a) {
    const at::Tensor t = a[0].toTensor(), at = a[2].toTensor();
    TORCH_CHECK_INDEX(
        at.numel() == 0 || at.ge(0).logical_and(at.lt(part.extent)).all().item<bool>(),
        "scatter: an index is out of range");
    Shape slot = t.sizes().vec();
    slot[d] = 1;
    a[0] = at::cat({t, t.new_zeros(slot)}, d);
    a[2] = at::where(part.mine(at), at - part.begin, part.size);
    op.callBoxed(a);
    const at::Tensor result = a[0].toTensor().narrow(d, 0, part.size);
    a[0] = in_place ? t.copy_(result) : result;
    return a;
  };
  return plan;
}

// This rank's part of what has the global shape.
at::Tensor part_of_box(at::Tensor t, const Shape& offset, const Shape& local) {
  for (std::size_t d = 0; d < local.size(); ++d)
    t = t.narrow(static_cast<std::int64_t>(d), offset[d], local[d]);
  return t;
}

// The first input is written to, wherever it is cut; all others are whole.
Plan written_part(const OpCall& call) {
  LabelProblem p(call);
  for (const TensorInfo& t : call.tensors())
    p.inputs.push_back(t.argument == 0 ? all_labels(t.spec.dims()) : Labels(t.spec.dims(), kWhole));
  p.outputs = {p.inputs[0]};
  p.output_shapes = {call.tensor(0).spec.shape()};
  return solve(p);
}

const TensorInfo& given(const OpCall& call, const char* name) { return *call.find(name); }

// What libtorch refuses, before any rank begins.
void require_type(const OpCall& call, const char* name, at::ScalarType type) {
  if (const auto got = given(call, name).dtype; got != type)
    throw InvalidArgument(concat(call.name(), ": ", name, " is ", c10::toString(got),
                                 ", and must be ", c10::toString(type), "; convert it"));
}

// The elements of the source in their order, where the mask says: how many a rank's part is beyond,
// the whole mask tells.
Plan masked_scatter(const OpCall& call) {
  const TensorInfo* x = call.find("self");
  const auto* out = call.in_place() ? nullptr : call.outputs();
  if (!x || !call.find("mask") || !call.find("source") ||
      (out && (*out)[0].shape != x->spec.shape()))
    return on_whole(call);
  require_type(call, "mask", at::kBool);
  require_type(call, "source", x->dtype);
  Plan plan = written_part(call);
  const ShardSpec& spec = *plan.inputs[0];
  plan.local = [shape = spec.shape(), offset = spec.local_offset(), local = spec.local_shape(),
                in_place = call.in_place()](const c10::OperatorHandle&, torch::jit::Stack a) {
    const at::Tensor t = a[0].toTensor(), mask = a[1].toTensor().expand(shape),
                     source = a[2].toTensor().reshape(-1);
    const at::Tensor before = mask.reshape(-1).cumsum(0) - 1;
    TORCH_CHECK(before.numel() == 0 || before[-1].item<std::int64_t>() < source.numel(),
                "masked_scatter: the mask takes more elements than the ", source.numel(),
                " of the source");
    if (source.numel() == 0 || t.numel() == 0) return torch::jit::Stack{in_place ? t : t.clone()};
    const at::Tensor which = part_of_box(before.view(shape), offset, local).clamp_min(0);
    const at::Tensor result = at::where(part_of_box(mask, offset, local),
                                        source.index_select(0, which.reshape(-1)).view(local), t);
    return torch::jit::Stack{in_place ? t.copy_(result) : result};
  };
  return plan;
}

// By the index into the flattened tensor.
Plan put(const OpCall& call) {
  if (call.tensors().size() != 3) return on_whole(call);
  require_type(call, "index", at::kLong);
  require_type(call, "source", given(call, "self").dtype);
  if (const auto n = given(call, "index").spec.numel(), values = given(call, "source").spec.numel();
      n != values)
    throw InvalidArgument(
        concat(call.name(), ": ", values, " values for ", n, " indices; give one an index"));
  Plan plan = written_part(call);
  const ShardSpec& spec = *plan.inputs[0];
  plan.local = [shape = spec.shape(), offset = spec.local_offset(), local = spec.local_shape(),
                extent = spec.numel(),
                in_place = call.in_place()](const c10::OperatorHandle&, torch::jit::Stack a) {
    const at::Tensor t = in_place ? a[0].toTensor() : a[0].toTensor().clone();
    const Part all{0, extent, extent};
    at::Tensor rest = a[1].toTensor().reshape(-1);
    all.check(rest, "put");
    rest = all.global(rest);
    at::Tensor mine = at::ones_like(rest, at::kBool), own = at::zeros_like(rest);
    std::int64_t stride = 1;
    for (std::size_t d = shape.size(); d-- > 0;) {
      const at::Tensor i = rest.remainder(shape[d]) - offset[d];
      mine = mine.logical_and(i.ge(0)).logical_and(i.lt(local[d]));
      own = own + i * stride;
      rest = rest.floor_divide(shape[d]);
      stride *= local[d];
    }
    const at::Tensor positions = mine.nonzero().view(-1);
    if (positions.numel() > 0)
      t.put_(own.index_select(0, positions), a[2].toTensor().reshape(-1).index_select(0, positions),
             a[3].toBool());
    return torch::jit::Stack{t};
  };
  return plan;
}

Plan diagonal_scatter(const OpCall& call) {
  const TensorInfo& x = *call.find("self");
  const int n = x.spec.dims();
  const auto a = normal_dim(call.integer("dim1"), n), b = normal_dim(call.integer("dim2"), n);
  LabelProblem p(call);
  Labels self = all_labels(n), src;
  self[a] = self[b] = kWhole;
  for (int d = 0; d < n; ++d) {
    if (d != a && d != b) src.push_back(d);
  }
  src.push_back(kWhole);
  p.inputs = {self, src};
  p.outputs = {self};
  p.output_shapes = {x.spec.shape()};
  return solve(p);
}

const bool indexing_registered = [] {
  register_rule("aten::index_select", index_select);
  register_rule("aten::gather", gather);
  register_rule("aten::embedding", embedding);
  register_rule("aten::index.Tensor", index);
  for (const char* op :
       {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_index_put_impl"})
    register_rule(op, index_put);
  register_rule("aten::index_add", [](const OpCall& c) { return slices(c, true); });
  for (const char* op : {"aten::index_copy", "aten::index_fill", "aten::index_reduce"}) {
    register_rule(op, [](const OpCall& c) { return slices(c, false); });
  }
  register_rule("aten::scatter_add", [](const OpCall& c) { return scatter(c, true); });
  for (const char* op : {"aten::scatter", "aten::scatter_reduce"})
    register_rule(op, [](const OpCall& c) { return scatter(c, false); });
  register_rule("aten::masked_scatter", masked_scatter);
  register_rule("aten::put", put);
  register_rule("aten::diagonal_scatter", diagonal_scatter);
  return true;
}();

}  // namespace

}  // namespace tessera::detail
