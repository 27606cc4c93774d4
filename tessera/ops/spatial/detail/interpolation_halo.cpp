#include "tessera/ops/spatial/detail/interpolation_halo.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <map>
#include <numeric>

#include "tessera/ops/rules/detail/windowed.h"

namespace tessera::detail {
namespace {

using Scales = std::vector<std::optional<double>>;

at::ScalarType computed_in(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}
at::ScalarType computed_in(const InterpolationCall& how) {
  return computed_in(c10::typeMetaToScalarType(how.options.dtype()));
}

// Calls the operator, or with `input_size` its backward.
at::Tensor call(const InterpolationCall& how, const Scales& scales, const at::Tensor& t,
                const Shape& outputs, const std::optional<Shape>& input_size = std::nullopt) {
  const LocalCallGuard guard;
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      concat("aten::", how.op->name, input_size ? "_backward" : "").c_str(), "");
  Stack stack{t, outputs};
  if (input_size) stack.emplace_back(*input_size);
  if (how.op->align_argument) stack.emplace_back(how.align);
  for (const auto& s : scales) stack.emplace_back(s ? c10::IValue(*s) : c10::IValue());
  handle.callBoxed(stack);
  return stack[0].toTensor();
}

// The weights of one dim are obtained from libtorch itself, so that they are those of its kernel
// for this dtype and device, to the last rounding: combs of ones, further apart than a window
// reaches, give the weights of one input each.
struct Probe {
  const InterpolationCall& how;
  const Interpolation& op = *how.op;
  const at::TensorOptions options = how.options.dtype(computed_in(how));

  Shape spread(std::int64_t n) const {
    Shape shape(op.inner, 1);
    shape.back() = n;
    return shape;
  }
  Scales scales(const std::optional<double>& scale) const {
    Scales all(op.inner);
    all.back() = scale;
    return all;
  }
  Shape shape(std::int64_t channels, std::int64_t n) const {
    Shape s{1, channels};
    for (const auto size : spread(n)) s.push_back(size);
    return s;
  }

  Taps forward(std::int64_t inputs, std::int64_t outputs,
               const std::optional<double>& scale) const {
    const LocalCallGuard guard;
    const double step =
        how.align
            ? (outputs > 1 ? static_cast<double>(inputs - 1) / static_cast<double>(outputs - 1) : 0)
        : scale && *scale > 0 ? 1 / *scale
                              : static_cast<double>(inputs) / static_cast<double>(outputs);
    const double reach = op.antialias ? op.reach * std::max(step, 1.0) : op.reach;
    const std::int64_t period = std::min<std::int64_t>(
        2 * static_cast<std::int64_t>(std::ceil(reach)) + 3, std::max<std::int64_t>(inputs, 3));
    at::Tensor combs = at::arange(inputs, at::kLong)
                           .remainder(period)
                           .unsqueeze(0)
                           .eq(at::arange(period, at::kLong).unsqueeze(1));
    combs = combs.to(options).view(shape(period, inputs));
    if (how.channels_last)
      combs = combs.contiguous(op.inner == 2 ? at::MemoryFormat::ChannelsLast
                                             : at::MemoryFormat::ChannelsLast3d);
    const at::Tensor response = call(how, scales(scale), combs, spread(outputs))
                                    .reshape({period, outputs})
                                    .t()
                                    .to(at::kCPU, at::kDouble)
                                    .contiguous();
    const double* weights = response.const_data_ptr<double>();
    Taps taps(outputs);
    for (std::int64_t o = 0; o < outputs; ++o) {
      const auto at = static_cast<double>(o);
      const bool corner = (how.align && !op.antialias) || op.name.starts_with("upsample_nearest");
      const double centre = std::clamp(corner ? at * step : (at + 0.5) * step - 0.5, 0.0,
                                       static_cast<double>(inputs - 1));
      for (std::int64_t r = 0; r < period; ++r) {
        const double w = weights[o * period + r];
        if (w == 0) continue;
        const auto turn = static_cast<std::int64_t>(
            std::llround((centre - static_cast<double>(r)) / static_cast<double>(period)));
        std::int64_t i = r + period * turn;
        if (i < 0) i += period;
        if (i >= inputs) i -= period;
        taps[o].emplace_back(i, w);
      }
      std::ranges::sort(taps[o]);
    }
    return taps;
  }

  // For nearest neighbours: each input's gradient of ones counts its outputs, and neighbours
  // ascend.
  Taps backward(std::int64_t inputs, std::int64_t outputs,
                const std::optional<double>& scale) const {
    const LocalCallGuard guard;
    const at::Tensor ones = at::ones(shape(1, outputs), options);
    const at::Tensor counts = call(how, scales(scale), ones, spread(outputs), shape(1, inputs))
                                  .reshape({inputs})
                                  .to(at::kCPU, at::kDouble)
                                  .contiguous();
    Taps taps;
    for (std::int64_t i = 0; i < inputs; ++i)
      for (auto n = static_cast<std::int64_t>(counts.const_data_ptr<double>()[i]); n > 0; --n)
        taps.push_back(TapRow{{i, 1.0}});
    return taps;
  }
};

// Outputs `rows` of a matrix, with inputs counted from `first` on.
Taps part_of(const Taps& taps, const Interval& rows, std::int64_t first) {
  Taps part(taps.begin() + rows.begin, taps.begin() + rows.end);
  for (TapRow& row : part)
    for (auto& [i, w] : row) i -= first;
  return part;
}

Taps transposed(const Taps& taps, std::int64_t inputs) {
  Taps result(inputs);
  for (std::size_t o = 0; o < taps.size(); ++o)
    for (const auto& [i, w] : taps[o]) result[i].emplace_back(o, w);
  return result;
}

Interval read_by(const Taps& taps, const Interval& outputs) {
  Interval in{std::numeric_limits<std::int64_t>::max(), 0};
  for (std::int64_t o = outputs.begin; o < outputs.end; ++o)
    for (const auto& [i, w] : taps[o]) in = {std::min(in.begin, i), std::max(in.end, i + 1)};
  return in.empty() ? Interval{0, 0} : in;
}

bool close(const Taps& a, const Taps& b, double tolerance) {
  if (a.size() != b.size()) return false;
  for (std::size_t o = 0; o < a.size(); ++o) {
    std::map<std::int64_t, double> weights;
    for (const auto& [i, w] : a[o]) weights[i] += w;
    for (const auto& [i, w] : b[o]) weights[i] -= w;
    for (const auto& [i, w] : weights)
      if (std::abs(w) > tolerance) return false;
  }
  return true;
}

Shape spatial_shape(const Box& box, std::size_t lead) {
  const Shape shape = shape_of(box);
  return {shape.begin() + static_cast<std::ptrdiff_t>(lead), shape.end()};
}

}  // namespace

std::vector<Taps> interpolation_matrices(const InterpolationCall& call, const Shape& inputs,
                                         bool of_backward) {
  const Probe probe{call};
  std::vector<Taps> all;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    all.push_back(of_backward ? probe.backward(inputs[i], call.outputs[i], call.scales[i])
                              : probe.forward(inputs[i], call.outputs[i], call.scales[i]));
  return all;
}

InterpolationHalo::InterpolationHalo(InterpolationCall call, ShardSpec x, const ShardSpec& y,
                                     const std::vector<Taps>& matrices, bool plain)
    : FieldHalo(std::move(x), y, matrices.size(),
                [matrices](std::size_t i, const Interval& outputs) {
                  return read_by(matrices[i], outputs);
                }),
      call_(std::move(call)),
      whole_(matrices) {
  if (plain) find_native();
  if (native_) return;
  for (std::size_t i = 0; i < whole_.size(); ++i) {
    const std::size_t d = lead() + i;
    const Taps mine =
        part_of(whole_[i], volume(out_) > 0 ? out_[d] : Interval{0, 0}, halo_.needed()[d].begin);
    const std::int64_t inputs = halo_.needed()[d].size();
    matrix_.push_back(dense(mine, inputs));
    adjoint_.push_back(dense(transposed(mine, inputs), std::ssize(mine)));
  }
}

// If inputs and outputs are in a simple ratio, the operator itself, called on a box that begins and
// ends where both grids do, computes this rank's outputs; what it computes at the box's own edges
// is dropped.
void InterpolationHalo::find_native() {
  if (volume(out_) == 0) return;
  const Probe probe{call_};
  // libtorch's float indices far from the origin are less exact than those of a box near it.
  const double tolerance = call_.op->nearest ? 0 : computed_in(call_) == at::kDouble ? 1e-12 : 1e-5;
  native_in_ = halo_.needed();
  native_out_ = out_;
  for (std::size_t i = 0; i < call_.outputs.size(); ++i) {
    const std::size_t d = lead() + i;
    const std::int64_t inputs = x_.shape()[d], outputs = call_.outputs[i];
    if (!is_distributed(x_, static_cast<int>(d))) {
      native_in_[d] = {0, inputs};
      native_out_[d] = {0, outputs};
    } else {
      const std::int64_t common = std::gcd(inputs, outputs), q = inputs / common,
                         p = outputs / common;
      if (q > 8 || call_.align) return;
      const std::int64_t first = std::min(native_in_[d].begin / q, out_[d].begin / p);
      const std::int64_t last =
          std::max((native_in_[d].end + q - 1) / q, (out_[d].end + p - 1) / p);
      native_in_[d] = {first * q, last * q};
      native_out_[d] = {first * p, last * p};
    }
    const std::int64_t n = native_in_[d].size(), m = native_out_[d].size();
    const Interval mine = out_[d].shifted(-native_out_[d].begin);
    const Taps wanted = part_of(whole_[i], out_[d], native_in_[d].begin);
    if (is_distributed(x_, static_cast<int>(d)) &&
        !close(part_of(probe.forward(n, m, call_.scales[i]), mine, 0), wanted, tolerance))
      return;
    // Backward is called in the same way.
    if (call_.op->nearest &&
        !close(part_of(probe.backward(n, m, call_.scales[i]), mine, 0), wanted, 0))
      return;
  }
  // libtorch's antialiased kernels treat a row-major result of width 1 as channels_last, and are
  // wrong if its height changes (2.15): what they would make of this rank's shard differs from what
  // they make of the global field.
  if (call_.op->antialias && native_out_.back().size() == 1 &&
      any_distributed(x_, static_cast<int>(lead())))
    return;
  native_ = true;
}

InterpolationHalo::Dense InterpolationHalo::dense(const Taps& taps, std::int64_t inputs) const {
  Dense d;
  d.rows = taps.size();
  bool ones = true;
  d.identity = std::ssize(taps) == inputs;
  for (std::size_t o = 0; o < taps.size(); ++o) {
    const TapRow& row = taps[o];
    d.taps = std::max(d.taps, row.size());
    ones &= row.size() == 1 && row[0].second == 1;
    d.identity &= ones && row[0].first == static_cast<std::int64_t>(o);
  }
  if (d.identity) return d;
  const auto device = call_.options.device();
  for (std::size_t k = 0; k < d.taps; ++k) {
    std::vector<std::int64_t> index;
    std::vector<double> weight;
    for (const TapRow& row : taps) {
      index.push_back(row.empty() ? 0 : row[std::min(k, row.size() - 1)].first);
      weight.push_back(k < row.size() ? row[k].second : 0);
    }
    d.index.push_back(at::tensor(index, at::kLong).to(device));
    if (!ones || d.taps != 1)
      d.weight.push_back(at::tensor(weight, at::kDouble).to(device, computed_in(call_)));
  }
  return d;
}

at::Tensor InterpolationHalo::along(const at::Tensor& t, const Dense& m, std::size_t dim) const {
  if (m.identity) return t;
  const auto d = static_cast<std::int64_t>(dim);
  if (m.taps == 0) {
    Shape sizes = t.sizes().vec();
    sizes[dim] = static_cast<std::int64_t>(m.rows);
    return at::zeros(sizes, t.options());
  }
  at::Tensor sum;
  for (std::size_t k = 0; k < m.index.size(); ++k) {
    at::Tensor values = t.index_select(d, m.index[k]);
    if (m.weight.empty()) return values;
    const at::Tensor weight = as_dim(m.weight[k], d, t.dim());
    if (k == 0)
      sum = values.mul_(weight);
    else
      sum.addcmul_(values, weight);
  }
  return sum;
}

at::Tensor InterpolationHalo::forward(const at::Tensor& x) const {
  HaloValues values = arrived(x);
  if (volume(out_) == 0) return at::empty(shape_of(out_), x.options());
  if (native_) {
    const at::Tensor y =
        call(call_, call_.scales, values.assemble(native_in_), spatial_shape(native_out_, lead()));
    return slice(y, native_out_, out_);
  }
  const bool weighted =
      std::ranges::any_of(matrix_, [](const Dense& m) { return !m.weight.empty(); });
  at::Tensor t = values.assemble(halo_.needed());
  if (weighted) t = t.to(computed_in(x.scalar_type()));
  for (std::size_t i = 0; i < matrix_.size(); ++i) t = along(t, matrix_[i], lead() + i);
  // If every matrix is the identity it is still the field's memory, or a buffer's.
  const bool same = std::ranges::all_of(matrix_, [](const Dense& m) { return m.identity; });
  return same ? t.to(x.scalar_type()).clone() : t.to(x.scalar_type());
}

at::Tensor InterpolationHalo::adjoint(const at::Tensor& gradient) const {
  const Box& box = halo_.needed();
  if (volume(out_) == 0) return halo_.sum(at::zeros(shape_of(box), gradient.options()));
  if (native_) {
    const at::Tensor g = call(call_, call_.scales, embedded(gradient, out_, native_out_),
                              spatial_shape(native_out_, lead()), shape_of(native_in_));
    return halo_.sum(slice(g, native_in_, box));
  }
  at::Tensor t = gradient.to(computed_in(gradient.scalar_type()));
  for (std::size_t i = adjoint_.size(); i-- > 0;) t = along(t, adjoint_[i], lead() + i);
  return halo_.sum(t.to(gradient.scalar_type()));
}

}  // namespace tessera::detail
