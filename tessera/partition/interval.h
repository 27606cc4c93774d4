#pragma once
// Half-open intervals of indices, and boxes of them.

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <vector>

namespace tessera {

/// a / b rounded down; b is not 0.
inline std::int64_t floor_div(std::int64_t a, std::int64_t b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
/// a / b rounded up.
inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return -floor_div(-a, b); }

/// Indices begin, ..., end - 1. Empty if end <= begin.
struct Interval {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return std::max<std::int64_t>(end - begin, 0); }
  bool empty() const { return end <= begin; }
  bool contains(std::int64_t i) const { return begin <= i && i < end; }
  bool contains(const Interval& other) const {
    return other.empty() || (begin <= other.begin && other.end <= end);
  }
  Interval shifted(std::int64_t by) const { return {begin + by, end + by}; }
  bool operator==(const Interval&) const = default;
};

inline Interval intersect(const Interval& a, const Interval& b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

inline std::ostream& operator<<(std::ostream& out, const Interval& i) {
  return out << '[' << i.begin << ", " << i.end << ')';
}

/// One interval per dim.
using Box = std::vector<Interval>;

/// Number of elements; 1 for a box without dims (a scalar).
inline std::int64_t volume(const Box& box) {
  std::int64_t n = 1;
  for (const Interval& i : box) n *= i.size();
  return n;
}

/// The intersection of two boxes with the same number of dims.
inline Box intersect(const Box& a, const Box& b) {
  Box both(a.size());
  for (std::size_t d = 0; d < a.size(); ++d) both[d] = intersect(a[d], b[d]);
  return both;
}

/// Disjoint boxes, none empty, that together are `box` without `core`: strips before and after the
/// core, dim by dim, the first dim's the longest.
inline std::vector<Box> difference(Box box, const Box& core) {
  std::vector<Box> strips;
  if (volume(box) == 0) return strips;
  const Box inner = intersect(box, core);
  if (volume(inner) == 0) return {box};
  for (std::size_t d = 0; d < box.size(); ++d) {
    const Interval whole = box[d];
    for (const Interval& part :
         {Interval{whole.begin, inner[d].begin}, Interval{inner[d].end, whole.end}}) {
      if (part.empty()) continue;
      box[d] = part;
      strips.push_back(box);
    }
    box[d] = inner[d];
  }
  return strips;
}

}  // namespace tessera
