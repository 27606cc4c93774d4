#pragma once
// The arithmetic of neighbourhood attention: what one team of lanes does for one query, and in
// backward for one key. It is one source for the CPU and for CUDA's compiler, and knows neither
// libtorch nor how teams are started. Softmax is taken while the keys pass by, its rescaling as in
// M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018.
//
//   attend_query<float, float>(Alone<float>(), call, at, head, seen(call, batch, position));
//   // `at`: the row, (batch * positions + position) * heads + head
//
// A team (Alone, Lanes) has `leads()`, `dot`, and `Sums`: one number per channel of a row.

#include <cmath>
#include <cstdint>
#include <limits>

#ifdef __CUDACC__
#define TESSERA_HOST_AND_DEVICE __host__ __device__
#else
#define TESSERA_HOST_AND_DEVICE
#endif

namespace tessera::detail {

/// Positions of one dim: begin, begin + step, ... (count of them).
struct Positions {
  std::int64_t begin, count, step;
};

/// a / b of numbers that are not negative; in 32 bits where they fit, which is faster.
TESSERA_HOST_AND_DEVICE inline std::int64_t quotient(std::int64_t a, std::int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
  return a / b;
}

/// A neighbourhood in one spatial dim, and the intervals of the dim that queries and keys are of.
struct WindowDim {
  std::int64_t extent = 1, kernel = 1, dilation = 1;
  bool causal = false;
  std::int64_t queries_begin = 0, queries = 1, keys_begin = 0, keys = 1;

  /// The number of positions with the remainder `first`.
  TESSERA_HOST_AND_DEVICE std::int64_t members(std::int64_t first) const {
    return quotient(extent - first + dilation - 1, dilation);
  }
  /// What the query sees.
  TESSERA_HOST_AND_DEVICE Positions keys_of(std::int64_t query) const {
    const std::int64_t at = quotient(query, dilation), first = query - at * dilation;
    std::int64_t begin = causal ? at - kernel + 1 : at - kernel / 2;
    if (begin < 0) begin = 0;
    if (causal) return {first + begin * dilation, at - begin + 1, dilation};
    const std::int64_t last = members(first) - kernel;
    return {first + (begin < last ? begin : last) * dilation, kernel, dilation};
  }
  /// Which queries of the interval see the key: keys_of() the other way round.
  TESSERA_HOST_AND_DEVICE Positions queries_of(std::int64_t key) const {
    const std::int64_t at = quotient(key, dilation), first = key - at * dilation,
                       all = members(first);
    std::int64_t low = causal ? at : at >= kernel ? at - kernel + 1 + kernel / 2 : 0;
    std::int64_t high = causal ? at + kernel - 1 : at < all - kernel ? at + kernel / 2 : all - 1;
    if (high > all - 1) high = all - 1;
    const std::int64_t from = queries_begin - first, to = queries_begin + queries - 1 - first;
    if (to < 0) return {0, 0, dilation};
    const std::int64_t lowest = from > 0 ? quotient(from + dilation - 1, dilation) : 0,
                       highest = quotient(to, dilation);
    if (low < lowest) low = lowest;
    if (high > highest) high = highest;
    return {first + low * dilation, high < low ? 0 : high - low + 1, dilation};
  }
};

/// One call on dense tensors of batch x positions x heads x channels: `out`, `g` and `v` have
/// `values` channels. `logs` and `deltas` have a number for each query and head, of the type of
/// sums. Forward writes out and logs; backward reads both, and writes deltas, dq, dk and dv.
struct NeighborhoodCall {
  static constexpr int kDims = 3;  // the first ones are of extent 1 where there are fewer
  WindowDim dims[kDims];
  std::int64_t batch = 0, queries = 1, keys = 1, heads = 0, channels = 0, values = 0;
  double scale = 1;
  const void *q = nullptr, *k = nullptr, *v = nullptr, *g = nullptr;
  void *out = nullptr, *logs = nullptr, *deltas = nullptr;
  void *dq = nullptr, *dk = nullptr, *dv = nullptr;
};

/// The rows that a row sees: keys of a query, or the queries of a key.
struct Seen {
  std::int64_t begin = 0;  // of head 0
  std::int64_t count[NeighborhoodCall::kDims], step[NeighborhoodCall::kDims];

  /// Calls f(row), in row-major order.
  template <class F>
  TESSERA_HOST_AND_DEVICE void each(std::int64_t head, const F& f) const {
    for (std::int64_t i = 0; i < count[0]; ++i)
      for (std::int64_t j = 0; j < count[1]; ++j) {
        const std::int64_t row = begin + head + i * step[0] + j * step[1];
        for (std::int64_t m = 0; m < count[2]; ++m) f(row + m * step[2]);
      }
  }
};

/// What the query at a position of a sample sees; kOfKey: which queries see the key there.
template <bool kOfKey = false>
TESSERA_HOST_AND_DEVICE Seen seen(const NeighborhoodCall& n, std::int64_t batch,
                                  std::int64_t position) {
  Seen s;
  std::int64_t stride = n.heads;
  for (int i = NeighborhoodCall::kDims; i-- > 0;) {
    const WindowDim& d = n.dims[i];
    const std::int64_t size = kOfKey ? d.keys : d.queries, rest = quotient(position, size),
                       at = position - rest * size;
    const Positions p = kOfKey ? d.queries_of(at + d.keys_begin) : d.keys_of(at + d.queries_begin);
    s.begin += (p.begin - (kOfKey ? d.queries_begin : d.keys_begin)) * stride;
    s.count[i] = p.count;
    s.step[i] = p.step * stride;
    stride *= kOfKey ? d.queries : d.keys;
    position = rest;
  }
  s.begin += batch * stride;
  return s;
}

/// A team of one lane, for the CPU. A: the type of sums.
template <class A>
struct Alone {
  static constexpr int kWidth = 256;  // channels of which sums are kept at a time
  bool leads() const { return true; }

  template <class T>
  A dot(const T* a, const T* b, std::int64_t n) const {
    A part[4] = {};  // independent sums, so that the compiler may use vectors
    std::int64_t i = 0;
    for (; i + 4 <= n; i += 4)
      for (int j = 0; j < 4; ++j) part[j] += static_cast<A>(a[i + j]) * static_cast<A>(b[i + j]);
    A sum = n < 4 ? A(0) : (part[0] + part[2]) + (part[1] + part[3]);
    for (; i < n; ++i) sum += static_cast<A>(a[i]) * static_cast<A>(b[i]);
    return sum;
  }
  /// to += factor * from, which do not overlap: a loop that must look costs more for few channels.
  template <class T>
  static void add(A* __restrict__ to, A factor, const T* __restrict__ from, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) to[i] += factor * static_cast<A>(from[i]);
  }

  /// Sums of the channels [first, first + kWidth) of rows of n.
  struct Sums {
    Sums(const Alone&, std::int64_t first, std::int64_t n)
        : first(first), count(n - first < kWidth ? n - first : kWidth) {
      for (std::int64_t i = 0; i < count; ++i) of[i] = 0;
    }
    void scale(A factor) {
      for (std::int64_t i = 0; i < count; ++i) of[i] *= factor;
    }
    template <class T>
    void add(A factor, const T* row) {
      Alone::add(of, factor, row + first, count);
    }
    template <class T>
    void write(T* row, A factor) const {
      for (std::int64_t i = 0; i < count; ++i) row[first + i] = static_cast<T>(of[i] * factor);
    }
    std::int64_t first, count;
    A of[kWidth];
  };
};

/// A team of L lanes, each of which holds M times V neighbouring channels. V > 1: rows are aligned
/// to V elements and have a multiple of them. kAll: they fit into the team. Total::sum() adds a
/// number of every lane, for all of them.
template <class A, int L, int V, int M, bool kAll, class Total>
struct Lanes {
  static constexpr int kWidth = L * V * M;
  int lane;
  Total total;
  TESSERA_HOST_AND_DEVICE bool leads() const { return lane == 0; }

  template <class T>
  struct alignas(V * sizeof(T)) Pack {
    T of[V];
  };
  template <class T>
  TESSERA_HOST_AND_DEVICE static Pack<T> load(const T* from) {
    return *reinterpret_cast<const Pack<T>*>(from);
  }

  template <class T>
  TESSERA_HOST_AND_DEVICE A dot(const T* a, const T* b, std::int64_t n) const {
    A sum = 0;
    const auto add = [&](std::int64_t c) {
      const Pack<T> x = load(a + c), y = load(b + c);
      for (int j = 0; j < V; ++j) sum += static_cast<A>(x.of[j]) * static_cast<A>(y.of[j]);
    };
    if constexpr (kAll) {
      for (int i = 0; i < M; ++i)
        if (const std::int64_t c = (i * L + lane) * V; c < n) add(c);
    } else {
      for (std::int64_t c = lane * V; c < n; c += L * V) add(c);
    }
    return total.sum(sum);
  }

  struct Sums {
    TESSERA_HOST_AND_DEVICE Sums(const Lanes& lanes, std::int64_t first, std::int64_t n)
        : begin((kAll ? 0 : first) + lanes.lane * V), n(n) {}
    TESSERA_HOST_AND_DEVICE void scale(A factor) {
      for (A& sum : of) sum *= factor;
    }
    template <class T>
    TESSERA_HOST_AND_DEVICE void add(A factor, const T* row) {
      for (int i = 0; i < M; ++i) {
        if (begin + i * L * V >= n) continue;
        const Pack<T> x = load(row + begin + i * L * V);
        for (int j = 0; j < V; ++j) of[i * V + j] += factor * static_cast<A>(x.of[j]);
      }
    }
    template <class T>
    TESSERA_HOST_AND_DEVICE void write(T* row, A factor) const {
      for (int i = 0; i < M; ++i) {
        if (begin + i * L * V >= n) continue;
        Pack<T> x;
        for (int j = 0; j < V; ++j) x.of[j] = static_cast<T>(of[i * V + j] * factor);
        *reinterpret_cast<Pack<T>*>(row + begin + i * L * V) = x;
      }
    }
    std::int64_t begin, n;
    A of[M * V] = {};
  };
};

/// Computes a row of `out` and its number of `logs`, the logarithm of the sum of exponentials.
template <class T, class A, class Team>
TESSERA_HOST_AND_DEVICE void attend_query(const Team& team, const NeighborhoodCall& n,
                                          std::int64_t at, std::int64_t head, const Seen& keys) {
  const T* q = static_cast<const T*>(n.q) + at * n.channels;
  const T *k = static_cast<const T*>(n.k), *v = static_cast<const T*>(n.v);
  std::int64_t first = 0;
  do {  // once, unless there are more channels than a team holds
    A most = std::numeric_limits<A>::lowest(), sum = 0;  // finite: a score may be -infinity
    typename Team::Sums value(team, first, n.values);
    keys.each(head, [&](std::int64_t key) {
      const A score = static_cast<A>(n.scale) * team.dot(q, k + key * n.channels, n.channels);
      if (score > most) {
        const A factor = std::exp(most - score);
        sum *= factor;
        value.scale(factor);
        most = score;
      }
      const A weight = std::exp(score - most);
      sum += weight;
      value.add(weight, v + key * n.values);
    });
    value.write(static_cast<T*>(n.out) + at * n.values, 1 / sum);
    if (team.leads()) static_cast<A*>(n.logs)[at] = most + std::log(sum);
    first += Team::kWidth;
  } while (first < n.values);
}

/// What a query and a key that it sees contribute: to dv the `weight` times g, to dq and dk `by`
/// times k and q.
template <class A>
struct Contribution {
  A weight, by;
};
template <class T, class A, class Team>
TESSERA_HOST_AND_DEVICE __attribute__((always_inline)) inline Contribution<A> contribution(
    const Team& team, const NeighborhoodCall& n, std::int64_t query, std::int64_t key, A delta) {
  const T *q = static_cast<const T*>(n.q) + query * n.channels,
          *k = static_cast<const T*>(n.k) + key * n.channels,
          *g = static_cast<const T*>(n.g) + query * n.values,
          *v = static_cast<const T*>(n.v) + key * n.values;
  const A scale = static_cast<A>(n.scale), log = static_cast<const A*>(n.logs)[query];
  const A weight = std::exp(scale * team.dot(q, k, n.channels) - log);
  return {weight, scale * weight * (team.dot(g, v, n.values) - delta)};
}

/// Computes a row of `dq` and its number of `deltas`. kSpreads: adds to the rows of `dk` and `dv`
/// too, where no other team does meanwhile (T is A then).
template <class T, class A, bool kSpreads, class Team>
TESSERA_HOST_AND_DEVICE void gradient_of_query(const Team& team, const NeighborhoodCall& n,
                                               std::int64_t at, std::int64_t head,
                                               const Seen& keys) {
  const T *q = static_cast<const T*>(n.q) + at * n.channels, *k = static_cast<const T*>(n.k),
          *g = static_cast<const T*>(n.g) + at * n.values;
  const A delta = team.dot(g, static_cast<const T*>(n.out) + at * n.values, n.values);
  if (!kSpreads && team.leads()) static_cast<A*>(n.deltas)[at] = delta;
  for (std::int64_t first = 0; first < n.channels; first += Team::kWidth) {
    typename Team::Sums dq(team, first, n.channels);
    keys.each(head, [&](std::int64_t key) {
      const Contribution<A> c = contribution<T, A>(team, n, at, key, delta);
      dq.add(c.by, k + key * n.channels);
      if constexpr (kSpreads) {
        if (first > 0) return;
        Team::add(static_cast<A*>(n.dk) + key * n.channels, c.by, q, n.channels);
        Team::add(static_cast<A*>(n.dv) + key * n.values, c.weight, g, n.values);
      }
    });
    dq.write(static_cast<T*>(n.dq) + at * n.channels, 1);
  }
}

/// Computes a row of `dk` and of `dv`, after `deltas`: those of a key that nobody sees are zero.
template <class T, class A, class Team>
TESSERA_HOST_AND_DEVICE void gradient_of_key(const Team& team, const NeighborhoodCall& n,
                                             std::int64_t at, std::int64_t head,
                                             const Seen& queries) {
  const T *q = static_cast<const T*>(n.q), *g = static_cast<const T*>(n.g);
  const std::int64_t most = n.channels > n.values ? n.channels : n.values;
  for (std::int64_t first = 0; first < most; first += Team::kWidth) {
    typename Team::Sums dk(team, first, n.channels), dv(team, first, n.values);
    queries.each(head, [&](std::int64_t query) {
      const A delta = static_cast<const A*>(n.deltas)[query];
      const Contribution<A> c = contribution<T, A>(team, n, query, at, delta);
      dk.add(c.by, q + query * n.channels);
      dv.add(c.weight, g + query * n.values);
    });
    dk.write(static_cast<T*>(n.dk) + at * n.channels, 1);
    dv.write(static_cast<T*>(n.dv) + at * n.values, 1);
  }
}

}  // namespace tessera::detail
