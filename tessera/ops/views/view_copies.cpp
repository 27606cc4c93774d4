// Copies of views (view_copy and the like) and copies with a slice written (slice_scatter and the
// like).

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <string>

#include "tessera/ops/rules/detail/rules.h"

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

at::Tensor written(const at::Tensor& self, const std::function<at::Tensor(const at::Tensor&)>& view,
                   const at::Tensor& source) {
  at::Tensor copy = self.clone(at::MemoryFormat::Preserve);
  const at::Tensor target = view(copy);
  TORCH_CHECK(target.sizes() == source.sizes(),
              "expected src to have a size equal to the slice of self: ", target.sizes(), ", got ",
              source.sizes());
  target.copy_(source);
  return copy;
}
at::Tensor slice_scatter(const at::Tensor& self, const at::Tensor& source, std::int64_t dim,
                         std::optional<c10::SymInt> start, std::optional<c10::SymInt> end,
                         c10::SymInt step) {
  return written(
      self, [&](const at::Tensor& t) { return t.slice_symint(dim, start, end, step); }, source);
}
at::Tensor select_scatter(const at::Tensor& self, const at::Tensor& source, std::int64_t dim,
                          c10::SymInt index) {
  return written(
      self,
      [&](const at::Tensor& t) {
        TORCH_CHECK_INDEX(index >= -t.sym_size(dim) && index < t.sym_size(dim),
                          "select_scatter: index ", index, " of a dim of size ", t.sym_size(dim));
        const c10::SymInt at = index < 0 ? index + t.sym_size(dim) : index;
        return t.slice_symint(dim, at, at + 1, 1);
      },
      source.unsqueeze(dim < 0 ? dim + self.dim() : dim));
}

const AtStart registered([] {
  for (const char* name : {"alias",
                           "expand",
                           "permute",
                           "select.int",
                           "slice.Tensor",
                           "split.Tensor",
                           "split_with_sizes",
                           "squeeze",
                           "squeeze.dim",
                           "squeeze.dims",
                           "t",
                           "transpose.int",
                           "unbind.int",
                           "unsqueeze",
                           "unfold",
                           "diagonal",
                           "detach",
                           "as_strided",
                           "_conj",
                           "view_as_real",
                           "view_as_complex",
                           "_neg_view"}) {
    const std::string full = name;
    const auto dot = full.find('.');
    const std::string base = full.substr(0, dot),
                      overload = dot == std::string::npos ? "" : full.substr(dot + 1);
    const std::string copy = (base == "_neg_view" ? "_neg_view_copy" : base + "_copy") +
                             (overload.empty() ? "" : "." + overload);
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
});

}  // namespace

}  // namespace tessera::detail::view_copies_rules
