#pragma once
// Points near others: within a radius, or the nearest ones, in a box that may be periodic. Exact,
// by a grid of cells of about one point each (the linked cells of molecular dynamics; Hockney and
// Eastwood, 1988): time grows with the points and the pairs that are found.
//
//   const std::vector<double> places{0.1, 0.1, 0.9, 0.1};               // 2 points x 2 dims
//   const std::vector<double> box{1, 1};                                 // periodic in both
//   Neighbors near = points_within(places, places, 2, 0.3, box);
//   // point 1 is near query 0, one box to the left: {.point 1, .query 0, .image {-1, 0}}

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

/// Pairs of a point and a query, by query in ascending order.
struct Neighbors {
  std::vector<std::int64_t> point, query;
  /// Pairs x dims: by how many boxes the point is moved. The vector from the query to the point is
  /// point + image * box - query. Zeros where a dim is not periodic.
  std::vector<int> image;
  /// The length of that vector.
  std::vector<double> distance;
  std::size_t size() const { return point.size(); }
};

/// The points at most `radius` away from each query: every image of a periodic point that is. Pairs
/// of one query are in ascending order of the point, then of the image. A query that is a point
/// itself finds itself, at distance 0.
///
/// `points`, `queries`: numbers x dims, row-major; they may lie anywhere. `box`: the period along
/// each dim, 0 where there is none; empty: none anywhere. Throws InvalidArgument for numbers that
/// do not fit, coordinates and periods that are not finite, a negative period or radius, and dims
/// below 1 or above 8.
Neighbors points_within(std::span<const double> points, std::span<const double> queries, int dims,
                        double radius, std::span<const double> box = {});

/// The `count` nearest points of each query, nearest first, and of points equally far the ones with
/// lower numbers; all points if there are fewer. Of a periodic point the nearest image counts, and
/// of images equally far the one that is lower in the first dim that differs. Throws as
/// points_within(), and for a count below 1.
Neighbors nearest_points(std::span<const double> points, std::span<const double> queries, int dims,
                         int count, std::span<const double> box = {});

}  // namespace tessera
