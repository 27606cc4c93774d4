// Copies of views (view_copy and the like) and copies with a slice written (slice_scatter and the
// like).

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/views/detail/view_parts.h"

namespace tessera::detail::view_copies_rules {
namespace {

// view_copy and the like: the view, copied.
struct CopyOfView final : c10::OperatorKernel {
  explicit CopyOfView(OperatorHandle v) : view(std::move(v)) {}
  void operator()(const OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
    view.callBoxed(stack);
    c10::IValue& made = stack->back();
    if (made.isTensor()) {
      made = made.toTensor().clone(at::MemoryFormat::Contiguous);
    } else {
      c10::List<at::Tensor> copies;
      for (const at::Tensor& t : made.toTensorVector())
        copies.push_back(t.clone(at::MemoryFormat::Contiguous));
      made = std::move(copies);
    }
  }
  OperatorHandle view;
};

// Any memory order will do, as of plain tensors.
at::Tensor view_copy(const at::Tensor& self, c10::SymIntArrayRef size) {
  return self.reshape_symint(size).clone(at::MemoryFormat::Contiguous);
}

at::Tensor narrow_copy(const at::Tensor& self, std::int64_t dim, c10::SymInt start,
                       c10::SymInt length) {
  return self.narrow_symint(dim, std::move(start), std::move(length))
      .clone(at::MemoryFormat::Contiguous);
}

// A copy of `self` in which the slice is `source`.
at::Tensor slice_scatter(const at::Tensor& self, const at::Tensor& source, std::int64_t dim,
                         std::optional<c10::SymInt> start, std::optional<c10::SymInt> end,
                         c10::SymInt step) {
  at::Tensor copy = self.clone(at::MemoryFormat::Preserve);
  const at::Tensor target =
      copy.slice_symint(dim, std::move(start), std::move(end), std::move(step));
  TORCH_CHECK(target.sizes() == source.sizes(),
              "expected src to have a size equal to the slice of self: ", target.sizes(), ", got ",
              source.sizes());
  target.copy_(source);
  return copy;
}
at::Tensor select_scatter(const at::Tensor& self, const at::Tensor& source, std::int64_t dim,
                          c10::SymInt index) {
  const at::Tensor row = source.unsqueeze(dim < 0 ? dim + self.dim() : dim);
  const c10::SymInt size = self.sym_size(dim);
  TORCH_CHECK_INDEX(index >= -size && index < size, "select_scatter: index ", index,
                    " of a dim of size ", size);
  const c10::SymInt at = index < 0 ? index + size : index;
  return slice_scatter(self, row, dim, at, at + 1, 1);
}

// ----
// Operators that autograd uses for the gradients of views.

// The shards along the dim that was sliced, of which the gradient only says where its elements lie.
// Even ones, if the slice may be of such; else what lies between the elements of two ranks belongs
// to the first, and what is around those of one rank to the ranks that even shards would give it.
Partition before_slicing(const Partition& slice, std::int64_t start, std::int64_t step,
                         std::int64_t extent) {
  Partition even = Partition::even(extent, slice.parts());
  if (kept(even, start, step, slice.extent()) == slice) return even;
  const Shape given = slice.sizes();
  const bool on_one = std::ranges::count_if(given, [](std::int64_t n) { return n > 0; }) == 1;
  const std::int64_t behind = start + (slice.extent() - 1) * step + 1;
  Shape sizes;
  std::int64_t at = 0;
  for (int i = 0; i < slice.parts(); ++i) {
    const std::int64_t end = slice.interval(i).end, as_even = even.interval(i).end;
    const bool before = end == 0, last = i + 1 == slice.parts();
    std::int64_t to = start + end * step;
    if (before) to = on_one ? std::min(as_even, start) : 0;
    if (end == slice.extent()) to = on_one && !last ? std::max(as_even, behind) : extent;
    sizes.push_back(std::max<std::int64_t>(to - at, 0));
    at = std::max(at, to);
  }
  return Partition(sizes);
}

Plan slice_backward(const OpCall& call) {
  const ShardSpec& g = call.tensor(0).spec;
  const Shape sizes = call.integers("input_sizes");
  const int d = normal_dim(call.integer("dim"), g.dims());
  const std::int64_t step = call.integer("step"), extent = sizes[d];
  const std::int64_t given = call.integer("start"), length = g.local_shape()[d];
  const std::int64_t start =
      std::clamp<std::int64_t>(given < 0 ? given + extent : given, 0, extent);
  std::vector<std::pair<int, Partition>> parts;
  if (g.is_sharded(d)) parts = {{d, before_slicing(g.dim(d).partition, start, step, extent)}};
  const ShardSpec out = mapped_spec(g, sizes, all_labels(g.dims()), true, parts);
  const std::int64_t first =
      g.is_sharded(d) ? local_start(out, d, start + g.local_offset()[d] * step, step, length)
                      : start;
  const std::int64_t end = length == 0 ? first : first + (length - 1) * step + 1;
  return {.outputs = {{out, contiguous_strides(sizes)}},
          .arguments = {{call.argument("input_sizes"), out.local_shape()},
                        {call.argument("start"), first},
                        {call.argument("end"), std::min(end, out.local_shape()[d])}}};
}

Plan with_input_sizes(const OpCall& call, const std::vector<int>& from, const std::set<int>& whole,
                      const std::vector<std::pair<int, Partition>>& parts = {}) {
  const Shape sizes = call.integers("input_sizes");
  const ShardSpec g = with_unsharded_dims(call.tensor(0).spec, whole);
  const ShardSpec out = mapped_spec(g, sizes, from, true, parts);
  return {.inputs = {g},
          .outputs = {{out, contiguous_strides(sizes)}},
          .arguments = {{call.argument("input_sizes"), out.local_shape()}}};
}

Plan select_backward(const OpCall& call) {
  const int n = static_cast<int>(call.integers("input_sizes").size());
  const int d = normal_dim(call.integer("dim"), n);
  std::vector<int> from;
  for (int i = 0; i < n; ++i) from.push_back(i == d ? -1 : i < d ? i : i - 1);
  return with_input_sizes(call, from, {});
}

Plan unfold_backward(const OpCall& call) {
  const int n = static_cast<int>(call.integers("input_sizes").size());
  const int d = normal_dim(call.integer("dim"), n);
  auto from = all_labels(n);
  const ShardSpec& g = call.tensor(0).spec;
  const std::int64_t size = call.integer("size"), step = call.integer("step");
  if (size > step || g.dims() != n + 1 || !g.is_sharded(d)) {
    from[d] = -1;
    return with_input_sizes(call, from, {d, n});
  }
  Plan plan = with_input_sizes(
      call, from, {n},
      {{d, rows_of_windows(g.dim(d).partition, step, call.integers("input_sizes")[d])}});
  // libtorch refuses rows that are too few for a window, though there is none here.
  if (plan.outputs[0].spec.local_shape()[d] < size)
    plan.local = [](const OperatorHandle&, Stack arguments) {
      return Stack{arguments[0].toTensor().new_zeros(arguments[1].toIntVector())};
    };
  return plan;
}

Plan diagonal_backward(const OpCall& call) {
  const int n = static_cast<int>(call.integers("input_sizes").size());
  const auto a = normal_dim(call.integer("dim1"), n), b = normal_dim(call.integer("dim2"), n);
  std::vector<int> from;
  int next = 0;
  for (int i = 0; i < n; ++i) from.push_back(i == a || i == b ? -1 : next++);
  return with_input_sizes(call, from, {n - 2});
}

// Those that have a form which copies.
constexpr const char* kViews =
    "alias expand permute select.int slice.Tensor split.Tensor split_with_sizes squeeze "
    "squeeze.dim squeeze.dims t transpose.int unbind.int unsqueeze unfold diagonal detach "
    "as_strided _conj view_as_real view_as_complex _neg_view";

const AtStart registered([] {
  TextReader views(kViews);
  for (std::string full; views >> full;) {
    const auto dot = full.find('.');
    const std::string base = full.substr(0, dot),
                      overload = dot == std::string::npos ? "" : full.substr(dot + 1);
    const std::string copy = base + "_copy" + (overload.empty() ? "" : "." + overload);
    const auto view =
        c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + base).c_str(), overload.c_str());
    register_decomposition(copy.c_str(), [&view] {
      return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<CopyOfView>(view));
    });
  }
  register_decomposition("view_copy", view_copy);
  register_decomposition("narrow_copy", narrow_copy);
  register_decomposition("slice_scatter", slice_scatter);
  register_decomposition("select_scatter", select_scatter);
  register_rule("aten::slice_backward", slice_backward);
  register_rule("aten::select_backward", select_backward);
  register_rule("aten::unfold_backward", unfold_backward);
  register_rule("aten::diagonal_backward", diagonal_backward);
});

}  // namespace
}  // namespace tessera::detail::view_copies_rules
