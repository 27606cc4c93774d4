// The arithmetic of neighbourhood attention that GPUs run too, beside its definition in float64: on
// boxes of queries and keys of a field, by one lane and by teams of lanes that are threads here.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <array>
#include <barrier>
#include <numeric>
#include <thread>

#include "fields.h"
#include "tessera/comm/internal/part.h"
#include "tessera/ops/attention/detail/neighborhood_kernel.h"
#include "tessera/ops/attention/detail/neighborhood_local.h"

namespace tessera::test::neighborhood_kernel_test {
namespace {

using detail::NeighborhoodCall;
using detail::Seen;
using detail::WindowDim;
using Numbers = std::vector<double>;

/// A window, a box of queries, and a box of keys that holds all that those see.
WindowDim drawn_window(Draw& draw) {
  WindowDim d;
  d.kernel = draw.between(1, 4);
  d.dilation = draw.between(1, 3);
  d.causal = draw.chance(35);
  d.extent = d.causal ? draw.between(1, 9) : d.kernel * d.dilation + draw.below(5);
  d.queries_begin = draw.below(static_cast<int>(d.extent));
  d.queries = draw.between(1, static_cast<int>(d.extent - d.queries_begin));
  const Interval keys = detail::seen_keys({d.kernel, d.dilation, d.causal},
                                          {d.queries_begin, d.queries_begin + d.queries}, d.extent);
  d.keys_begin = draw.between(0, static_cast<int>(keys.begin));
  d.keys = draw.between(static_cast<int>(keys.end), static_cast<int>(d.extent)) - d.keys_begin;
  return d;
}

TEST(NeighborhoodKernel, QueriesOfAKeyAreThoseThatSeeIt) {
  Draw draw(21);
  for (int n = 0; n < 3000; ++n) {
    const WindowDim d = drawn_window(draw);
    for (std::int64_t key = d.keys_begin; key < d.keys_begin + d.keys; ++key) {
      std::vector<std::int64_t> expected, got;
      for (std::int64_t q = d.queries_begin; q < d.queries_begin + d.queries; ++q) {
        const auto keys = d.keys_of(q);
        for (std::int64_t j = 0; j < keys.count; ++j)
          if (keys.begin + j * keys.step == key) expected.push_back(q);
      }
      const auto queries = d.queries_of(key);
      for (std::int64_t i = 0; i < queries.count; ++i)
        got.push_back(queries.begin + i * queries.step);
      ASSERT_EQ(got, expected) << "key " << key << " extent " << d.extent << " kernel " << d.kernel
                               << " dilation " << d.dilation << " causal " << d.causal
                               << " queries from " << d.queries_begin << ", " << d.queries;
    }
  }
}

/// Tensors of a call, of elements T and sums A.
template <class T, class A>
struct Given {
  NeighborhoodCall call;
  std::vector<T> q, k, v, g, out, dq, dk, dv;
  std::vector<A> logs, deltas;

  static std::vector<T> drawn(Draw& draw, std::int64_t n) {
    std::vector<T> all;
    for (std::int64_t i = 0; i < n; ++i)
      all.push_back(static_cast<T>(static_cast<float>(draw.between(-400, 400)) / 200));
    return all;
  }
  Given(Draw& draw, int dims, std::int64_t channels, std::int64_t values) {
    NeighborhoodCall& n = call;
    for (int i = 3 - dims; i < 3; ++i) {
      n.dims[i] = drawn_window(draw);
      n.queries *= n.dims[i].queries;
      n.keys *= n.dims[i].keys;
    }
    n.batch = draw.between(1, 2);
    n.heads = draw.between(1, 2);
    n.channels = channels;
    n.values = values;
    n.scale = 0.4;
    const std::int64_t queries = n.batch * n.queries * n.heads, keys = n.batch * n.keys * n.heads;
    q = drawn(draw, queries * channels);
    k = drawn(draw, keys * channels);
    v = drawn(draw, keys * values);
    g = drawn(draw, queries * values);
    out.resize(g.size());
    dq.resize(q.size());
    dk.resize(k.size());
    dv.resize(v.size());
    logs.resize(static_cast<std::size_t>(queries));
    deltas.resize(logs.size());
    n.q = q.data();
    n.k = k.data();
    n.v = v.data();
    n.g = g.data();
    n.out = out.data();
    n.logs = logs.data();
    n.deltas = deltas.data();
    n.dq = dq.data();
    n.dk = dk.data();
    n.dv = dv.data();
  }
};

double product(const double* a, const double* b, std::int64_t n) {
  return std::inner_product(a, a + n, b, 0.0);
}

/// Value and gradients by the definition, from which queries and keys are together.
struct Expected {
  Numbers out, dq, dk, dv;

  template <class T, class A>
  explicit Expected(const Given<T, A>& from) {
    const NeighborhoodCall& n = from.call;
    const auto numbers = [](const auto& of) { return Numbers(of.begin(), of.end()); };
    const Numbers q = numbers(from.q), k = numbers(from.k), v = numbers(from.v),
                  g = numbers(from.g);
    out.resize(g.size());
    dq.resize(q.size());
    dk.resize(k.size());
    dv.resize(v.size());
    const auto sees = [&](std::int64_t query, std::int64_t key) {
      for (int i = 3; i-- > 0;) {
        const WindowDim& d = n.dims[i];
        const auto keys = Neighborhood{d.kernel, d.dilation, d.causal}.keys(
            d.queries_begin + query % d.queries, d.extent);
        const std::int64_t after = d.keys_begin + key % d.keys - keys.begin;
        if (after < 0 || after % d.dilation || after / d.dilation >= keys.count) return false;
        query /= d.queries;
        key /= d.keys;
      }
      return true;
    };
    for (std::int64_t row = 0; row < n.batch * n.queries * n.heads; ++row) {
      const std::int64_t head = row % n.heads, query = row / n.heads % n.queries,
                         batch = row / n.heads / n.queries;
      std::vector<std::int64_t> keys;
      Numbers weights;
      for (std::int64_t key = 0; key < n.keys; ++key)
        if (sees(query, key)) {
          keys.push_back((batch * n.keys + key) * n.heads + head);
          weights.push_back(
              std::exp(n.scale * product(q.data() + row * n.channels,
                                         k.data() + keys.back() * n.channels, n.channels)));
        }
      const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
      double mean = 0;  // of what each value would change, weighted
      for (std::size_t j = 0; j < keys.size(); ++j) {
        weights[j] /= sum;
        mean += weights[j] *
                product(g.data() + row * n.values, v.data() + keys[j] * n.values, n.values);
        for (std::int64_t c = 0; c < n.values; ++c) {
          out[row * n.values + c] += weights[j] * v[keys[j] * n.values + c];
          dv[keys[j] * n.values + c] += weights[j] * g[row * n.values + c];
        }
      }
      for (std::size_t j = 0; j < keys.size(); ++j) {
        const double by =
            n.scale * weights[j] *
            (product(g.data() + row * n.values, v.data() + keys[j] * n.values, n.values) - mean);
        for (std::int64_t c = 0; c < n.channels; ++c) {
          dq[row * n.channels + c] += by * k[keys[j] * n.channels + c];
          dk[keys[j] * n.channels + c] += by * q[row * n.channels + c];
        }
      }
    }
  }
};

template <class T>
void expect_near(const std::vector<T>& got, const Numbers& expected, double limit,
                 const std::string& what) {
  double most = 0;
  for (std::size_t i = 0; i < got.size(); ++i)
    most = std::max(
        most, std::abs(static_cast<double>(got[i]) - expected[i]) / (1 + std::abs(expected[i])));
  EXPECT_LT(most, limit) << what;
}

template <class T, class A>
void expect_same(const Given<T, A>& got, const Expected& expected, double limit,
                 const std::string& what) {
  expect_near(got.out, expected.out, limit, "value, " + what);
  expect_near(got.dq, expected.dq, limit, "dq, " + what);
  expect_near(got.dk, expected.dk, limit, "dk, " + what);
  expect_near(got.dv, expected.dv, limit, "dv, " + what);
}

/// Calls f(at, head, what it sees) for all rows, as teams of a kernel do.
template <bool kOfKey, class F>
void each_row(const NeighborhoodCall& n, const F& f) {
  const std::int64_t positions = kOfKey ? n.keys : n.queries;
  for (std::int64_t at = 0; at < n.batch * positions * n.heads; ++at) {
    const std::int64_t row = at / n.heads;
    f(at, at % n.heads, detail::seen<kOfKey>(n, row / positions, row % positions));
  }
}

/// All three kernels of a GPU, by one team.
template <class T, class A, class Team>
void run_kernels(const Team& team, const NeighborhoodCall& n) {
  each_row<false>(n, [&](std::int64_t at, std::int64_t head, const Seen& keys) {
    detail::attend_query<T, A>(team, n, at, head, keys);
  });
  team.meet();
  each_row<false>(n, [&](std::int64_t at, std::int64_t head, const Seen& keys) {
    detail::gradient_of_query<T, A, false>(team, n, at, head, keys);
  });
  team.meet();
  each_row<true>(n, [&](std::int64_t at, std::int64_t head, const Seen& queries) {
    detail::gradient_of_key<T, A>(team, n, at, head, queries);
  });
}

template <class A>
struct AloneOnCpu : detail::Alone<A> {
  void meet() const {}
};

TEST(NeighborhoodKernel, OneLaneGivesTheDefinition) {
  Draw draw(22);
  for (int n = 0; n < 90; ++n) {
    // More channels than a lane keeps sums of, now and then.
    const int most = n % 30 == 0 ? 300 : 9;
    Given<double, double> given(draw, 1 + n % 3, draw.between(most - 8, most),
                                draw.between(0, most));
    const Expected expected(given);
    run_kernels<double, double>(AloneOnCpu<double>(), given.call);
    expect_same(given, expected, 1e-12, concat("gathered, case ", n));
    std::ranges::fill(given.dk, 0);
    std::ranges::fill(given.dv, 0);
    each_row<false>(given.call, [&](std::int64_t at, std::int64_t head, const Seen& keys) {
      detail::gradient_of_query<double, double, true>(detail::Alone<double>(), given.call, at, head,
                                                      keys);
    });
    expect_same(given, expected, 1e-12, concat("spread, case ", n));
  }
}

/// The lanes of a team, which are threads: a sum waits for all of them.
template <class A, int L>
struct Meeting {
  std::barrier<> all{L};
  std::array<A, L> parts{};
};
template <class A, int L>
struct Met {
  Meeting<A, L>* meeting;
  int lane;
  A sum(A x) const {
    meeting->parts[static_cast<std::size_t>(lane)] = x;
    meeting->all.arrive_and_wait();
    const A total = std::accumulate(meeting->parts.begin(), meeting->parts.end(), A(0));
    meeting->all.arrive_and_wait();
    return total;
  }
};

template <class T, class A, int L, int V, int M, bool kAll>
void expect_of_lanes(Draw& draw, std::int64_t channels, std::int64_t values, double limit) {
  struct Team : detail::Lanes<A, L, V, M, kAll, Met<A, L>> {
    void meet() const { this->total.meeting->all.arrive_and_wait(); }
  };
  Given<T, A> given(draw, draw.between(1, 2), channels, values);
  const Expected expected(given);
  Meeting<A, L> meeting;
  std::vector<std::jthread> lanes;
  for (int lane = 0; lane < L; ++lane)
    lanes.emplace_back(
        [&, lane] { run_kernels<T, A>(Team{{lane, {&meeting, lane}}}, given.call); });
  lanes.clear();
  expect_same(given, expected, limit,
              concat(L, " lanes of ", M, " x ", V, ", ", channels, " channels, ", values,
                     " values, ", sizeof(T), " bytes"));
}

// Teams as neighborhood_launch.cu has them, and narrower ones, whose rows are wider than they are.
TEST(NeighborhoodKernel, TeamsOfLanesGiveTheDefinition) {
  Draw draw(23);
  for (int n = 0; n < 2; ++n) {
    expect_of_lanes<float, float, 8, 4, 1, true>(draw, 32, 4 * draw.between(1, 8), 1e-5);
    expect_of_lanes<c10::Half, float, 8, 4, 1, true>(draw, 4 * draw.between(1, 8), 32, 6e-3);
    expect_of_lanes<c10::BFloat16, float, 8, 4, 1, true>(draw, 8, 12, 5e-2);
    expect_of_lanes<double, double, 4, 1, 2, false>(draw, draw.between(1, 30), draw.between(0, 20),
                                                    1e-12);
    expect_of_lanes<c10::Half, float, 2, 1, 4, false>(draw, draw.between(1, 20),
                                                      draw.between(1, 20), 6e-3);
    expect_of_lanes<float, float, 4, 4, 2, true>(draw, 4 * draw.between(1, 8), 28, 1e-5);
  }
}

// Scores that are not finite are what softmax makes of them.
TEST(NeighborhoodKernel, ScoresThatAreNotFinite) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  NeighborhoodCall n;
  n.dims[2] = {3, 3, 1, false, 0, 1, 0, 3};
  n.queries = n.batch = n.heads = n.channels = n.values = 1;
  n.keys = 3;
  for (const auto& [scores, expected] :
       {std::pair(Numbers{-inf, 1, 1}, 2.5), {{1, -inf, 1}, 2.0}, {{-inf, -inf, 7}, 3.0}}) {
    const double q = 1;
    const Numbers values{1, 2, 3};
    double out = 0, log = 0;
    n.q = &q;
    n.k = scores.data();
    n.v = values.data();
    n.out = &out;
    n.logs = &log;
    detail::attend_query<double, double>(detail::Alone<double>(), n, 0, 0, detail::seen(n, 0, 0));
    EXPECT_DOUBLE_EQ(out, expected);
  }
}

// The kernels that CUDA's compiler made say that they are there, without a GPU.
TEST(NeighborhoodKernel, ItsLibraryForGpusLoads) {
#ifdef TESSERA_HAS_CUDA_KERNELS
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("tessera::_neighborhood_backward", "");
  if (dlopen("libtorch_cuda.so", RTLD_LAZY) == nullptr)
    GTEST_SKIP() << "libtorch_cuda.so does not load here: " << dlerror();
  const auto part = detail::load_part("libtessera_cuda.so");
  EXPECT_TRUE(part.built);
  EXPECT_EQ(part.problem, "");
  EXPECT_TRUE(op.hasKernelForDispatchKey(c10::DispatchKey::CUDA));
#else
  GTEST_SKIP() << "no kernels for GPUs in this build";
#endif
}

}  // namespace
}  // namespace tessera::test::neighborhood_kernel_test
