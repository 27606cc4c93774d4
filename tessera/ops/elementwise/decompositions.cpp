// Operators that libtorch implements in one kernel, written as others that have rules, for sharded
// tensors alone.

#include <ATen/ATen.h>
#include <torch/library.h>

#include "tessera/ops/rules/field_map.h"
#include "tessera/ops/rules/windowed.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail {

namespace {

// view_copy and its kin: the view, copied.
struct CopyOfView final : c10::OperatorKernel {
  explicit CopyOfView(c10::OperatorHandle v) : view(std::move(v)) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
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
  c10::OperatorHandle view;
};

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
        const c10::SymInt at = index < 0 ? index + t.sym_size(dim) : index;
        return t.slice_symint(dim, at, at + 1, 1);
      },
      source.unsqueeze(dim < 0 ? dim + self.dim() : dim));
}

at::Tensor count_nonzero(const at::Tensor& self, at::IntArrayRef dim) {
  return self.ne(0).sum(dim);
}
at::Tensor count_nonzero_dim(const at::Tensor& self, std::optional<std::int64_t> dim) {
  return dim ? self.ne(0).sum(*dim) : self.ne(0).sum();
}
at::Tensor nansum(const at::Tensor& self, at::OptionalIntArrayRef dim, bool keepdim,
                  std::optional<at::ScalarType> dtype) {
  return at::where(self.isnan(), at::zeros_like(self), self).sum(dim, keepdim, dtype);
}
std::tuple<at::Tensor, at::Tensor> aminmax(const at::Tensor& self, std::optional<std::int64_t> dim,
                                           bool keepdim) {
  if (dim) return {self.amin(*dim, keepdim), self.amax(*dim, keepdim)};
  std::vector<std::int64_t> all;
  for (std::int64_t d = 0; d < self.dim(); ++d) all.push_back(d);
  return {self.amin(all, keepdim), self.amax(all, keepdim)};
}
at::Tensor dist(const at::Tensor& self, const at::Tensor& other, const at::Scalar& p) {
  return at::norm(self - other, p);
}
bool allclose(const at::Tensor& self, const at::Tensor& other, double rtol, double atol,
              bool equal_nan) {
  return at::isclose(self, other, rtol, atol, equal_nan).all().item<bool>();
}
at::Tensor rot90(const at::Tensor& self, std::int64_t k, at::IntArrayRef dims) {
  TORCH_CHECK(dims.size() == 2, "expected total rotation dims == 2, but got dims = ", dims.size());
  switch (((k % 4) + 4) % 4) {
    case 1:
      return self.flip({dims[1]}).transpose_(dims[0], dims[1]);
    case 2:
      return self.flip(dims);
    case 3:
      return self.flip({dims[0]}).transpose_(dims[0], dims[1]);
    default:
      return self.clone(at::MemoryFormat::Contiguous);
  }
}
at::Tensor addbmm(const at::Tensor& self, const at::Tensor& a, const at::Tensor& b,
                  const at::Scalar& beta, const at::Scalar& alpha) {
  // first in the sum: the result lies in memory as it does
  const at::Tensor product = at::bmm(a, b).sum(0) * alpha;
  return beta.equal(0) ? product : product + self * beta;
}

at::Tensor addmv(const at::Tensor& self, const at::Tensor& a, const at::Tensor& b,
                 const at::Scalar& beta, const at::Scalar& alpha) {
  const at::Tensor product = at::mv(a, b) * alpha;
  return beta.equal(0) ? product : product + self * beta;
}

// `factor` divides the dim, which is about to be split: cuts inside of what stays together go to
// its nearest end, which moves less than gathering the dim does.
at::Tensor cut_at_multiples(const char* name, const at::Tensor& t, std::int64_t dim,
                            std::int64_t factor) {
  const ShardSpec own = spec(t);
  const auto d = static_cast<int>(dim + t.dim());
  if (!is_cut(own, d)) return t;
  return laid_out(name, "self", t,
                  with_parts(own, {{d, scaled(in_units(own.dim(d).partition, factor), factor)}}));
}

// [.., C r r, H, W] -> [.., C, H r, W r].
at::Tensor pixel_shuffle(const at::Tensor& self, std::int64_t r) {
  TORCH_CHECK(self.dim() >= 3 && r > 0 && self.size(-3) % (r * r) == 0, "pixel_shuffle: channels ",
              self.sizes(), " and factor ", r);
  const auto lead = self.sizes().slice(0, self.dim() - 3).vec();
  auto split = lead, joined = lead;
  const auto c = self.size(-3) / (r * r), h = self.size(-2), w = self.size(-1);
  for (const auto n : {c, r, r, h, w}) split.push_back(n);
  for (const auto n : {c, h * r, w * r}) joined.push_back(n);
  std::vector<std::int64_t> order(lead.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  const auto n = static_cast<std::int64_t>(lead.size());
  for (const auto d : {0, 3, 1, 4, 2}) order.push_back(n + d);
  return cut_at_multiples("pixel_shuffle", self, -3, r * r)
      .reshape(split)
      .permute(order)
      .reshape(joined);
}
at::Tensor pixel_unshuffle(const at::Tensor& self, std::int64_t r) {
  TORCH_CHECK(self.dim() >= 3 && r > 0 && self.size(-2) % r == 0 && self.size(-1) % r == 0,
              "pixel_unshuffle: ", self.sizes(), " and factor ", r);
  const auto lead = self.sizes().slice(0, self.dim() - 3).vec();
  auto split = lead, joined = lead;
  const auto c = self.size(-3), h = self.size(-2) / r, w = self.size(-1) / r;
  for (const auto n : {c, h, r, w, r}) split.push_back(n);
  for (const auto n : {c * r * r, h, w}) joined.push_back(n);
  std::vector<std::int64_t> order(lead.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  const auto n = static_cast<std::int64_t>(lead.size());
  for (const auto d : {0, 2, 4, 1, 3}) order.push_back(n + d);
  const at::Tensor rows = cut_at_multiples("pixel_unshuffle", self, -2, r);
  return cut_at_multiples("pixel_unshuffle", rows, -1, r)
      .reshape(split)
      .permute(order)
      .reshape(joined);
}
at::Tensor channel_shuffle(const at::Tensor& self, std::int64_t groups) {
  TORCH_CHECK(self.dim() > 2 && groups > 0 && self.size(1) % groups == 0,
              "channel_shuffle: channels of ", self.sizes(), " and groups ", groups);
  auto split = self.sizes().vec();
  split[1] = self.size(1) / groups;
  split.insert(split.begin() + 1, groups);
  return self.reshape(split).transpose(1, 2).contiguous().reshape(self.sizes());
}

// One direction of one layer of an LSTM. The gates of all steps are computed at once, as far as
// they come from the input.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> mkldnn_rnn_layer(
    const at::Tensor& input, const at::Tensor& weight_input, const at::Tensor& weight_hidden,
    const at::Tensor& bias_input, const at::Tensor& bias_hidden, const at::Tensor& hx,
    const at::Tensor& cx, bool reverse, at::IntArrayRef batch_sizes, std::int64_t mode,
    std::int64_t, std::int64_t, bool has_biases, bool, bool, bool) {
  constexpr std::int64_t kLstm = 2;
  TORCH_CHECK(
      mode == kLstm && batch_sizes.empty(),
      "mkldnn_rnn_layer of sharded tensors: only of an LSTM, of sequences that are not packed");
  const auto gates = [&](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    return has_biases ? at::linear(x, weight, bias) : at::linear(x, weight);
  };
  const std::vector<at::Tensor> of_input = gates(input, weight_input, bias_input).unbind(0);
  std::vector<at::Tensor> output(of_input.size());
  at::Tensor h = hx, c = cx;
  for (std::size_t i = 0; i < output.size(); ++i) {
    const std::size_t step = reverse ? output.size() - 1 - i : i;
    const auto g = (of_input[step] + gates(h, weight_hidden, bias_hidden)).chunk(4, -1);
    c = g[1].sigmoid() * c + g[0].sigmoid() * g[2].tanh();
    h = g[3].sigmoid() * c.tanh();
    output[step] = h;
  }
  return {at::stack(output), h, c, at::empty({0}, at::kByte)};
}

void implement_decompositions(torch::Library& m) {
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
                           "view",
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
    m.impl(copy.c_str(),
           torch::CppFunction::makeFromBoxedFunctor(std::make_unique<CopyOfView>(view)));
  }
  m.impl("narrow_copy", narrow_copy);
  m.impl("slice_scatter", slice_scatter);
  m.impl("select_scatter", select_scatter);
  m.impl("count_nonzero.dim_IntList", count_nonzero);
  m.impl("count_nonzero", count_nonzero_dim);
  m.impl("nansum", nansum);
  m.impl("aminmax", aminmax);
  m.impl("dist", dist);
  m.impl("allclose", allclose);
  m.impl("rot90", rot90);
  m.impl("addbmm", addbmm);
  m.impl("addmv", addmv);
  m.impl("pixel_shuffle", pixel_shuffle);
  m.impl("pixel_unshuffle", pixel_unshuffle);
  m.impl("channel_shuffle", channel_shuffle);
  m.impl("mkldnn_rnn_layer", mkldnn_rnn_layer);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse2, m) { implement_decompositions(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse2, m) { implement_decompositions(m); }

}  // namespace tessera::detail
