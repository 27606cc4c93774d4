#include "tessera/partition/halo_picture.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/internal/colour.h"
#include "tessera/base/internal/svg.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

std::string text_of(const Box& box) {
  TextStream out;
  for (std::size_t d = 0; d < box.size(); ++d) out << (d ? " x " : "") << box[d];
  return std::move(out).str();
}

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

// Draws index intervals of two dims into a square.
class Canvas {
 public:
  Canvas(detail::Svg& svg, Interval rows, Interval columns, double x, double y)
      : svg_(svg), rows_(rows), columns_(columns), x_(x), y_(y) {
    scale_ = static_cast<double>(kPanel) /
             static_cast<double>(std::max<std::int64_t>({rows.size(), columns.size(), 1}));
  }
  void rect(Interval rows, Interval columns, const std::string& style,
            const std::string& title = "") {
    if (rows.empty() || columns.empty()) return;
    svg_.rect(x_ + scale_ * static_cast<double>(columns.begin - columns_.begin),
              y_ + scale_ * static_cast<double>(rows.begin - rows_.begin),
              scale_ * static_cast<double>(columns.size()),
              scale_ * static_cast<double>(rows.size()), style, title);
  }

 private:
  detail::Svg& svg_;
  Interval rows_, columns_;
  double x_, y_, scale_;
};

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
  // All panels show the same range: the array and everything that any position needs beyond it.
  Interval all_rows{0, input.shape()[rows]},
      all_columns{0, columns < 0 ? 1 : input.shape()[columns]};
  for (int p = 0; p < shown; ++p) {
    const Box box = needed(p);
    if (volume(box) == 0) continue;
    all_rows = {std::min(all_rows.begin, box[rows].begin), std::max(all_rows.end, box[rows].end)};
    if (columns >= 0)
      all_columns = {std::min(all_columns.begin, box[columns].begin),
                     std::max(all_columns.end, box[columns].end)};
  }
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
    Canvas canvas(svg, all_rows, all_columns, left, top);
    for (int q = 0; q < input.positions(); ++q) {
      const Box box = input.box(q);
      if (volume(box) == 0) continue;
      canvas.rect(
          along(box, rows), along(box, columns),
          concat("fill=\"", numbered_colour(q, 55, q == p ? 60 : 90), "\" stroke=\"white\""),
          concat("owned by rank ", input.rank(q), ": ", text_of(box)));
    }
    for (const HaloPiece& piece : plan.receives) {
      canvas.rect(along(piece.target, rows), along(piece.target, columns),
                  concat("fill=\"", numbered_colour(input.position(piece.rank), 55, 45),
                         "\" stroke=\"#222\" stroke-width=\"0.5\""),
                  concat("from rank ", piece.rank, ": ", text_of(piece)));
    }
    for (const HaloPiece& piece : plan.copies) {
      if (piece.target != piece.source)
        canvas.rect(along(piece.target, rows), along(piece.target, columns), "fill=\"url(#own)\"",
                    concat("own: ", text_of(piece)));
    }
    if (volume(plan.needed) > 0)
      canvas.rect(along(plan.needed, rows), along(plan.needed, columns),
                  "fill=\"none\" stroke=\"black\" stroke-width=\"1.5\"",
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
