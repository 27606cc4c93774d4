#include "tessera/tensor/spec/spec.h"

#include <algorithm>
#include <vector>

#include "tessera/base/internal/colour.h"
#include "tessera/base/internal/svg.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

struct Picture {
  int rows = -1, columns = -1;                       // dims shown; -1: none
  std::vector<Interval> row_parts, column_parts;     // without empty ones
  std::vector<std::vector<std::vector<int>>> ranks;  // [row][column]
  std::vector<int> empty;                            // ranks that hold nothing
  std::string others;                                // dims not shown that are sharded
};

std::vector<Interval> parts_of(const ShardSpec& spec, int dim) {
  if (dim < 0) return {{0, 1}};
  if (!spec.is_sharded(dim))
    return spec.shape()[dim] > 0 ? std::vector<Interval>{{0, spec.shape()[dim]}}
                                 : std::vector<Interval>{};
  std::vector<Interval> parts;
  const Partition& p = spec.dim(dim).partition;
  for (int i = 0; i < p.parts(); ++i)
    if (p.size(i) > 0) parts.push_back(p.interval(i));
  return parts;
}

Picture picture(const ShardSpec& spec) {
  Picture p;
  std::vector<int> shown;
  for (const bool sharded : {true, false}) {
    for (int d = 0; d < spec.dims() && shown.size() < 2; ++d)
      if (spec.is_sharded(d) == sharded) shown.push_back(d);
  }
  std::ranges::sort(shown);
  if (!shown.empty()) p.rows = shown[0];
  if (shown.size() > 1) p.columns = shown[1];
  for (int d = 0; d < spec.dims(); ++d)
    if (spec.is_sharded(d) && d != p.rows && d != p.columns)
      p.others += concat(p.others.empty() ? "" : ", ", d);
  p.row_parts = parts_of(spec, p.rows);
  p.column_parts = parts_of(spec, p.columns);
  p.ranks.assign(p.row_parts.size(), std::vector<std::vector<int>>(p.column_parts.size()));
  const auto& ranks = spec.mesh().mesh().ranks();
  for (int position = 0; position < spec.sharding().positions(); ++position) {
    const Box box = spec.sharding().box(position);
    if (volume(box) == 0) {
      p.empty.push_back(ranks[position]);
      continue;
    }
    for (std::size_t i = 0; i < p.row_parts.size(); ++i) {
      for (std::size_t j = 0; j < p.column_parts.size(); ++j) {
        const bool in = (p.rows < 0 || box[p.rows].contains(p.row_parts[i])) &&
                        (p.columns < 0 || box[p.columns].contains(p.column_parts[j]));
        if (in) p.ranks[i][j].push_back(ranks[position]);
      }
    }
  }
  return p;
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i == 8) return text + ",+" + std::to_string(ranks.size() - 8);
    text += concat(i ? "," : "", ranks[i]);
  }
  return text;
}

std::string notes(const ShardSpec& spec, const Picture& p) {
  std::string text;
  const auto& axes = spec.mesh().mesh().axes();
  for (int a = 0; a < spec.mesh_dims(); ++a)
    if (spec.placements()[a].is_partial())
      text += concat("ranks along ", axes[a].name, " hold values to reduce: ", spec.placements()[a],
                     ". ");
  if (!p.others.empty())
    text += concat("Dims ", p.others,
                   " are sharded as well: ranks of one cell hold different shards of them. ");
  if (!p.empty.empty()) text += concat("Nothing on rank ", ranks_text(p.empty), ". ");
  return text;
}

std::string range(int dim, const Interval& i) {
  return dim < 0 ? "" : concat(i.begin, "..", i.end - 1);
}

}  // namespace

std::string visualize_sharding(const ShardSpec& spec) {
  const Picture p = picture(spec);
  std::vector<std::vector<std::string>> table(1, {p.rows < 0 ? "" : concat("dim ", p.rows)});
  for (const Interval& c : p.column_parts)
    table[0].push_back(p.columns < 0 ? "" : concat("dim ", p.columns, " ", range(p.columns, c)));
  for (std::size_t i = 0; i < p.row_parts.size(); ++i) {
    table.push_back({range(p.rows, p.row_parts[i])});
    for (const auto& ranks : p.ranks[i]) table.back().push_back(ranks_text(ranks));
  }
  std::vector<std::size_t> widths(table[0].size(), 0);
  for (const auto& row : table)
    for (std::size_t j = 0; j < row.size(); ++j) widths[j] = std::max(widths[j], row[j].size());
  TextStream out;
  out << spec << "\n";
  for (const auto& row : table) {
    std::string line;
    for (std::size_t j = 0; j < row.size(); ++j)
      line += (j ? " | " : "") + row[j] + std::string(widths[j] - row[j].size(), ' ');
    line.erase(line.find_last_not_of(' ') + 1);
    out << line << "\n";
  }
  const std::string said = notes(spec, p);
  if (!said.empty()) out << said.substr(0, said.size() - 1) << "\n";
  return std::move(out).str();
}

std::string visualize_sharding_svg(const ShardSpec& spec) {
  const Picture p = picture(spec);
  constexpr double kLong = 480, kLeft = 80, kTop = 64, kLeast = 34;
  // To scale, but each shard large enough for its ranks.
  const auto lengths = [&](const std::vector<Interval>& parts, double all, double least) {
    std::vector<double> lengths;
    double extent = 0;
    for (const Interval& i : parts) extent += static_cast<double>(i.size());
    for (const Interval& i : parts)
      lengths.push_back(
          std::max(least, all * static_cast<double>(i.size()) / std::max(extent, 1.0)));
    return lengths;
  };
  std::size_t widest = 0;
  for (const auto& row : p.ranks)
    for (const auto& ranks : row) widest = std::max(widest, ranks_text(ranks).size());
  const auto heights = lengths(p.row_parts, p.columns < 0 ? kLong / 2 : kLong * 0.7, kLeast);
  const auto widths = lengths(p.column_parts, p.columns < 0 ? 120 : kLong,
                              std::max(70.0, 9.0 * static_cast<double>(widest) + 14));
  double width = 0, height = 0;
  for (const double w : widths) width += w;
  for (const double h : heights) height += h;
  const std::string title = spec.to_string(), said = notes(spec, p);
  const double full_width =
      std::max({width + kLeft + 20, 7.6 * static_cast<double>(title.size()) + 40,
                6.4 * static_cast<double>(said.size()) + 40});
  detail::Svg svg(full_width, height + kTop + 44, 13);
  svg.text(20, 24, title, "font-weight=\"bold\"");
  double x = kLeft;
  for (std::size_t j = 0; j < widths.size(); ++j) {
    svg.text(x + widths[j] / 2, kTop - 8, range(p.columns, p.column_parts[j]),
             "text-anchor=\"middle\" fill=\"#555\"");
    x += widths[j];
  }
  double y = kTop;
  for (std::size_t i = 0; i < heights.size(); ++i) {
    const double base = y + heights[i] / 2 + 4;
    svg.text(kLeft - 8, base, range(p.rows, p.row_parts[i]), "text-anchor=\"end\" fill=\"#555\"");
    x = kLeft;
    for (std::size_t j = 0; j < widths.size(); ++j) {
      const int first = p.ranks[i][j].empty() ? 0 : p.ranks[i][j].front();
      svg.rect(x, y, widths[j], heights[i],
               concat("fill=\"", numbered_colour(first, 55, 82), "\" stroke=\"#333\""));
      svg.text(x + widths[j] / 2, base, ranks_text(p.ranks[i][j]), "text-anchor=\"middle\"");
      x += widths[j];
    }
    y += heights[i];
  }
  if (!said.empty()) svg.text(20, y + 28, said, "font-size=\"11\" fill=\"#555\"");
  return svg.finish();
}

}  // namespace tessera
