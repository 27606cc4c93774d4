// Fourier transforms. A dim that is not sharded is transformed where it is. One that is sharded is
// first gathered by an all-to-all, in which another dim is sharded instead ("pencils"): so the data
// moves once per sharded dim, and no rank ever holds more than its share. The result stays as the
// last all-to-all left it; the inverse transform, which takes the dims in the opposite order,
// brings it back.

#include <ATen/TensorOperators.h>
#include <ATen/ops/_fft_c2c.h>
#include <ATen/ops/_fft_c2r.h>
#include <ATen/ops/_fft_r2c.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/view_as_real.h>

#include <tuple>

#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"

namespace tessera::detail::fft_rules {
namespace {

struct Step {
  enum class What : unsigned char { move, complex, from_real, to_real } what;
  Shape dims;
  ShardSpec from, to;
};

class Stages {
 public:
  Stages(const ShardSpec& start, Shape dims) : now_(start), left_(std::move(dims)) {}

  // Transforms every dim but `later`, in as few moves as there are sharded ones among them.
  void complex(std::int64_t later) {
    for (;;) {
      Shape ready, sharded;
      for (const auto d : left_)
        if (d != later) (now_.is_sharded(static_cast<int>(d)) ? sharded : ready).push_back(d);
      if (!ready.empty()) steps.push_back({Step::What::complex, ready, now_, now_});
      std::erase_if(left_, [&](auto d) { return std::ranges::find(ready, d) != ready.end(); });
      if (sharded.empty()) return;
      gather_dim(static_cast<int>(sharded[0]));
    }
  }

  void last(std::int64_t dim, Step::What what, std::int64_t extent) {
    if (now_.is_sharded(static_cast<int>(dim))) gather_dim(static_cast<int>(dim));
    Shape shape = now_.shape();
    shape[dim] = extent;
    std::vector<int> from;
    for (int d = 0; d < now_.dims(); ++d) from.push_back(d == static_cast<int>(dim) ? -1 : d);
    const ShardSpec to = mapped_spec(now_, shape, from, false);
    steps.push_back({what, {dim}, now_, to});
    now_ = to;
    std::erase(left_, dim);
  }

  const ShardSpec& now() const { return now_; }
  std::vector<Step> steps;

 private:
  // Another dim is sharded instead: one that will not be transformed any more, if there is one,
  // that is not sharded yet, and long.
  void gather_dim(int dim) {
    int best = -1;
    std::tuple<bool, bool, std::int64_t> most(false, false, -1);
    for (int d = 0; d < now_.dims(); ++d) {
      if (d == dim) continue;
      const bool done = std::ranges::find(left_, d) == left_.end();
      const std::tuple merit(done, !now_.is_sharded(d), now_.shape()[d]);
      if (merit > most) {
        most = merit;
        best = d;
      }
    }
    auto placements = now_.placements();
    for (Placement& p : placements)
      if (p.is_shard(dim)) p = best < 0 ? Replicate() : Shard(best);
    const ShardSpec to = now_.with_placements(placements);
    steps.push_back({Step::What::move, {}, now_, to});
    now_ = to;
  }

  ShardSpec now_;
  Shape left_;
};

Plan transform(const OpCall& call, Step::What kind) {
  const TensorInfo& x = call.tensor(0);
  const int n = x.spec.dims();
  Shape dims;
  for (const auto d : call.integers("dim")) dims.push_back(normal_dim(d, n));
  if (dims.empty()) throw ShardingError(call.name(), " of ", x.spec, " over no dims has no rule");
  const std::int64_t last = dims.back();
  const bool onesided = kind == Step::What::from_real && call.boolean("onesided");
  const std::int64_t before = x.spec.shape()[last], extent = kind == Step::What::to_real
                                                                 ? call.integer("last_dim_size")
                                                             : onesided ? before / 2 + 1
                                                                        : before;
  Stages stages(without_partial(x.spec), dims);
  const bool forward =
      kind == Step::What::complex ? call.boolean("forward") : kind == Step::What::from_real;
  if (kind == Step::What::from_real) stages.last(last, kind, extent);
  stages.complex(kind == Step::What::to_real ? last : -1);
  if (kind == Step::What::to_real) stages.last(last, kind, extent);
  Plan plan{.inputs = {without_partial(x.spec)}, .outputs = {{stages.now()}}};
  plan.local = [steps = std::move(stages.steps), forward, onesided, extent,
                norm = call.integer("normalization"), name = call.name(),
                context = context_of(x.spec)](const OperatorHandle&, Stack a) {
    at::Tensor t = a[0].toTensor();
    std::vector<ImplicitMove> moves;
    for (const Step& s : steps)
      if (s.what == Step::What::move) moves.push_back({"self", s.from, s.to, t.element_size()});
    if (!moves.empty()) check_implicit_moves(name, moves, *context);
    for (const Step& s : steps) {
      if (s.what == Step::What::move) {
        t = redistribute_local(t, s.from, s.to);
      } else if (s.to.local_numel() == 0) {
        // The kernels need at least one signal.
        const auto dtype = s.what == Step::What::to_real ? c10::toRealValueType(t.scalar_type())
                                                         : c10::toComplexType(t.scalar_type());
        t = t.new_empty(s.to.local_shape(), dtype);
      } else if (s.what == Step::What::complex) {
        t = at::_fft_c2c(t, s.dims, norm, forward);
      } else if (s.what == Step::What::from_real) {
        t = at::_fft_r2c(t, s.dims, norm, onesided);
      } else {
        t = at::_fft_c2r(t, s.dims, norm, extent);
      }
    }
    return Stack{t};
  };
  return plan;
}

using MaybeInt = std::optional<std::int64_t>;
using MaybeBool = std::optional<bool>;

// The window in the middle of n_fft elements; nothing stands for ones.
at::Tensor padded_window(const at::Tensor& signal, const std::optional<at::Tensor>& window,
                         std::int64_t n_fft, std::int64_t length) {
  const bool given = window && window->defined();
  TORCH_CHECK(length > 0 && length <= n_fft, "stft: the window has ", length,
              " elements: 1 to n_fft, which is ", n_fft);
  TORCH_CHECK(!given || (window->dim() == 1 && window->size(0) == length),
              "stft: the window has shape ", given ? window->sizes() : at::IntArrayRef(),
              ": one dim, of win_length, which is ", length);
  if (length == n_fft) return given ? *window : at::Tensor();
  const at::Tensor inner =
      given ? *window
            : at::ones({length}, at::TensorOptions(c10::toRealValueType(signal.scalar_type()))
                                     .device(signal.device()));
  const std::int64_t left = (n_fft - length) / 2;
  return at::constant_pad_nd(inner, {left, n_fft - length - left});
}

// libtorch takes the frames by strides of the global memory; unfold() gives the same ones.
at::Tensor short_times(const at::Tensor& self, std::int64_t n_fft, MaybeInt hop_length,
                       MaybeInt win_length, const std::optional<at::Tensor>& window,
                       bool normalized, MaybeBool onesided, MaybeBool return_complex,
                       MaybeBool align_to_window) {
  if (align_to_window && *align_to_window)
    throw ShardingError("stft of a sharded tensor: align_to_window is not there");
  TORCH_CHECK(at::isFloatingType(self.scalar_type()) || self.is_complex(), "stft of ",
              self.scalar_type(), " values: floating-point or complex ones");
  TORCH_CHECK(self.dim() == 1 || self.dim() == 2, "stft of ", self.dim(),
              " dims: [length] or [batch, length]");
  const std::int64_t hop = hop_length.value_or(n_fft / 4);
  TORCH_CHECK(n_fft > 0 && n_fft <= self.size(-1), "stft: n_fft is ", n_fft,
              ", the length of the signal ", self.size(-1));
  TORCH_CHECK(hop > 0, "stft: hop_length is ", hop, ": at least 1");
  const at::Tensor padded = padded_window(self, window, n_fft, win_length.value_or(n_fft));
  const bool complex = self.is_complex() || (padded.defined() && padded.is_complex());
  TORCH_CHECK(complex || return_complex.has_value(),
              "stft requires the return_complex parameter be given for real inputs");
  at::Tensor frames = (self.dim() == 1 ? self.unsqueeze(0) : self).unfold(1, n_fft, hop);
  if (padded.defined()) frames = frames * padded;
  const bool half = onesided.value_or(!complex);
  TORCH_CHECK(!(complex && half),
              "stft: of a complex signal or window there is no one-sided transform");
  constexpr std::int64_t kNone = 0, kByRootN = 1;
  const std::int64_t norm = normalized ? kByRootN : kNone;
  at::Tensor made =
      complex ? at::_fft_c2c(frames, {2}, norm, true) : at::_fft_r2c(frames, {2}, norm, half);
  made = made.transpose(1, 2);
  if (self.dim() == 1) made = made.squeeze(0);
  return return_complex.value_or(complex) ? made : at::view_as_real(made);
}

at::Tensor short_times_centered(const at::Tensor& self, std::int64_t n_fft, MaybeInt hop_length,
                                MaybeInt win_length, const std::optional<at::Tensor>& window,
                                bool center, c10::string_view pad_mode, bool normalized,
                                MaybeBool onesided, MaybeBool return_complex,
                                MaybeBool align_to_window) {
  at::Tensor signal = self;
  if (center) {
    TORCH_CHECK(!align_to_window, "stft: align_to_window is for center = false");
    TORCH_CHECK(self.dim() == 1 || self.dim() == 2, "stft of ", self.dim(),
                " dims: [length] or [batch, length]");
    const std::int64_t fields = self.dim() == 1 ? 2 : 1;  // padding by reflection asks for 3 dims
    for (std::int64_t i = 0; i < fields; ++i) signal = signal.unsqueeze(0);
    signal = at::pad(signal, {n_fft / 2, n_fft / 2}, pad_mode);
    for (std::int64_t i = 0; i < fields; ++i) signal = signal.squeeze(0);
  }
  return short_times(signal, n_fft, hop_length, win_length, window, normalized, onesided,
                     return_complex, align_to_window);
}

const AtStart registered([] {
  register_decomposition("stft", short_times);
  register_decomposition("stft.center", short_times_centered);
  using What = Step::What;
  register_rule("aten::_fft_c2c", [](const OpCall& c) { return transform(c, What::complex); });
  register_rule("aten::_fft_r2c", [](const OpCall& c) { return transform(c, What::from_real); });
  register_rule("aten::_fft_c2r", [](const OpCall& c) { return transform(c, What::to_real); });
});

}  // namespace
}  // namespace tessera::detail::fft_rules
