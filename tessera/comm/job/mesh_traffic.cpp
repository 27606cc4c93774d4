#include "tessera/comm/job/mesh_traffic.h"

#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/internal/vector.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/comm/job/detail/manager_state.h"

namespace tessera {
namespace {

struct Family {
  /// Bit i: the i-th of wide_axes().
  unsigned axes = 0;
  int size = 1;
};

// The axes of more than one rank, of which kMostRanks leaves room for 22.
std::vector<int> wide_axes(const Mesh& mesh) {
  return numbers_below(mesh.dims(), [&](int a) { return mesh.size(a) > 1; });
}

// The axes of a set, of those of wide_axes().
std::vector<int> axes_in(unsigned set, const std::vector<int>& wide) {
  std::vector<int> axes;
  for (std::size_t i = 0; i < wide.size(); ++i)
    if (set >> i & 1u) axes.push_back(wide[i]);
  return axes;
}

// The families of the mesh by the name of their group through this rank.
std::map<std::string, Family> families_of(const DeviceMesh& mesh) {
  const Mesh& whole = mesh.mesh();
  const auto wide = wide_axes(whole);
  std::map<std::string, Family> families;
  for (unsigned set = 1; set < 1u << wide.size(); ++set) {
    const auto axes = axes_in(set, wide);
    families.emplace(detail::name_of_ranks(whole.group(axes, mesh.manager().rank()),
                                           mesh.manager().world_size()),
                     Family{set, whole.group_size(axes)});
  }
  return families;
}

// A group with options of its own has them behind its ranks.
const Family* family_of(const std::map<std::string, Family>& families, const std::string& group) {
  for (const auto& [name, family] : families)
    if (group == name || group.starts_with(name + " ")) return &family;
  return nullptr;
}

/// How a call counts in the mean over all ranks.
struct Kind {
  Collective collective;
  /// The ranks of a group that give bytes to a call: each, the root alone, or one for each pair of
  /// neighbours.
  enum class Givers { each, root, pairs } givers = Givers::each;
  /// What the cost model counts, of the bytes that a rank gives.
  double share = 1;
  /// The cost model counts the whole result, of which a rank gives its part.
  bool times_size = false;
};
std::optional<Kind> kind_of(const std::string& operation) {
  using enum Kind::Givers;
  static const std::map<std::string, Kind> kinds{
      {"all_reduce", {Collective::all_reduce}},
      {"all_gather", {Collective::all_gather, each, 1, true}},
      {"reduce_scatter", {Collective::reduce_scatter}},
      {"broadcast", {Collective::broadcast, root}},
      {"reduce", {Collective::reduce}},
      {"all_to_all", {Collective::all_to_all}},
      {"send", {Collective::send, pairs}},
      // A trace counts what is sent and what is received.
      {"exchange", {Collective::send, pairs, 0.5}}};
  const auto it = kinds.find(operation);
  return it == kinds.end() ? std::nullopt : std::optional(it->second);
}

/// What a rank adds to an entry; travels between ranks.
struct Row {
  unsigned axes;
  int collective;
  /// Of two, in the bytes of a call.
  int power;
  double calls, bytes;
};
using Rows = std::map<std::tuple<unsigned, int, int>, Row>;

void add(Rows& rows, const Row& row) {
  const auto [at, fresh] = rows.emplace(std::tuple(row.axes, row.collective, row.power), row);
  if (fresh) return;
  at->second.calls += row.calls;
  at->second.bytes += row.bytes;
}

Row row_of(const CommEvent& event, const Family& family, const Kind& kind) {
  const double p = family.size;
  const double bytes = static_cast<double>(event.bytes) * kind.share * (kind.times_size ? p : 1);
  const double weight = kind.givers == Kind::Givers::root    ? p
                        : kind.givers == Kind::Givers::pairs ? p / (p - 1)
                                                             : 1;
  return {family.axes, static_cast<int>(kind.collective), std::ilogb(bytes), weight,
          bytes * weight};
}

/// This rank's calls; those that no row stands for go to `left_out`.
Rows rows_of(const CommTrace& trace, const DeviceMesh& mesh, std::vector<CommSummary>& left_out) {
  const auto families = families_of(mesh);
  Rows rows;
  std::map<std::pair<std::string, std::string>, CommSummary> others;
  for (const CommEvent& event : trace.events()) {
    const Family* family = family_of(families, event.group);
    const auto kind = kind_of(event.operation);
    if (family && kind) {
      if (event.bytes > 0) add(rows, row_of(event, *family, *kind));
    } else if (!family || event.operation != "receive") {
      CommSummary& sum = others[{event.operation, event.group}];
      sum.operation = event.operation;
      sum.group = event.group;
      ++sum.count;
      sum.bytes += event.bytes;
      sum.microseconds += event.end - event.begin;
    }
  }
  for (auto& [key, sum] : others) left_out.push_back(std::move(sum));
  return rows;
}

}  // namespace

MeanTraffic mean_traffic(const CommTrace& trace, const DeviceMesh& mesh, double steps) {
  mesh.coordinate();  // throws on a rank outside of the mesh
  MeanTraffic mean;
  const auto said = agree::all<std::vector<Row>>(mesh.all(), "mean_traffic", [&] {
    if (!(steps > 0) || !std::isfinite(steps))
      throw InvalidArgument("mean_traffic of a trace of ", steps,
                            " steps; give a finite number above 0");
    std::vector<Row> mine;
    for (auto& [key, row] : rows_of(trace, mesh, mean.left_out)) {
      mine.push_back(row);
      mine.back().calls /= steps * mesh.mesh().size();
      mine.back().bytes /= steps * mesh.mesh().size();
    }
    return mine;
  });
  Rows sums;
  for (const auto& rows : said)
    for (const Row& row : rows) add(sums, row);
  mean.moved.axes = mesh.mesh().axes();
  const auto wide = wide_axes(mesh.mesh());
  for (const auto& [key, row] : sums) {
    Traffic entry{{}, static_cast<Collective>(row.collective), row.bytes / row.calls, row.calls};
    for (const int a : axes_in(row.axes, wide)) entry.axes.push_back(mean.moved.axes[a].name);
    mean.moved.traffic.push_back(std::move(entry));
  }
  return mean;
}

}  // namespace tessera
