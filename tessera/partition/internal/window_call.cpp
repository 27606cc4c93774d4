#include "tessera/partition/internal/window_call.h"

#include <algorithm>
#include <limits>

#include "tessera/base/error.h"

namespace tessera {
namespace {

std::int64_t reach_of(const Window& w) { return (w.kernel - 1) * w.dilation; }

// Number of outputs before a boundary of the shards of the inputs, for all boundaries of a
// partition; `before(e)` gives it for a boundary inside the array.
template <class Before>
Partition shard_like(const Partition& inputs, std::int64_t outputs, Before before) {
  std::vector<std::int64_t> sizes;
  std::int64_t last = 0;
  for (int part = 0; part < inputs.parts(); ++part) {
    const std::int64_t end = inputs.interval(part).end;
    std::int64_t boundary = end >= inputs.extent() ? outputs
                            : end <= 0 ? 0
                                       : std::clamp<std::int64_t>(before(end), 0, outputs);
    boundary = std::max(boundary, last);
    sizes.push_back(boundary - last);
    last = boundary;
  }
  return Partition(sizes);
}

// Number of outputs that a call on n inputs computes.
std::int64_t count(const Window& w, std::int64_t n, std::int64_t padding, bool transposed) {
  if (transposed) return n < 1 ? 0 : (n - 1) * w.stride - 2 * padding + reach_of(w) + 1;
  return Window{w.kernel, w.stride, padding, w.dilation}.outputs(n, padding);
}

}  // namespace

Partition output_partition(const Partition& inputs, const Window& w, std::int64_t outputs) {
  return shard_like(inputs, outputs, [&](std::int64_t end) {
    return ceil_div(end + w.padding - reach_of(w) / 2, w.stride);
  });
}

Partition transposed_output_partition(const Partition& inputs, const Window& w,
                                      std::int64_t outputs) {
  return shard_like(inputs, outputs,
                    [&](std::int64_t end) { return end * w.stride - w.padding + reach_of(w) / 2; });
}

Partition resampled_partition(const Partition& inputs, std::int64_t outputs) {
  const std::int64_t extent = inputs.extent();
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();  // no product overflows
  if (std::max(extent, outputs) > most)
    throw InvalidArgument("a dim of ", extent, " resampled to ", outputs, "; each is at most ",
                          most);
  // The outputs whose centre is before `end`: (2 o + 1) * extent < 2 * outputs * end.
  return shard_like(inputs, outputs, [&](std::int64_t end) {
    return ceil_div(ceil_div(2 * outputs * end, extent) - 1, 2);
  });
}

BoxCall forward_call(const Window& w, Interval outputs, bool transposed) {
  if (!transposed) return {w.inputs(outputs), 0, outputs};
  // Without padding the call on [a, b) computes outputs from a * stride - padding on.
  Interval in = w.transposed_inputs(outputs);
  in.begin = std::min(in.begin, floor_div(outputs.begin + w.padding, w.stride));
  in.end = std::max(in.end, ceil_div(outputs.end + w.padding - reach_of(w) - 1, w.stride) + 1);
  const std::int64_t first = in.begin * w.stride - w.padding;
  return {in, 0, {first, first + count(w, in.size(), 0, true)}};
}

BoxCall backward_call(const Window& w, Interval inputs, bool transposed) {
  if (transposed) {
    const std::int64_t first = inputs.begin * w.stride - w.padding;
    return {inputs, 0, {first, first + count(w, inputs.size(), 0, true)}};
  }
  // outputs o with an o * stride - padding + k * dilation in `inputs`
  const Interval touched = w.transposed_inputs(inputs);
  std::int64_t first = std::min(touched.begin, floor_div(inputs.begin + w.padding, w.stride));
  for (;; --first) {
    // One output more in front takes padding of one stride more, on both sides.
    const std::int64_t padding = w.padding + inputs.begin - first * w.stride;
    const std::int64_t n = count(w, inputs.size(), padding, false);
    if (n > 0 && first + n >= touched.end) return {inputs, padding, {first, first + n}};
  }
}

std::optional<BoxCall> aligned_call(const Window& w, Interval inputs, Interval outputs,
                                    bool transposed) {
  if (inputs.empty() || outputs.empty()) return std::nullopt;
  if (transposed) {
    const std::int64_t padding = w.padding + outputs.begin - inputs.begin * w.stride;
    if (padding < 0) return std::nullopt;
    const std::int64_t extra = outputs.size() - count(w, inputs.size(), padding, true);
    // The output padding that libtorch allows.
    if (extra < 0 || extra >= std::max(w.stride, w.dilation)) return std::nullopt;
    return BoxCall{inputs, padding, outputs, extra};
  }
  const std::int64_t padding = w.padding + inputs.begin - outputs.begin * w.stride;
  if (padding < 0 || count(w, inputs.size(), padding, false) != outputs.size()) return std::nullopt;
  return BoxCall{inputs, padding, outputs};
}

Interval interior(const Window& w, Interval held, Interval outputs, std::int64_t extent,
                  bool transposed) {
  const std::int64_t reach = reach_of(w);
  Interval inner = outputs;
  if (transposed) {
    if (held.begin > 0)
      inner.begin = std::max(inner.begin, (held.begin - 1) * w.stride + reach - w.padding + 1);
    if (held.end < extent) inner.end = std::min(inner.end, held.end * w.stride - w.padding);
  } else {
    if (held.begin > 0)
      inner.begin = std::max(inner.begin, ceil_div(held.begin + w.padding, w.stride));
    if (held.end < extent)
      inner.end = std::min(inner.end, floor_div(held.end - 1 - reach + w.padding, w.stride) + 1);
  }
  if (held.empty() || inner.empty()) return {outputs.begin, outputs.begin};
  return inner;
}

}  // namespace tessera
