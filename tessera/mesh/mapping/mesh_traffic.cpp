#include "tessera/mesh/mapping/mesh_traffic.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/mesh/errors.h"

namespace tessera {
namespace {

/// Buffers that a call of one group sends between hosts; `hosts`: of its members, in group order.
double buffers_between(Collective collective, const std::vector<int>& hosts) {
  const double p = static_cast<double>(hosts.size());
  std::map<int, int> members;
  for (const int host : hosts) ++members[host];
  const double h = static_cast<double>(members.size());
  if (h == 1) return 0;
  switch (collective) {
    case Collective::all_reduce:
      return 2 * h * (p - 1) / p;
    case Collective::all_gather:
    case Collective::reduce_scatter:
      return h * (p - 1) / p;
    case Collective::broadcast:
    case Collective::reduce:
      return h - 1;
    case Collective::all_to_all: {
      double pairs = 0;
      for (const auto& [host, count] : members) pairs += count * (p - count);
      return pairs / p;
    }
    case Collective::send: {
      double pairs = 0;
      for (std::size_t i = 0; i + 1 < hosts.size(); ++i) pairs += hosts[i] != hosts[i + 1];
      return pairs;
    }
  }
  return 0;
}

}  // namespace

void check_traffic(const Mesh& mesh, const std::vector<Traffic>& traffic) {
  for (const Traffic& t : traffic) {
    if (!(t.bytes >= 0) || !(t.calls >= 0) || !std::isfinite(t.bytes) || !std::isfinite(t.calls) ||
        !std::isfinite(t.bytes * t.calls))
      throw GroupConfigError("traffic of axes ", list(t.axes), " has ", t.bytes, " bytes and ",
                             t.calls,
                             " calls; both must be finite and at least 0, and so their "
                             "product");
    if (t.axes.empty()) throw GroupConfigError("a traffic entry names no axis");
    for (const auto& axis : t.axes) {
      if (!mesh.has_axis(axis))
        throw UnknownName("traffic names the axis '", axis, "'; the axes are ", list(mesh.names()));
      if (std::ranges::count(t.axes, axis) > 1)
        throw RepeatedName("traffic names the axis '", axis, "' twice; name each axis once");
    }
  }
}

double bytes_between_hosts(const CostModel& model, const std::vector<int>& slot_of) {
  given_mapping(model, slot_of);  // throws where a slot is none
  const Mesh mesh(model.axes());
  const auto host_of = model.topology().hosts_of_slots();
  double bytes = 0;
  for (const Traffic& t : model.traffic()) {
    const GroupTable groups = mesh.groups(t.axes);
    std::vector<int> hosts;
    for (int g = 0; g < groups.count(); ++g) {
      hosts.clear();
      for (const int position : groups[g]) hosts.push_back(host_of[slot_of[position]]);
      bytes += buffers_between(t.collective, hosts) * t.bytes * t.calls;
    }
  }
  return bytes;
}

MappingGain mapping_gain(const Mesh& mesh, const FoundTopology& machines,
                         const std::vector<Traffic>& traffic, const MappingOptions& options) {
  if (mesh.size() != machines.topology.slots() ||
      machines.slot_of.size() != static_cast<std::size_t>(mesh.size()))
    throw MappingError("mapping_gain of a mesh of ", mesh.size(), " ranks on machines with ",
                       machines.topology.slots(), " slots and ", machines.slot_of.size(),
                       " ranks; give a mesh over all ranks of the job");
  const CostModel model(machines.topology, mesh.axes(), traffic);
  std::vector<int> now;
  for (const int rank : mesh.ranks()) {
    if (rank >= mesh.size())
      throw MappingError("mapping_gain of a mesh with rank ", rank, " in a job of ", mesh.size(),
                         " ranks");
    now.push_back(machines.slot_of[rank]);
  }
  const RankMapping here = given_mapping(model, now);
  MappingGain gain;
  gain.mapping = optimise_mapping(model, options);
  if (here.seconds <= gain.mapping.seconds) {
    gain.mapping.slot_of = here.slot_of;
    gain.mapping.seconds = here.seconds;
    gain.mapping.method = "as it is";
  }
  gain.ranks = machines.ranks(gain.mapping);
  gain.seconds = here.seconds;
  gain.mapped_seconds = gain.mapping.seconds;
  gain.bytes = bytes_between_hosts(model, now);
  gain.mapped_bytes = bytes_between_hosts(model, gain.mapping.slot_of);
  return gain;
}

std::string MappingGain::to_string() const {
  const auto line = [](const char* what, double s, double b) {
    return concat(what, significant(1e3 * s, 3), " ms per step, ", significant(1e-6 * b, 3),
                  " MB between hosts\n");
  };
  return concat(line("now:    ", seconds, bytes), line("mapped: ", mapped_seconds, mapped_bytes),
                "ranks:  ", list(ranks), " (", mapping.method, ")\n");
}

}  // namespace tessera
