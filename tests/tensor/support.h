#pragma once
// What the tests of sharded tensors share: specs drawn at random, and comparison with plain
// libtorch.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../support/ranks.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/tensor/policy.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::test {

// Cases over processes share a job: each begins with its policies as they are by default.
inline const bool kPoliciesAnew =
    (before_each() = [](DistributedManager& job) { set_policies(job, {}); }, true);

inline at::Tensor randn(at::IntArrayRef shape, at::ScalarType type = at::kFloat) {
  return at::randn(shape, generator(), type);
}
inline at::Tensor rand(at::IntArrayRef shape, at::ScalarType type = at::kFloat) {
  return at::rand(shape, generator(), type);
}
inline at::Tensor randint(std::int64_t high, at::IntArrayRef shape) {
  return at::randint(high, shape, generator(), at::kLong);
}
/// Parameters that are the same on every rank.
inline void fill(torch::nn::Module& module, std::uint64_t with) {
  const at::NoGradGuard no_grad;
  seed(with);
  for (const auto& p : module.parameters()) p.copy_(randn(p.sizes(), at::kDouble).mul_(0.4));
}

/// The global value, whatever its placements.
inline at::Tensor whole(const at::Tensor& t) {
  return is_sharded(t) ? full_tensor(t.detach()) : t.detach();
}

/// Largest difference relative to the largest value of `expected`, or to `floor` if that is larger;
/// infinite where shapes, dtypes or NaNs differ.
inline double difference(const at::Tensor& got, const at::Tensor& expected, double floor = 1e-30) {
  const at::Tensor a = whole(got), b = whole(expected);
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type())
    return std::numeric_limits<double>::infinity();
  if (a.numel() == 0) return 0;
  const auto real = [](const at::Tensor& t) {
    return (t.is_complex() ? at::view_as_real(t.resolve_conj()) : t).to(at::kDouble);
  };
  const at::Tensor x = real(a), y = real(b);
  if (!at::isnan(x).equal(at::isnan(y))) return std::numeric_limits<double>::infinity();
  const at::Tensor both = at::where(at::isfinite(y), y, at::zeros_like(y));
  const double scale = std::max({both.abs().max().item<double>(), floor, 1e-30});
  const at::Tensor d =
      at::where(x.eq(y).logical_or(at::isnan(y)), at::zeros_like(x), (x - y).abs());
  return d.max().item<double>() / scale;
}

/// A mesh of these axes over ranks in an order that is neither contiguous nor ascending along any
/// of them: 2, 0, 3, 1 of four.
inline Mesh mapped(std::vector<Axis> axes) {
  int ranks = 1;
  for (const Axis& axis : axes) ranks *= axis.size;
  std::vector<int> table;
  for (int i = 0; i < ranks; ++i) table.push_back(i % 2 == 0 ? (ranks + i) / 2 : i / 2);
  return {std::move(axes), std::move(table)};
}

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : engine_(seed) {}
  int below(int n) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(n)); }
  int between(int low, int high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
  template <class T>
  const T& of(const std::vector<T>& all) {
    return all[below(static_cast<int>(all.size()))];
  }

  /// `parts` sizes that sum to `extent`, often uneven, often with zeros.
  Sizes sizes(std::int64_t extent, int parts) {
    Sizes all(parts, 0);
    switch (below(3)) {
      case 0:
        for (std::int64_t i = 0; i < extent; ++i)
          ++all[i * parts / std::max<std::int64_t>(extent, 1)];
        break;
      case 1:
        for (std::int64_t i = 0; i < extent; ++i) ++all[below(parts)];
        break;
      default:
        all[below(parts)] = extent;
    }
    return all;
  }

  /// A spec of any placements; `partial`: also partial ones, extrema only if the values are not
  /// complex.
  ShardSpec spec(const DeviceMesh& mesh, const std::vector<std::int64_t>& shape,
                 bool partial = true, bool complex = false) {
    std::vector<Placement> placements;
    std::map<int, int> parts;
    for (const Axis& axis : mesh.mesh().axes()) {
      const int kind = below(partial ? 5 : 4);
      if (kind == 4) {
        // Mostly sums, which operators make; the others only users make.
        const int op = below(10);
        placements.push_back(Partial(op == 9               ? ReduceOp::Kind::avg
                                     : op == 8 && !complex ? ReduceOp::Kind::max
                                     : op == 7             ? ReduceOp::Kind::product
                                                           : ReduceOp::Kind::sum));
      } else if (kind == 0 || shape.empty()) {
        placements.push_back(Replicate());
      } else {
        const int d = below(static_cast<int>(shape.size()));
        placements.push_back(Shard(d));
        parts[d] = (parts.contains(d) ? parts[d] : 1) * axis.size;
      }
    }
    ShardSizes all;
    for (const auto& [d, n] : parts) all[d] = sizes(shape[d], n);
    return ShardSpec(mesh, shape, placements, all);
  }

  /// A mesh over axes(ranks), as mapped().
  Mesh mesh(int ranks) { return mapped(axes(ranks)); }

  /// A mesh of these axes, half of the time over ranks in an order of its own: groups along an axis
  /// are then neither contiguous nor ascending.
  Mesh mapped(std::vector<Axis> axes) {
    int ranks = 1;
    for (const Axis& axis : axes) ranks *= axis.size;
    std::vector<int> table(static_cast<std::size_t>(ranks));
    std::iota(table.begin(), table.end(), 0);
    if (chance(50)) {
      for (int i = ranks - 1; i > 0; --i) std::swap(table[i], table[below(i + 1)]);
    }
    return {std::move(axes), std::move(table)};
  }

  /// Axes of `ranks` ranks, one to three; of eight mostly three of two.
  std::vector<Axis> axes(int ranks) {
    std::vector<int> sizes{ranks};
    if (ranks == 4 && chance(50)) sizes = {2, 2};
    if (ranks == 8) sizes = chance(70) ? std::vector{2, 2, 2} : std::vector{2, 4};
    while (sizes.size() < 3 && chance(25))
      sizes.insert(sizes.begin() + below(static_cast<int>(sizes.size()) + 1), 1);
    std::vector<Axis> all;
    for (const int n : sizes)
      all.push_back({std::string(1, static_cast<char>('a' + all.size())), n});
    return all;
  }

 private:
  std::mt19937_64 engine_;
};

/// `value` laid out by `spec`, as a leaf.
inline at::Tensor leaf(const at::Tensor& value, const ShardSpec& spec, bool requires_grad = true) {
  at::Tensor t = distribute_tensor(value.detach().clone(at::MemoryFormat::Preserve), spec).detach();
  return requires_grad && at::isFloatingType(t.scalar_type()) ? t.requires_grad_(true) : t;
}

/// Of a case whose ranks share variables or a folder: as processes it does nothing.
inline void on_threads(int ranks, const std::function<void(DistributedManager&)>& body) {
  if (!process()) on_ranks(ranks, body);
}

}  // namespace tessera::test
