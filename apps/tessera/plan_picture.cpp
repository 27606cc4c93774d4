// The picture: every panel shows the same machines, one panel a family. Devices of one group share
// a colour; the groups of one rank stand out with a dark frame. Below 129 ranks the devices carry
// their ranks. In large worlds a square is a host, and one host is drawn large.

#include <algorithm>
#include <map>

#include "plan.h"
#include "plan_grid.h"
#include "tessera/base/internal/colour.h"
#include "tessera/base/internal/counted.h"
#include "tessera/base/text.h"

namespace tessera::app {
namespace {

constexpr int kWidth = 1400, kMargin = 24, kGap = 28;
constexpr int kMostPanels = 12;

std::string shortened(const std::string& text, std::size_t limit) {
  if (text.size() <= limit) return text;
  std::size_t cut = limit - 1;
  while (cut > 0 && (text[cut] & 0xC0) == 0x80) --cut;  // not inside a character
  return text.substr(0, cut) + "\u2026";
}

/// Colours that differ between neighbours, in saturation and lightness too.
std::string colour(int group) {
  const int light[] = {72, 62, 80}, strong[] = {58, 62, 66};
  return numbered_colour(group, strong[group / 7 % 3], light[group / 3 % 3]);
}

/// Few colours that are told apart at a few pixels, also by the colour-blind (after M. Okabe and K.
/// Ito).
const char* strong_colour(int i) {
  static constexpr const char* kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                             "#e69f00", "#56b4e9", "#7f3c8d", "#5d6b00"};
  return kColours[i % 8];
}

struct Machines {
  std::vector<std::string> names;
  std::vector<int> devices, rack_of;
  std::vector<std::string> racks;
  std::vector<int> rank_on_slot;  // -1: spare
};

Machines machines_of(const Plan& plan) {
  Machines machines;
  const int n = plan.mesh.size();
  if (!plan.placement) {
    machines.names = {"all ranks"};
    machines.devices = {n};
    machines.rack_of = {0};
    machines.racks = {""};
    machines.rank_on_slot = plan.mesh.ranks();
    std::ranges::sort(machines.rank_on_slot);
    return machines;
  }
  const auto& topology = plan.placement->topology;
  std::map<int, int> rack;
  for (const Host& host : topology.hosts) {
    machines.names.push_back(host.name);
    machines.devices.push_back(host.devices);
    const auto known = rack.emplace(host.network, static_cast<int>(rack.size()));
    if (known.second)
      machines.racks.push_back(host.network < 0 ? "" : topology.switches[host.network].name);
    machines.rack_of.push_back(known.first->second);
  }
  machines.rank_on_slot.assign(topology.slots(), -1);
  for (int r = 0; r < n; ++r) machines.rank_on_slot[plan.placement->slot_of[r]] = r;
  return machines;
}

std::string cost_line(const Plan& plan, const std::string& family) {
  if (!plan.placement) return "";
  std::string text;
  for (std::size_t t = 0; t < plan.placement->cost.size(); ++t) {
    if (plan.placement->cost[t].axes != family) continue;
    const auto &now = plan.placement->cost[t], &before = plan.placement->naive_cost[t];
    const std::string change =
        before.seconds == now.seconds
            ? duration_text(now.seconds)
            : duration_text(before.seconds) + " \u2192 " + duration_text(now.seconds);
    text += concat(text.empty() ? "" : ", ", to_string(now.collective), " ", change);
  }
  return text;
}

/// What one picture is drawn with.
struct Style {
  /// Framed.
  int rank = 0;
  /// Only the groups of `coloured` have colours.
  bool muted = false;
  /// Ranks.
  std::vector<int> coloured = {};
  std::string coloured_text = {};
  /// In a page that reacts to the pointer: every device an element of its own.
  bool page = false;
  /// A square is a host; the framed rank's host is drawn large beside them.
  bool by_host = false;
  /// Height of a panel's lines.
  int header = 44;
  /// Of a panel.
  int width = 0;
};

/// "0, 8, 16, ... (64 ranks on 16 hosts)"
std::string members_text(const Plan& plan, std::span<const int> members) {
  std::string text;
  for (std::size_t i = 0; i < members.size() && i < 8; ++i)
    text += concat(i ? ", " : "", members[i]);
  if (members.size() > 8) text += concat(", \u2026 (", members.size(), " ranks");
  if (plan.placement) {
    std::vector<int> hosts;
    for (int rank : members) hosts.push_back(plan.placement->host_of[rank]);
    std::ranges::sort(hosts);
    const auto n = std::unique(hosts.begin(), hosts.end()) - hosts.begin();
    text += concat(members.size() > 8 ? "" : " (", members.size() > 8 ? " on " : "on ",
                   counted(n, "host"), ')');
  } else if (members.size() > 8) {
    text += ')';
  }
  return text;
}

/// By rank; -1: in no group of the family.
std::vector<int> groups_of_ranks(const Plan& plan, const PlannedFamily& family) {
  std::vector<int> group_of(*std::ranges::max_element(plan.mesh.ranks()) + 1, -1);
  for (int g = 0; g < family.groups.count(); ++g)
    for (int member : family.groups[g]) group_of[member] = g;
  return group_of;
}

/// Opens the panel and writes its lines.
void draw_head(TextStream& out, const Plan& plan, const PlannedFamily& family, int marked, int x,
               int y, const Style& style) {
  out << "<g transform=\"translate(" << x << ',' << y << ")\">\n<text class=\"t\" y=\"16\">"
      << markup_text(shortened(family.name, 40)) << "</text>";
  std::string line =
      concat(family.groups.count(), family.groups.count() == 1 ? " group of " : " groups of ",
             family.groups.group_size);
  if (family.reach) line += concat(" \u00b7 ", to_string(*family.reach));
  const std::string cost = cost_line(plan, family.name);
  std::vector<std::string> lines{
      line, concat("rank ", style.rank, "'s: ", members_text(plan, family.groups[marked]))};
  if (!cost.empty()) lines.push_back(cost);
  for (std::size_t i = 0; i < lines.size(); ++i)
    out << "<text class=\"s\" y=\"" << 34 + 16 * static_cast<int>(i) << "\">"
        << markup_text(shortened(lines[i], std::max(20, style.width / 7))) << "</text>";
}

void draw_racks(TextStream& out, const Grid& grid) {
  for (const auto& rack : grid.racks) {
    out << "<rect class=\"r\" x=\"-6\" y=\"" << rack.y - 2 << "\" width=\"" << grid.width + 12
        << "\" height=\"" << rack.height + 8 << "\"/>";
    out << "<text class=\"k\" x=\"0\" y=\"" << rack.y + 11 << "\">"
        << markup_text(shortened(rack.name, 40)) << "</text>\n";
  }
}

void draw_panel(TextStream& out, const Plan& plan, const Machines& machines, const Grid& grid,
                std::size_t index, int x, int y, const Style& style) {
  const auto& family = plan.families[index];
  const auto group_of = groups_of_ranks(plan, family);
  const int marked = group_of[style.rank];
  std::map<int, int> strong;
  for (int rank : style.coloured) strong.emplace(group_of[rank], static_cast<int>(strong.size()));
  draw_head(out, plan, family, marked, x, y, style);
  out << "\n<g transform=\"translate(0," << style.header << ")\">\n";
  draw_racks(out, grid);
  int slot = 0;
  TextStream marks, ranks, grey;
  for (std::size_t h = 0; h < machines.devices.size(); ++h) {
    const auto [hx, hy] = grid.host_at[h];
    out << "<rect class=\"h\" x=\"" << hx << "\" y=\"" << hy << "\" width=\"" << grid.host_width()
        << "\" height=\"" << grid.host_height() << "\" rx=\"" << std::min(5, grid.pad) << "\"/>";
    if (grid.title)
      out << "<text class=\"n\" x=\"" << hx + grid.pad << "\" y=\"" << hy + 14 << "\">"
          << markup_text(shortened(machines.names[h], std::max(3, grid.host_width() / 7)))
          << "</text>";
    for (int d = 0; d < machines.devices[h]; ++d, ++slot) {
      const int inset = grid.cell >= 13 ? 1 : 0,
                side = std::max(1, grid.cell - 2 * inset - (grid.cell >= 4 && inset == 0));
      const int cx = hx + grid.pad + d % grid.host_columns * grid.cell + inset,
                cy = hy + grid.pad + grid.title + d / grid.host_columns * grid.cell + inset;
      const std::string box =
          concat("x=\"", cx, "\" y=\"", cy, "\" width=\"", side, "\" height=\"", side, "\"");
      const int r = machines.rank_on_slot[slot];
      if (r < 0) {
        out << "<rect class=\"e\" " << box << "/>";
        continue;
      }
      const int g = group_of[r];
      const auto chosen = strong.find(g);
      const bool is_grey = style.muted && chosen == strong.end();
      if (is_grey && !style.page) {
        grey << 'M' << cx << ' ' << cy << 'h' << side << 'v' << side << 'h' << -side << 'z';
      } else {
        out << "<rect " << box << " fill=\""
            << (is_grey       ? "#dfe5eb"
                : style.muted ? strong_colour(chosen->second)
                              : colour(g))
            << '"';
        if (style.page) out << " data-r=\"" << r << "\" data-g=\"" << index << '.' << g << '"';
        out << "/>";
      }
      if (g == marked && (!style.muted || r == style.rank)) {
        const int frame = grid.cell >= 13 ? 3 : grid.cell >= 5 ? 2 : 1;
        marks << "<rect class=\"m" << (r == style.rank ? " me" : "") << "\" stroke-width=\""
              << frame << "\" " << box << "/>";
      }
      if (grid.cell >= 22)
        ranks << "<text class=\"d\" font-size=\"" << std::min(15, grid.cell * 2 / 5) << "\" x=\""
              << cx + side / 2.0 << "\" y=\"" << cy + side / 2.0 << "\">" << r << "</text>";
    }
    out << '\n';
  }
  if (const auto path = grey.str(); !path.empty())
    out << "<path fill=\"#dfe5eb\" d=\"" << path << "\"/>\n";
  out << marks.str() << ranks.str() << "</g></g>\n";
}

constexpr int kLargeCell = 34;

/// Whether devices would be too small, and hosts are what one sees.
bool draws_hosts(const Machines& machines) {
  return machines.devices.size() >= 32 && machines.rank_on_slot.size() > 256;
}

/// The devices of the framed rank's host, a colour a group.
void draw_large_host(TextStream& out, const Machines& machines, const std::vector<int>& group_of,
                     int host, int y, const Style& style) {
  int slot = 0;
  for (int h = 0; h < host; ++h) slot += machines.devices[h];
  const int shown = std::min(machines.devices[host], (style.width - 150) / kLargeCell);
  out << "<text class=\"s\" y=\"" << y + 21 << "\">"
      << markup_text(shortened(machines.names[host], 12)) << ":</text>";
  std::map<int, int> colours{{group_of[style.rank], 0}};
  for (int d = 0; d < shown; ++d) {
    const int rank = machines.rank_on_slot[slot + d], x = 92 + d * kLargeCell;
    if (rank < 0) continue;
    const auto known = colours.emplace(group_of[rank], static_cast<int>(colours.size()));
    out << "<rect x=\"" << x << "\" y=\"" << y << "\" width=\"" << kLargeCell - 2 << "\" height=\""
        << kLargeCell - 2 << "\" fill=\"" << strong_colour(known.first->second) << "\""
        << (rank == style.rank ? " stroke=\"#c4001d\" stroke-width=\"3\"" : "")
        << "/><text class=\"d W\" font-size=\"11\" x=\"" << x + kLargeCell / 2 - 1 << "\" y=\""
        << y + kLargeCell / 2 - 1 << "\">" << rank << "</text>";
  }
  const int x = 98 + shown * kLargeCell;
  if (shown < machines.devices[host])
    out << "<text class=\"s\" x=\"" << x << "\" y=\"" << y + 21 << "\">\u2026 "
        << machines.devices[host] << " devices</text>";
  else
    out << "<text class=\"s\" x=\"" << x << "\" y=\"" << y + 21 << "\">" << colours.size()
        << (colours.size() == 1 ? " group here</text>" : " groups here</text>");
  out << '\n';
}

/// Large worlds: a square a host. Blue: holds members of the framed rank's group, and how many;
/// pale: of the other groups of its host.
void draw_hosts(TextStream& out, const Plan& plan, const Machines& machines, const Grid& grid,
                std::size_t index, int x, int y, const Style& style) {
  const auto& family = plan.families[index];
  const auto group_of = groups_of_ranks(plan, family);
  const int marked = group_of[style.rank], own = plan.placement->host_of[style.rank];
  std::vector<int> mine(machines.devices.size()), near(machines.devices.size());
  std::vector<bool> is_near(family.groups.count());
  for (const int rank : style.coloured) is_near[group_of[rank]] = true;
  for (std::size_t rank = 0; rank < plan.placement->host_of.size(); ++rank) {
    mine[plan.placement->host_of[rank]] += group_of[rank] == marked;
    near[plan.placement->host_of[rank]] += is_near[group_of[rank]];
  }
  draw_head(out, plan, family, marked, x, y, style);
  draw_large_host(out, machines, group_of, own, style.header - kLargeCell - 8, style);
  out << "<g transform=\"translate(0," << style.header << ")\">\n";
  draw_racks(out, grid);
  for (std::size_t h = 0; h < machines.devices.size(); ++h) {
    const auto [hx, hy] = grid.host_at[h];
    const int side = grid.cell + 2 * grid.pad - 2;
    const char* fill = mine[h] ? "#0072b2" : near[h] ? "#9cc9e6" : "#e6ebf0";
    out << "<rect x=\"" << hx << "\" y=\"" << hy << "\" width=\"" << side << "\" height=\"" << side
        << "\" rx=\"2\" fill=\"" << fill << '"'
        << (static_cast<int>(h) == own ? " stroke=\"#c4001d\" stroke-width=\"3\"" : "")
        << "><title>" << markup_text(machines.names[h]) << ": " << mine[h] << " of rank "
        << style.rank << "'s group</title></rect>";
    if (mine[h] && side >= 14)
      out << "<text class=\"d W\" font-size=\"" << std::min(13, side * 5 / 8) << "\" x=\""
          << hx + side / 2.0 << "\" y=\"" << hy + side / 2.0 << "\">" << mine[h] << "</text>";
    out << '\n';
  }
  out << "</g></g>\n";
}

bool has_costs(const Plan& plan) { return plan.placement && !plan.placement->cost.empty(); }

/// Where not all groups have a colour: those of the ranks beside `style.rank`.
void choose_coloured(const Plan& plan, Style& style) {
  const int rank = style.rank;
  if (plan.placement) {
    const int host = plan.placement->host_of[rank];
    for (int r = 0; r < plan.mesh.size(); ++r)
      if (plan.placement->host_of[r] == host) style.coloured.push_back(r);
    style.coloured_text = concat("the ranks on ", plan.placement->topology.hosts[host].name);
  } else {
    const auto& table = plan.mesh.ranks();
    for (int p = plan.mesh.position(rank); p < plan.mesh.size() && style.coloured.size() < 8; ++p)
      style.coloured.push_back(table[p]);
    style.coloured_text = concat(style.coloured.size(), " neighbouring ranks from ", rank, " on");
  }
  std::ranges::stable_sort(style.coloured, [&](int a, int b) { return (a == rank) > (b == rank); });
}

/// What is written above the panels.
std::vector<std::string> notes_of(const Plan& plan, const Style& style, int panels) {
  const int rank = style.rank;
  std::vector<std::string> notes;
  std::string shape;
  for (const Axis& axis : plan.mesh.axes())
    shape += concat(shape.empty() ? "" : " \u00d7 ", axis.name, " ", axis.size);
  notes.push_back(shape + " (outermost first)");
  if (has_costs(plan)) {
    const auto& placed = *plan.placement;
    std::string line = concat("communication per step: ", duration_text(placed.naive_seconds));
    if (placed.seconds != placed.naive_seconds)
      line += concat(" \u2192 ", duration_text(placed.seconds));
    line += placed.exact ? ", the optimum"
            : placed.lower_bound > 0
                ? concat(", no placement below ", duration_text(placed.lower_bound))
                : "";
    notes.push_back(line);
  }
  notes.push_back(
      style.by_host
          ? concat("Squares are hosts. Blue: rank ", rank,
                   "'s group, with its members there. Pale: the other groups of the ranks on rank ",
                   rank, "'s host, which is framed, and drawn large above with its ranks.")
      : style.muted
          ? concat("Each panel shows the same devices, one square each. Coloured: the groups of ",
                   style.coloured_text, ", one colour a group, rank ", rank,
                   "'s blue; grey: all others.")
          : concat("Each panel shows the same devices, by rank. One colour is one group",
                   plan.mesh.size() > 32 ? " (far apart, a colour may repeat)" : "",
                   ". Framed: the groups of rank ", rank, "."));
  for (const auto& warning : plan.warnings) notes.push_back("\u26a0 " + warning);
  if (panels < static_cast<int>(plan.families.size()))
    notes.push_back(
        concat("the first ", panels, " of ", plan.families.size(), " families are shown"));
  return notes;
}

std::string draw(const Plan& plan, int rank, bool page, bool may_draw_hosts) {
  const auto machines = machines_of(plan);
  const int panels = std::min<int>(kMostPanels, static_cast<int>(plan.families.size()));
  const bool by_host = may_draw_hosts && draws_hosts(machines);
  Style style{.rank = rank,
              .page = page,
              .by_host = by_host,
              .header = (has_costs(plan) ? 76 : 60) + (by_host ? kLargeCell + 14 : 0)};
  const std::vector<int> boxes =
      by_host ? std::vector<int>(machines.devices.size(), 1) : machines.devices;
  // As many columns as leave the devices largest on a page of about this height.
  int columns = 1;
  Grid grid;
  const int most_columns = std::min(by_host ? 2 : 3, panels);
  for (int c = most_columns; c >= 1; --c) {
    const int width = (kWidth - 2 * kMargin - (c - 1) * kGap) / c, lines = (panels + c - 1) / c;
    const Grid tried = lay_out(boxes, machines.rack_of, machines.racks, width - 12,
                               std::max(160, 1500 / lines - style.header), by_host);
    if (c == most_columns || tried.cell > grid.cell) {
      grid = tried;
      columns = c;
    }
  }
  const int width = (kWidth - 2 * kMargin - (columns - 1) * kGap) / columns;
  style.width = width;
  style.muted = grid.cell < 22 || by_host;
  if (style.muted) choose_coloured(plan, style);
  const int row = grid.height + style.header + kGap + 8, rows = (panels + columns - 1) / columns;
  std::string title = concat(plan.mesh.size(), " ranks");
  if (plan.placement) title += " on " + counted(machines.names.size(), "host");
  const std::vector<std::string> notes = notes_of(plan, style, panels);
  const int top = kMargin + 34 + static_cast<int>(notes.size()) * 20 + 16,
            height = top + rows * row + kMargin / 2;
  TextStream out;
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << kWidth << "\" height=\"" << height
      << "\" viewBox=\"0 0 " << kWidth << ' ' << height << "\">\n"
      << "<style>text{font-family:system-ui,'DejaVu "
         "Sans',Arial,sans-serif;fill:#1c2530}.T{font-size:24px;font-weight:600}.t{font-size:17px;"
         "font-weight:600}"
         ".s,.N{font-size:13px;fill:#4a5868}.k{font-size:12px;fill:#4a5868}.n{font-size:11px;fill:#"
         "4a5868}.d{text-anchor:middle;dominant-baseline:"
         "central}"
         ".h{fill:#fff;stroke:#9aa7b5}.r{fill:#eef2f6;stroke:#c9d3dd}.e{fill:none;stroke:#c9d3dd;"
         "stroke-dasharray:2 "
         "2}.m{fill:none;stroke:#111}.me{stroke:#c4001d}"
         ".d.W{fill:#fff}.w{font-size:13px;fill:#a33d00}</style>\n"
      << "<rect width=\"100%\" height=\"100%\" fill=\"#f8fafc\"/>\n<text class=\"T\" x=\""
      << kMargin << "\" y=\"" << kMargin + 22 << "\">" << markup_text(title) << "</text>\n";
  for (std::size_t i = 0; i < notes.size(); ++i)
    out << "<text class=\"" << (notes[i].rfind("\u26a0", 0) == 0 ? 'w' : 'N') << "\" x=\""
        << kMargin << "\" y=\"" << kMargin + 46 + 20 * static_cast<int>(i) << "\">"
        << markup_text(notes[i]) << "</text>\n";
  for (int p = 0; p < panels; ++p)
    (by_host ? draw_hosts : draw_panel)(out, plan, machines, grid, p,
                                        kMargin + 6 + p % columns * (width + kGap),
                                        top + p / columns * row, style);
  out << "</svg>\n";
  return std::move(out).str();
}

}  // namespace

std::string plan_svg(const Plan& plan, int rank) { return draw(plan, rank, false, true); }

std::string plan_html(const Plan& plan, int rank) {
  TextStream out;
  out << "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Process "
         "groups</title><style>body{margin:0;background:#f8fafc}"
         "rect.on{stroke:#111;stroke-width:2}.off{opacity:.25}#tip{position:fixed;background:#111;"
         "color:#fff;font:13px "
         "system-ui,sans-serif;padding:4px 8px;border-radius:4px;"
         "pointer-events:none;display:none}</style></head><body>\n"
      << (draws_hosts(machines_of(plan)) ? draw(plan, rank, false, true) : std::string())
      << draw(plan, rank, true, false)
      << "<div id=\"tip\"></div>\n<script>\n"
         "// Pointing at a device shows its groups in every panel.\n"
         "const cells=[...document.querySelectorAll('rect[data-r]')],byRank=new Map(),byGroup=new "
         "Map(),tip=document.getElementById('tip');\n"
         "for(const c of cells){const "
         "r=c.dataset.r,g=c.dataset.g;(byRank.get(r)||byRank.set(r,[]).get(r)).push(c);(byGroup."
         "get(g)||byGroup.set(g,[]).get(g)).push(c);}\n"
         "let lit=[];\n"
         "document.addEventListener('mouseover',e=>{const "
         "r=e.target.dataset&&e.target.dataset.r;for(const c of "
         "lit)c.classList.remove('on');lit=[];\n"
         " if(r===undefined){tip.style.display='none';return;}\n"
         " for(const c of byRank.get(r))for(const d of "
         "byGroup.get(c.dataset.g)){d.classList.add('on');lit.push(d);}\n"
         " const n=byGroup.get(e.target.dataset.g);tip.textContent='rank '+r+', group of "
         "'+n.length+': '+n.slice(0,12).map(d=>d.dataset.r).join(' "
         "')+(n.length>12?' ...':'');\n"
         " tip.style.display='block';});\n"
         "document.addEventListener('mousemove',e=>{tip.style.left=Math.min(e.clientX+12,"
         "innerWidth-260)+'px';tip.style.top=e.clientY+16+'px';});\n"
         "</script></body></html>\n";
  return std::move(out).str();
}

}  // namespace tessera::app
