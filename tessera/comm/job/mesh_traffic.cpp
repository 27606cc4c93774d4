#include "tessera/comm/job/mesh_traffic.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/detail/manager_state.h"

namespace tessera {
namespace {

struct Family {
  std::vector<std::string> axes;
  int size = 1;
};

// The families of the mesh by the name of their group through this rank.
std::map<std::string, Family> families_of(const DeviceMesh& mesh) {
  const Mesh& whole = mesh.mesh();
  const int rank = mesh.manager().rank(), dims = whole.dims();
  std::vector<unsigned> sets;
  for (unsigned set = 1; set < 1u << dims; ++set) sets.push_back(set);
  std::stable_sort(sets.begin(), sets.end(), [](unsigned a, unsigned b) {
    return __builtin_popcount(a) < __builtin_popcount(b);
  });
  std::map<std::string, Family> families;
  for (const unsigned set : sets) {
    Family family;
    std::vector<int> axes;
    for (int a = 0; a < dims; ++a) {
      if ((set >> a & 1u) == 0) continue;
      axes.push_back(a);
      family.axes.push_back(whole.axes()[static_cast<std::size_t>(a)].name);
    }
    family.size = whole.group_size(axes);
    if (family.size > 1)
      families.emplace(detail::name_of_ranks(whole.group(axes, rank), mesh.manager().world_size()),
                       std::move(family));
  }
  return families;
}

// A group with options of its own has them behind its ranks.
const Family* family_of(const std::map<std::string, Family>& families, const std::string& group) {
  for (const auto& [name, family] : families)
    if (group == name || group.starts_with(name + " ")) return &family;
  return nullptr;
}

struct Kind {
  Collective collective;
  /// The cost model counts the whole result, the trace what a rank gives.
  bool times_size;
};
std::optional<Kind> kind_of(const std::string& operation) {
  static const std::map<std::string, Kind> kinds{
      {"all_reduce", {Collective::all_reduce, false}},
      {"all_gather", {Collective::all_gather, true}},
      {"reduce_scatter", {Collective::reduce_scatter, false}},
      {"broadcast", {Collective::broadcast, false}},
      {"reduce", {Collective::reduce, false}},
      {"all_to_all", {Collective::all_to_all, false}},
      {"send", {Collective::send, false}},
      {"exchange", {Collective::send, false}}};
  const auto it = kinds.find(operation);
  return it == kinds.end() ? std::nullopt : std::optional(it->second);
}

}  // namespace

MeshTraffic traffic_of(const CommTrace& trace, const DeviceMesh& mesh, double steps) {
  if (!(steps > 0))
    throw InvalidArgument(concat("traffic_of a trace of ", steps, " steps; give a number above 0"));
  mesh.coordinate();  // throws on a rank outside of the mesh
  const auto families = families_of(mesh);
  std::map<std::tuple<std::vector<std::string>, Collective, double>, double> calls;
  std::map<std::pair<std::string, std::string>, CommSummary> left_out;
  for (const CommEvent& event : trace.events()) {
    const Family* family = family_of(families, event.group);
    const auto kind = kind_of(event.operation);
    if (family && kind) {
      const double bytes = static_cast<double>(event.bytes) * (kind->times_size ? family->size : 1);
      calls[{family->axes, kind->collective, bytes}] += 1 / steps;
    } else if (event.operation != "receive") {
      CommSummary& sum = left_out[{event.operation, event.group}];
      sum.operation = event.operation;
      sum.group = event.group;
      ++sum.count;
      sum.bytes += event.bytes;
      sum.microseconds += event.end - event.begin;
    }
  }
  MeshTraffic all;
  for (const auto& [key, number] : calls)
    if (std::get<2>(key) > 0)
      all.traffic.push_back({std::get<0>(key), std::get<1>(key), std::get<2>(key), number});
  for (auto& [key, sum] : left_out) all.left_out.push_back(std::move(sum));
  return all;
}

}  // namespace tessera
