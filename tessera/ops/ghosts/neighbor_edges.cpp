#include "tessera/ops/ghosts/neighbor_edges.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/ops/ghosts/detail/ghost_state.h"
#include "tessera/partition/neighbors.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {
namespace {

constexpr double kEverywhere = std::numeric_limits<double>::infinity();

// Places of rows on the host.
struct Placed {
  std::vector<double> values;
  int dims = 1;
  std::size_t count() const { return values.size() / static_cast<std::size_t>(dims); }
  std::span<const double> at(std::size_t i) const {
    return std::span(values).subspan(i * static_cast<std::size_t>(dims),
                                     static_cast<std::size_t>(dims));
  }
};

Placed placed(const char* call, const OwnedRows& rows, const at::Tensor& places) {
  const at::Tensor local = detail::local_values(places);
  if (local.dim() != 2 || local.size(0) != static_cast<std::int64_t>(rows.ids().size()) ||
      local.size(1) < 1 || !at::isFloatingType(local.scalar_type()))
    throw InvalidArgument(call, ": places of shape ", local.sizes(), " and dtype ",
                          local.scalar_type(), "; give the ", rows.ids().size(),
                          " rows of this rank x dims, in floating point");
  const at::Tensor host = local.to(at::kCPU, at::kDouble).contiguous();
  const auto* const first = host.const_data_ptr<double>();
  return {{first, first + host.numel()}, static_cast<int>(host.size(1))};
}

// Where a rank's queries are, and how far from there points matter. Without queries: empty.
std::vector<double> region_of(const Placed& queries, double reach) {
  std::vector<double> region;
  if (queries.count() == 0) return region;
  for (int d = 0; d < queries.dims; ++d) {
    double low = kEverywhere, high = -kEverywhere;
    for (std::size_t i = 0; i < queries.count(); ++i) {
      low = std::min(low, queries.at(i)[static_cast<std::size_t>(d)]);
      high = std::max(high, queries.at(i)[static_cast<std::size_t>(d)]);
    }
    region.insert(region.end(), {low, high});
  }
  region.push_back(reach);
  return region;
}

// True if an image of the place may be within reach of the region.
bool matters(std::span<const double> place, const std::vector<double>& region,
             const std::vector<double>& box) {
  if (region.empty()) return false;
  const double reach = region.back();
  double sum = 0, scale = 0;
  for (std::size_t d = 0; d < place.size(); ++d) {
    const double low = region[2 * d], high = region[2 * d + 1];
    double x = place[d];
    scale = std::max({scale, std::abs(x), std::abs(low), std::abs(high)});
    double apart = std::max({low - x, x - high, 0.0});
    if (const double period = box.empty() ? 0 : box[d]; period > 0) {
      x -= std::floor((x - low) / period) * period;  // in [low, low + period)
      apart = std::max(0.0, std::min(x - high, low + period - x));
    }
    sum += apart * apart;
  }
  return std::sqrt(sum) <= reach + 1e-9 * (reach + scale);
}

// This rank's points and those of others that matter here, by number in ascending order.
struct Around {
  std::vector<std::int64_t> numbers;
  Placed places;
};

Around around(const OwnedRows& points, const Placed& own,
              const std::vector<std::vector<double>>& regions, const std::vector<double>& box) {
  const Group group = points.group();
  detail::IdsByRank sent{std::vector<std::int64_t>(regions.size(), 0), {}};
  for (std::size_t r = 0; r < regions.size(); ++r) {
    for (std::size_t i = 0; i < own.count(); ++i) {
      if (static_cast<int>(r) != group.rank() && !matters(own.at(i), regions[r], box)) continue;
      sent.values.push_back(points.begin() + static_cast<std::int64_t>(i));
      for (const double x : own.at(i)) sent.values.push_back(std::bit_cast<std::int64_t>(x));
      sent.counts[r] += own.dims + 1;
    }
  }
  // By rank, so that numbers ascend.
  const auto arrived = group.size() > 1 ? detail::carried_by(group, sent) : sent;
  Around all{{}, {{}, own.dims}};
  for (std::size_t i = 0; i < arrived.values.size(); ++i) {
    if (i % static_cast<std::size_t>(own.dims + 1) == 0)
      all.numbers.push_back(arrived.values[i]);
    else
      all.places.values.push_back(std::bit_cast<double>(arrived.values[i]));
  }
  return all;
}

NeighborEdges as_edges(const char* call, const OwnedRows& queries, const Around& points,
                       const Neighbors& near, const std::vector<double>& box, bool loops,
                       const at::Tensor& like) {
  const auto dims = static_cast<std::size_t>(points.places.dims);
  std::vector<std::int64_t> from, to;
  std::vector<double> moved;
  for (std::size_t e = 0; e < near.size(); ++e) {
    const std::int64_t number = points.numbers[static_cast<std::size_t>(near.point[e])];
    const std::int64_t query = queries.begin() + near.query[e];
    const auto image = std::span(near.image).subspan(e * dims, dims);
    const bool here = std::ranges::all_of(image, [](int i) { return i == 0; });
    if (!loops && here && number == query) continue;
    from.push_back(number);
    to.push_back(query);
    for (std::size_t d = 0; d < dims; ++d) moved.push_back(box.empty() ? 0 : image[d] * box[d]);
  }
  const auto count = static_cast<std::int64_t>(from.size());
  at::Tensor edges = at::empty({2, count}, at::kLong);
  std::ranges::copy(to, std::ranges::copy(from, edges.mutable_data_ptr<std::int64_t>()).out);
  at::Tensor shift = at::empty({count, static_cast<std::int64_t>(dims)}, at::kDouble);
  std::ranges::copy(moved, shift.mutable_data_ptr<double>());
  const auto sizes = agree::all<std::int64_t>(queries.group(), call, [&] { return count; });
  return {from_local(edges.to(like.device()), queries.mesh(), queries.placements(1), {{1, sizes}}),
          from_local(shift.to(like.options()), queries.mesh(), queries.placements(), {{0, sizes}})};
}

}  // namespace

NeighborEdges edges_within(const OwnedRows& points, const at::Tensor& places, double radius,
                           const std::vector<double>& box, bool loops) {
  constexpr auto kCall = "edges_within";
  Placed own;
  const auto regions = agree::all<std::vector<double>>(points.group(), kCall, [&] {
    own = placed(kCall, points, places);
    points_within({}, own.values, own.dims, radius, box);  // what it refuses
    return region_of(own, radius);
  });
  const Around all = around(points, own, regions, box);
  const Neighbors near = points_within(all.places.values, own.values, own.dims, radius, box);
  return as_edges(kCall, points, all, near, box, loops, detail::local_values(places));
}

NeighborEdges nearest_edges(const OwnedRows& points, const at::Tensor& places,
                            const OwnedRows& queries, const at::Tensor& query_places, int count,
                            const std::vector<double>& box) {
  constexpr auto kCall = "nearest_edges";
  Placed own, asked;
  const auto regions = agree::all<std::vector<double>>(points.group(), kCall, [&] {
    own = placed(kCall, points, places);
    asked = placed(kCall, queries, query_places);
    if (!(queries.mesh() == points.mesh()) || queries.placements() != points.placements())
      throw InvalidArgument(kCall, ": points and queries are on different ranks");
    if (own.dims != asked.dims)
      throw InvalidArgument(kCall, ": points of ", own.dims, " dims, and queries of ", asked.dims);
    if (count > points.size() && queries.size() > 0)
      throw InvalidArgument(kCall, ": the ", count, " nearest of ", points.size(), " points");
    const Neighbors near = nearest_points(own.values, asked.values, own.dims, count, box);
    const bool enough = own.count() >= static_cast<std::size_t>(count);
    return region_of(asked,
                     !enough || near.size() == 0 ? kEverywhere : std::ranges::max(near.distance));
  });
  const Around all = around(points, own, regions, box);
  const Neighbors near = nearest_points(all.places.values, asked.values, own.dims, count, box);
  return as_edges(kCall, queries, all, near, box, true, detail::local_values(query_places));
}

}  // namespace tessera
