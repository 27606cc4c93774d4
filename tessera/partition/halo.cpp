#include "tessera/partition/halo.h"

#include <algorithm>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/internal/colour.h"
#include "tessera/base/internal/svg.h"
#include "tessera/base/text.h"

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
  if (segment.step == 0) return segment;
  // Of the first target that is left.
  const std::int64_t source = segment.step > 0 ? sources.begin : sources.end - 1;
  const std::int64_t begin = segment.target.begin + segment.step * (source - segment.source);
  return {{begin, begin + sources.size()}, source, segment.step};
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
  const std::int64_t last = source + step * (target.size() - 1);
  return {std::min(source, last), std::max(source, last) + 1};
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
  std::ranges::stable_sort(plan.sends, {}, &HaloPiece::rank);
  std::ranges::stable_sort(plan.receives, {}, &HaloPiece::rank);
  return plan;
}

namespace {

std::string text_of(const Box& box) { return joined(box, " x "); }

std::string text_of(const HaloPiece& piece) {
  TextStream out;
  out << text_of(piece.source);
  if (piece.target == piece.source) return std::move(out).str();
  out << " as ";
  for (std::size_t d = 0; d < piece.target.size(); ++d)
    out << (d ? " x " : "")
        << (piece.step[d] < 0    ? "~"
            : piece.step[d] == 0 ? "="
                                 : "")
        << piece.target[d];
  return std::move(out).str();
}

constexpr int kPanel = 220, kGap = 36, kTop = 34;

// The array, and everything that the first positions need beyond it.
Box range_of(const Sharding& input, const std::function<Box(int)>& needed, int positions) {
  Box range;
  for (const std::int64_t extent : input.shape()) range.push_back({0, extent});
  for (int p = 0; p < positions; ++p) {
    const Box box = needed(p);
    if (volume(box) == 0) continue;
    for (std::size_t d = 0; d < range.size(); ++d)
      range[d] = {std::min(range[d].begin, box[d].begin), std::max(range[d].end, box[d].end)};
  }
  return range;
}

}  // namespace

std::string to_string(const HaloPlan& plan) {
  TextStream out;
  out << "needs " << text_of(plan.needed) << "; sends " << plan.sent() << " elements, receives "
      << plan.received() << '\n';
  for (const HaloPiece& p : plan.sends)
    out << "  sends to " << p.rank << ": " << text_of(p) << '\n';
  for (const HaloPiece& p : plan.receives)
    out << "  receives from " << p.rank << ": " << text_of(p) << '\n';
  for (const HaloPiece& p : plan.copies) out << "  copies: " << text_of(p) << '\n';
  return std::move(out).str();
}

std::string visualize_halo(const Sharding& input, const std::vector<Edge>& edges,
                           const std::function<Box(int)>& needed, int rows, int columns,
                           int panels) {
  const int dims = static_cast<int>(input.shape().size());
  if (rows < 0 || rows >= dims || columns < -1 || columns >= dims || rows == columns)
    throw InvalidArgument("dims ", rows, " and ", columns, " of a field of ", dims,
                          " dims cannot be drawn");
  const auto along = [&](const Box& box, int d) { return d < 0 ? Interval{0, 1} : box[d]; };
  const int shown = std::min(input.positions(), panels), wide = std::min(shown, 4),
            high = (shown + wide - 1) / std::max(wide, 1);
  // All panels show the same range.
  const Box range = range_of(input, needed, shown);
  const Interval all_rows = along(range, rows), all_columns = along(range, columns);
  const double scale =
      static_cast<double>(kPanel) /
      static_cast<double>(std::max<std::int64_t>({all_rows.size(), all_columns.size(), 1}));
  detail::Svg svg(wide * (kPanel + kGap) + kGap, high * (kPanel + kGap + kTop) + kGap, 12);
  svg.element(
      "<defs><pattern id=\"own\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\">"
      "<path d=\"M0 6L6 0\" stroke=\"#444\"/></pattern></defs>");
  for (int p = 0; p < shown; ++p) {
    const double left = kGap + (p % wide) * (kPanel + kGap),
                 top = kTop + (p / wide) * (kPanel + kGap + kTop);
    const HaloPlan plan = halo_plan(input, edges, needed, p);
    svg.text(left, top - 8,
             concat("rank ", input.rank(p), ": ", plan.received(), " elements received, ",
                    plan.sent(), " sent"));
    const auto draw = [&](const Box& box, const std::string& style, const std::string& title) {
      const Interval down = along(box, rows), across = along(box, columns);
      if (down.empty() || across.empty()) return;
      svg.rect(left + scale * static_cast<double>(across.begin - all_columns.begin),
               top + scale * static_cast<double>(down.begin - all_rows.begin),
               scale * static_cast<double>(across.size()), scale * static_cast<double>(down.size()),
               style, title);
    };
    for (int q = 0; q < input.positions(); ++q) {
      const Box box = input.box(q);
      if (volume(box) == 0) continue;
      draw(box, concat("fill=\"", numbered_colour(q, 55, q == p ? 60 : 90), "\" stroke=\"white\""),
           concat("owned by rank ", input.rank(q), ": ", text_of(box)));
    }
    for (const HaloPiece& piece : plan.receives)
      draw(piece.target,
           concat("fill=\"", numbered_colour(input.position(piece.rank), 55, 45),
                  "\" stroke=\"#222\" stroke-width=\"0.5\""),
           concat("from rank ", piece.rank, ": ", text_of(piece)));
    for (const HaloPiece& piece : plan.copies)
      if (piece.target != piece.source)
        draw(piece.target, "fill=\"url(#own)\"", concat("own: ", text_of(piece)));
    if (volume(plan.needed) > 0)
      draw(plan.needed, "fill=\"none\" stroke=\"black\" stroke-width=\"1.5\"",
           concat("needs ", text_of(plan.needed)));
  }
  return svg.finish();
}

std::string visualize_halo(const Sharding& input, const std::vector<Edge>& edges,
                           const std::function<Box(int)>& needed) {
  const int dims = static_cast<int>(input.shape().size());
  if (dims == 0) throw InvalidArgument("a field without dims cannot be drawn");
  std::vector<int> chosen;
  for (int d = 0; d < dims && chosen.size() < 2; ++d) {
    if (!input.dims()[d].axes.empty()) chosen.push_back(d);
  }
  for (int d = dims; d-- > 0 && chosen.size() < 2;) {
    if (std::ranges::find(chosen, d) == chosen.end()) chosen.push_back(d);
  }
  if (chosen.size() < 2) chosen.push_back(-1);
  if (chosen[1] >= 0 && chosen[0] > chosen[1]) std::swap(chosen[0], chosen[1]);
  return visualize_halo(input, edges, needed, chosen[0], chosen[1]);
}

}  // namespace tessera
