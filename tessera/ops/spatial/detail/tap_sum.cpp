#include "tessera/ops/spatial/detail/tap_sum.h"

#include <ATen/Dispatch.h>

#include <algorithm>

#include "tessera/base/internal/vector.h"

namespace tessera::detail {

TapSum::TapSum(const std::vector<Window>& windows, const Box& a, const Box& b) {
  std::vector<std::vector<Run>> of_dim;
  std::vector<std::int64_t> sizes;
  pairs_ = 1;
  for (std::size_t d = 0; d < windows.size(); ++d) {
    const Window& w = windows[d];
    std::vector<Run> runs;
    std::int64_t pairs = 0;
    for (std::int64_t k = 0; k < w.kernel; ++k) {
      const std::int64_t shift = k * w.dilation - w.padding;  // i = o * stride + shift
      const std::int64_t begin = std::max(a[d].begin, ceil_div(b[d].begin - shift, w.stride));
      const std::int64_t end = std::min(a[d].end, floor_div(b[d].end - 1 - shift, w.stride) + 1);
      if (end <= begin) continue;
      runs.push_back({k, begin - a[d].begin, begin * w.stride + shift - b[d].begin, end - begin});
      pairs += end - begin;
    }
    pairs_ *= pairs;
    of_dim.push_back(std::move(runs));
    sizes.push_back(pairs);
  }
  // The innermost loop runs along the dim with the longest runs; among equal ones along the last,
  // whose elements are adjacent.
  std::vector<std::size_t> order = numbers_below(windows.size());
  std::ranges::stable_sort(order,
                           [&](std::size_t x, std::size_t y) { return sizes[x] < sizes[y]; });
  for (std::size_t l = 0; l < 3; ++l) {
    if (l + order.size() < 3) {
      runs_[l] = {{0, 0, 0, 1}};
      continue;
    }
    const std::size_t d = order[l + order.size() - 3];
    runs_[l] = std::move(of_dim[d]);
    dim_[l] = static_cast<int>(d);
    stride_[l] = windows[d].stride;
  }
}

namespace {

// A tensor as the loops traverse it.
template <class T>
struct Side {
  T* data;
  std::int64_t sample, channel;
  std::int64_t step[3];  // of an index of A in each loop
  std::int64_t unit[3];  // of an index of its own
};

template <class T>
Side<T> side_of(const at::Tensor& t, const std::array<int, 3>& dims,
                const std::array<std::int64_t, 3>& window_stride) {
  Side<T> s{static_cast<T*>(t.data_ptr()), t.stride(0), t.stride(1), {}, {}};
  for (std::size_t l = 0; l < 3; ++l) {
    s.unit[l] = dims[l] < 0 ? 0 : t.stride(dims[l] + 2);
    s.step[l] = s.unit[l] * window_stride[l];
  }
  return s;
}

constexpr std::array<std::int64_t, 3> kOne{1, 1, 1};

// The innermost loops, compiled for this processor as well as for any: built for any, they take
// several times as long.
#if defined(__x86_64__) && defined(__GNUC__)
#define TESSERA_WIDE __attribute__((target("avx2,fma")))
const bool kWide = [] {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}();
#else
#define TESSERA_WIDE
constexpr bool kWide = false;
#endif

// y[j] += the sum over four sources of w * x[j]: y is loaded and stored once for four products.
template <class T>
[[gnu::always_inline]] inline void add4_any(T* __restrict y, std::int64_t ys, const T* x,
                                            std::int64_t channel, std::int64_t xs, const T* w,
                                            std::int64_t count) {
  const T *x1 = x + channel, *x2 = x1 + channel, *x3 = x2 + channel;
  const T w0 = w[0], w1 = w[1], w2 = w[2], w3 = w[3];
  if (ys == 1 && xs == 1)
    for (std::int64_t j = 0; j < count; ++j)
      y[j] += w0 * x[j] + w1 * x1[j] + w2 * x2[j] + w3 * x3[j];
  else
    for (std::int64_t j = 0; j < count; ++j)
      y[j * ys] += w0 * x[j * xs] + w1 * x1[j * xs] + w2 * x2[j * xs] + w3 * x3[j * xs];
}

template <class T>
void add1(T* __restrict y, std::int64_t ys, const T* x, std::int64_t xs, T w, std::int64_t count) {
  for (std::int64_t j = 0; j < count; ++j) y[j * ys] += w * x[j * xs];
}

// Several sums in parallel, so that additions do not wait for each other.
template <class T>
[[gnu::always_inline]] inline T product_any(const T* x, std::int64_t xs, const T* y,
                                            std::int64_t ys, std::int64_t count) {
  constexpr int kSums = 128 / sizeof(T);
  T sums[kSums] = {};
  std::int64_t j = 0;
  if (xs == 1 && ys == 1) {
    for (; j + kSums <= count; j += kSums)
      for (int k = 0; k < kSums; ++k) sums[k] += x[j + k] * y[j + k];
  }
  for (int n = kSums / 2; n > 0; n /= 2)
    for (int k = 0; k < n; ++k) sums[k] += sums[k + n];
  T rest = 0;
  for (; j < count; ++j) rest += x[j * xs] * y[j * ys];
  return sums[0] + rest;
}

template <class T>
TESSERA_WIDE void add4_wide(T* y, std::int64_t ys, const T* x, std::int64_t channel,
                            std::int64_t xs, const T* w, std::int64_t count) {
  add4_any(y, ys, x, channel, xs, w, count);
}
template <class T>
TESSERA_WIDE T product_wide(const T* x, std::int64_t xs, const T* y, std::int64_t ys,
                            std::int64_t count) {
  return product_any(x, xs, y, ys, count);
}

template <class T>
void add4(T* y, std::int64_t ys, const T* x, std::int64_t channel, std::int64_t xs, const T* w,
          std::int64_t count) {
  if (kWide)
    add4_wide(y, ys, x, channel, xs, w, count);
  else
    add4_any(y, ys, x, channel, xs, w, count);
}
template <class T>
T product(const T* x, std::int64_t xs, const T* y, std::int64_t ys, std::int64_t count) {
  return kWide ? product_wide(x, xs, y, ys, count) : product_any(x, xs, y, ys, count);
}

// Both tensors as sides: A, B, and the weight, whose taps are traversed.
template <class T>
struct Sides {
  Side<T> a, b, w;
  std::int64_t samples, groups, of_a, of_b;  // channels per group
};

// Calls f(offset in A, offset in B, offset of the tap, count) for each run of the innermost loop.
template <class Runs, class T, class F>
void each_run(const Runs& runs, const Sides<T>& s, const F& f) {
  for (const auto& r0 : runs[0]) {
    for (std::int64_t j0 = 0; j0 < r0.count; ++j0) {
      const std::int64_t a0 = (r0.a + j0) * s.a.step[0], b0 = r0.b * s.b.unit[0] + j0 * s.b.step[0],
                         w0 = r0.tap * s.w.step[0];
      for (const auto& r1 : runs[1]) {
        for (std::int64_t j1 = 0; j1 < r1.count; ++j1) {
          const std::int64_t a1 = a0 + (r1.a + j1) * s.a.step[1],
                             b1 = b0 + r1.b * s.b.unit[1] + j1 * s.b.step[1],
                             w1 = w0 + r1.tap * s.w.step[1];
          for (const auto& r2 : runs[2])
            f(a1 + r2.a * s.a.step[2], b1 + r2.b * s.b.unit[2], w1 + r2.tap * s.w.step[2],
              r2.count);
        }
      }
    }
  }
}

// Adds to one side, `d`, the contribution of the other, `o`; wd and wo: strides of the weight for a
// channel of either, within its group.
template <bool kToA, class Runs, class T>
void add(const Runs& runs, const Sides<T>& s) {
  const Side<T>&d = kToA ? s.a : s.b, &o = kToA ? s.b : s.a;
  const std::int64_t of_d = kToA ? s.of_a : s.of_b, of_o = kToA ? s.of_b : s.of_a;
  const std::int64_t wd = kToA ? s.w.sample : s.w.channel, wo = kToA ? s.w.channel : s.w.sample;
  for (std::int64_t n = 0; n < s.samples; ++n) {
    for (std::int64_t g = 0; g < s.groups; ++g) {
      const T* weight = s.w.data + g * s.of_a * s.w.sample;
      for (std::int64_t c = 0; c < of_d; ++c) {
        T* to = d.data + n * d.sample + (g * of_d + c) * d.channel;
        const T* from = o.data + n * o.sample + g * of_o * o.channel;
        each_run(runs, s,
                 [&](std::int64_t at_a, std::int64_t at_b, std::int64_t tap, std::int64_t count) {
                   T* y = to + (kToA ? at_a : at_b);
                   const T *x = from + (kToA ? at_b : at_a), *w = weight + c * wd + tap;
                   std::int64_t k = 0;
                   for (; k + 4 <= of_o; k += 4) {
                     const T w4[4] = {w[k * wo], w[(k + 1) * wo], w[(k + 2) * wo], w[(k + 3) * wo]};
                     add4(y, d.step[2], x + k * o.channel, o.channel, o.step[2], w4, count);
                   }
                   for (; k < of_o; ++k)
                     add1(y, d.step[2], x + k * o.channel, o.step[2], w[k * wo], count);
                 });
      }
    }
  }
}

template <class Runs, class T>
void multiply(const Runs& runs, const Sides<T>& s) {
  for (std::int64_t n = 0; n < s.samples; ++n) {
    for (std::int64_t ca = 0; ca < s.groups * s.of_a; ++ca) {
      for (std::int64_t cb = 0; cb < s.of_b; ++cb) {
        const T* a = s.a.data + n * s.a.sample + ca * s.a.channel;
        const T* b = s.b.data + n * s.b.sample + (ca / s.of_a * s.of_b + cb) * s.b.channel;
        T* w = s.w.data + ca * s.w.sample + cb * s.w.channel;
        each_run(runs, s,
                 [&](std::int64_t at_a, std::int64_t at_b, std::int64_t tap, std::int64_t count) {
                   w[tap] += product(a + at_a, s.a.step[2], b + at_b, s.b.step[2], count);
                 });
      }
    }
  }
}

}  // namespace

template <class Call>
void TapSum::with_sides(const at::Tensor& a, const at::Tensor& b, const at::Tensor& weight,
                        std::int64_t groups, const Call& call) const {
  if (pairs_ == 0) return;
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "tap_sum", [&] {
    call(Sides<scalar_t>{side_of<scalar_t>(a, dim_, kOne), side_of<scalar_t>(b, dim_, stride_),
                         side_of<scalar_t>(weight, dim_, kOne), a.size(0), groups,
                         a.size(1) / groups, b.size(1) / groups});
  });
}

void TapSum::to_values(const at::Tensor& to, const at::Tensor& from, const at::Tensor& weight,
                       std::int64_t groups, bool to_a) const {
  with_sides(to_a ? to : from, to_a ? from : to, weight, groups, [&](const auto& sides) {
    if (to_a)
      add<true>(runs_, sides);
    else
      add<false>(runs_, sides);
  });
}

void TapSum::to_weight(const at::Tensor& weight, const at::Tensor& a, const at::Tensor& b,
                       std::int64_t groups) const {
  with_sides(a, b, weight, groups, [&](const auto& sides) { multiply(runs_, sides); });
}

}  // namespace tessera::detail
