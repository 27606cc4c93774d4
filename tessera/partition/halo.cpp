#include "tessera/partition/halo.h"

#include <algorithm>
#include <limits>

#include "tessera/base/error.h"

namespace tessera {
namespace {

std::int64_t elements(const std::vector<HaloPiece>& pieces) {
  std::int64_t n = 0;
  for (const HaloPiece& piece : pieces) n += volume(piece.source);
  return n;
}

// The part of `segment` whose values are in `held`.
Segment restricted(const Segment& segment, Interval held) {
  const Interval sources = intersect(segment.sources(), held);
  if (sources.empty())
    return {{segment.target.begin, segment.target.begin}, segment.source, segment.step};
  switch (segment.step) {
    case 0:
      return segment;
    case 1:
      return {{segment.target.begin + sources.begin - segment.source,
               segment.target.begin + sources.end - segment.source},
              sources.begin,
              1};
    default:
      return {{segment.target.begin + segment.source - (sources.end - 1),
               segment.target.begin + segment.source - sources.begin + 1},
              sources.end - 1,
              -1};
  }
}

// Calls visit(product) for every combination of one segment per dim, in row-major order.
template <class Visit>
void for_each_product(const std::vector<std::vector<Segment>>& segments,
                      std::vector<Segment>& chosen, std::size_t dim, const Visit& visit) {
  if (dim == segments.size()) {
    visit(chosen);
    return;
  }
  for (const Segment& segment : segments[dim]) {
    chosen[dim] = segment;
    for_each_product(segments, chosen, dim + 1, visit);
  }
}

std::vector<std::vector<Segment>> resolve_all(const Box& needed,
                                              const std::vector<std::int64_t>& shape,
                                              const std::vector<Edge>& edges) {
  std::vector<std::vector<Segment>> segments(shape.size());
  for (std::size_t d = 0; d < shape.size(); ++d)
    segments[d] = resolve(needed[d], shape[d], edges[d]);
  return segments;
}

HaloPiece piece_of(int rank, const std::vector<Segment>& segments) {
  HaloPiece piece{rank, {}, {}, {}};
  for (const Segment& segment : segments) {
    piece.source.push_back(segment.sources());
    piece.target.push_back(segment.target);
    piece.step.push_back(segment.step);
  }
  return piece;
}

// The part of a product of segments whose values are in `held`; false if there is none.
bool restrict_to(const Box& held, std::vector<Segment>& segments) {
  for (std::size_t d = 0; d < segments.size(); ++d) {
    segments[d] = restricted(segments[d], held[d]);
    if (segments[d].target.empty()) return false;
  }
  return true;
}

}  // namespace

void Window::check() const {
  if (kernel < 1 || stride < 1 || dilation < 1)
    throw InvalidArgument("a window of kernel ", kernel, ", stride ", stride, ", dilation ",
                          dilation, "; each is at least 1");
  // So that no sum of products of them overflows.
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  if (std::max({kernel, stride, dilation, padding}) > most || padding < -most)
    throw InvalidArgument("a window of kernel ", kernel, ", stride ", stride, ", padding ", padding,
                          ", dilation ", dilation, "; each is at most ", most);
}

Interval Window::inputs(Interval outputs) const {
  if (outputs.empty()) return {0, 0};
  return {outputs.begin * stride - padding,
          (outputs.end - 1) * stride - padding + (kernel - 1) * dilation + 1};
}

Interval Window::transposed_inputs(Interval outputs) const {
  if (outputs.empty()) return {0, 0};
  const std::int64_t reach = (kernel - 1) * dilation;
  return {ceil_div(outputs.begin + padding - reach, stride),
          floor_div(outputs.end - 1 + padding, stride) + 1};
}

std::int64_t Window::outputs(std::int64_t extent, std::int64_t padding_after) const {
  const std::int64_t room = extent + padding + padding_after - dilation * (kernel - 1) - 1;
  return room < 0 ? 0 : room / stride + 1;
}

Interval Segment::sources() const {
  if (target.empty()) return {source, source};
  switch (step) {
    case 0:
      return {source, source + 1};
    case 1:
      return {source, source + target.size()};
    default:
      return {source - target.size() + 1, source + 1};
  }
}

std::vector<Segment> resolve(Interval needed, std::int64_t extent, Edge edge) {
  std::vector<Segment> segments;
  if (needed.empty() || extent <= 0) return segments;
  if (edge == Edge::zero || edge == Edge::replicate) {
    if (edge == Edge::replicate && needed.begin < 0)
      segments.push_back({{needed.begin, std::min<std::int64_t>(needed.end, 0)}, 0, 0});
    if (const Interval inside = intersect(needed, {0, extent}); !inside.empty())
      segments.push_back({inside, inside.begin, 1});
    if (edge == Edge::replicate && needed.end > extent)
      segments.push_back({{std::max(needed.begin, extent), needed.end}, extent - 1, 0});
    return segments;
  }
  if (edge == Edge::reflect && extent == 1) return {{needed, 0, 0}};
  // Reflect: one period goes up over all elements, and down over all but the two ends.
  const std::int64_t period = edge == Edge::circular ? extent : 2 * (extent - 1);
  for (std::int64_t at = needed.begin; at < needed.end;) {
    const std::int64_t phase = at - floor_div(at, period) * period;
    const bool up = phase < extent;
    const std::int64_t run = std::min((up ? extent : period) - phase, needed.end - at);
    segments.push_back({{at, at + run}, up ? phase : period - phase, up ? 1 : -1});
    at += run;
  }
  return segments;
}

std::int64_t HaloPlan::sent() const { return elements(sends); }
std::int64_t HaloPlan::received() const { return elements(receives); }

HaloPlan halo_plan(const Sharding& input, const std::vector<Edge>& edges,
                   const std::function<Box(int)>& needed, int position) {
  if (edges.size() != input.shape().size())
    throw InvalidArgument(edges.size(), " edges for an array with ", input.shape().size(), " dims");
  auto checked = [&](int p) {
    Box box = needed(p);
    if (box.size() != input.shape().size())
      throw InvalidArgument("position ", p, " needs a box of ", box.size(),
                            " dims from an array with ", input.shape().size());
    return box;
  };
  auto same_replica = [&](int a, int b) {
    return std::ranges::all_of(input.free_axes(), [&](int axis) {
      return input.coordinate(a, axis) == input.coordinate(b, axis);
    });
  };

  HaloPlan plan;
  plan.needed = checked(position);
  const Box mine = input.box(position);
  std::vector<Segment> chosen(input.shape().size());
  for_each_product(resolve_all(plan.needed, input.shape(), edges), chosen, 0,
                   [&](const std::vector<Segment>& product) {
                     Box sources;
                     for (const Segment& segment : product) sources.push_back(segment.sources());
                     input.for_each_overlapping(sources, [&](int holder, const Box&) {
                       if (!same_replica(holder, position)) return;
                       auto part = product;
                       if (!restrict_to(input.box(holder), part)) return;
                       (holder == position ? plan.copies : plan.receives)
                           .push_back(piece_of(input.rank(holder), part));
                     });
                   });
  for (int receiver = 0; receiver < input.positions(); ++receiver) {
    if (receiver == position || !same_replica(receiver, position) || volume(mine) == 0) continue;
    for_each_product(resolve_all(checked(receiver), input.shape(), edges), chosen, 0,
                     [&](const std::vector<Segment>& product) {
                       auto part = product;
                       if (restrict_to(mine, part))
                         plan.sends.push_back(piece_of(input.rank(receiver), part));
                     });
  }
  auto by_rank = [](const HaloPiece& a, const HaloPiece& b) { return a.rank < b.rank; };
  std::ranges::stable_sort(plan.sends, by_rank);
  std::ranges::stable_sort(plan.receives, by_rank);
  return plan;
}

}  // namespace tessera
