// Configuration trees of groups, topologies, and the mapping of ranks to slots.

#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "handles.h"
#include "library.h"
#include "mesh.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/find_topology.h"
#include "tessera/mesh/mapping/mesh_traffic.h"
#include "tessera/mesh/mapping/rank_mapping.h"
#include "tessera/mesh/order.h"

#ifdef TESSERA_PYTHON_HAS_CONFIG
#include "tessera/config/group_config_file.h"
#include "tessera/config/rank_file.h"
#include "tessera/config/topology_file.h"
#include "tessera/config/traffic_file.h"
#endif

namespace tessera::python {

namespace {

using PyGroupConfig = Held<ProcessGroupConfig>;
using ConfigPtr = c10::intrusive_ptr<PyGroupConfig>;

using PyTopology = Held<Topology>;
using TopologyPtr = c10::intrusive_ptr<PyTopology>;

std::optional<int> maybe(std::optional<std::int64_t> number) {
  return number ? std::optional(static_cast<int>(*number)) : std::nullopt;
}
std::optional<std::int64_t> maybe(std::optional<int> number) {
  return number ? std::optional<std::int64_t>(*number) : std::nullopt;
}

/// Names and sizes of the axes, and the table of ranks.
using Table = std::tuple<Names, Numbers, Numbers>;
Table table(const Mesh& mesh) {
  Numbers sizes;
  for (const Axis& axis : mesh.axes()) sizes.push_back(axis.size);
  return {mesh.names(), sizes, from_ints(mesh.ranks())};
}

/// (axes, joined by dashes; collective; bytes; calls) each.
using TrafficTexts = std::vector<std::tuple<std::string, std::string, double, double>>;
std::vector<Traffic> traffic_of(const TrafficTexts& texts) {
  std::vector<Traffic> all;
  for (const auto& [axes, collective, bytes, calls] : texts)
    all.push_back({split_order(axes), collective_from(collective), bytes, calls});
  return all;
}

/// As RankMapping.
using MappingValues = std::tuple<Numbers, double, double, double, bool, std::string>;
MappingValues values(const RankMapping& m) {
  return {from_ints(m.slot_of), m.seconds, m.naive_seconds, m.lower_bound, m.exact, m.method};
}

MappingValues map_ranks(const TopologyPtr& topology, const Names& names, const Numbers& sizes,
                        const TrafficTexts& traffic, std::int64_t exact_limit, double effort,
                        std::int64_t seed, const std::optional<Numbers>& given) {
  const CostModel model(topology->value, mesh_axes(names, sizes), traffic_of(traffic));
  if (given) return values(given_mapping(model, to_ints(*given)));
  MappingOptions options;
  options.exact_limit = exact_limit;
  options.effort = effort;
  options.seed = static_cast<std::uint32_t>(seed);
  return values(optimise_mapping(model, options));
}

#ifdef TESSERA_PYTHON_HAS_CONFIG
FileFormat format_of(const std::string& name) {
  if (name == "yaml") return FileFormat::yaml;
  if (name == "json") return FileFormat::json;
  throw InvalidArgument("a format is 'yaml' or 'json', not '", name, "'");
}
#endif

[[maybe_unused]] [[noreturn]] void without_config(const char* what) {
  throw NotAvailable(what,
                     " needs Tessera::config, which this build lacks: build it where "
                     "nlohmann-json and yaml-cpp are installed");
}

ConfigPtr config_from(const std::string& text, const std::string& format, bool file) {
#ifdef TESSERA_PYTHON_HAS_CONFIG
  return c10::make_intrusive<PyGroupConfig>(file ? read_group_config(text)
                                                 : parse_group_config(text, format_of(format)));
#else
  static_cast<void>(text), static_cast<void>(format), static_cast<void>(file);
  without_config("reading a group configuration");
#endif
}

std::string config_text(const ConfigPtr& config, const std::string& format) {
#ifdef TESSERA_PYTHON_HAS_CONFIG
  return format_group_config(config->value, format_of(format));
#else
  static_cast<void>(config), static_cast<void>(format);
  without_config("writing a group configuration");
#endif
}

TopologyPtr topology_from(const std::string& text, const std::string& format) {
#ifdef TESSERA_PYTHON_HAS_CONFIG
  return c10::make_intrusive<PyTopology>(format == "file" ? read_topology(text)
                                         : format == "hosts"
                                             ? parse_hosts(text)
                                             : parse_topology(text, format_of(format)));
#else
  static_cast<void>(text), static_cast<void>(format);
  without_config("reading a topology");
#endif
}

FoundTopology found_topology(const TopologyPtr& topology, const Numbers& slot_of) {
  return {topology->value, to_ints(slot_of), {}};
}

/// The topology, the slot of each rank, and what is unknown.
std::tuple<TopologyPtr, Numbers, Names> find_machines(const std::string& file) {
#ifdef TESSERA_PYTHON_HAS_CONFIG
  const MachineLook look = machine_look({.file = file});
#else
  if (!file.empty()) without_config("reading a topology");
  const MachineLook look;
#endif
  FoundTopology found = find_topology(here(), look);
  return {c10::make_intrusive<PyTopology>(std::move(found.topology)), from_ints(found.slot_of),
          std::move(found.unknown)};
}

/// Axes, sizes, and what moves.
using StepTexts = std::tuple<Names, Numbers, TrafficTexts>;

StepTexts traffic_from(const std::string& path) {
#ifdef TESSERA_PYTHON_HAS_CONFIG
  const MeshTraffic step = read_traffic(path);
  const auto [names, sizes, ranks] = table(Mesh(step.axes));
  TrafficTexts texts;
  for (const Traffic& t : step.traffic)
    texts.emplace_back(joined_axes(t.axes), to_string(t.collective), t.bytes, t.calls);
  return {names, sizes, texts};
#else
  static_cast<void>(path);
  without_config("reading traffic");
#endif
}

void write_step(const Names& names, const Numbers& sizes, const TrafficTexts& traffic,
                const std::string& path) {
#ifdef TESSERA_PYTHON_HAS_CONFIG
  write_traffic({mesh_axes(names, sizes), traffic_of(traffic)}, path);
#else
  static_cast<void>(names), static_cast<void>(sizes), static_cast<void>(traffic);
  static_cast<void>(path), without_config("writing traffic");
#endif
}

/// The mapping; seconds and bytes between hosts, now and mapped; the ranks; all as text.
using GainValues = std::tuple<MappingValues, std::vector<double>, Numbers, std::string>;
GainValues gain_values(const MeshPtr& mesh, const TopologyPtr& topology, const Numbers& slot_of,
                       const TrafficTexts& traffic) {
  const MappingGain gain =
      mapping_gain(mesh->mesh.mesh(), found_topology(topology, slot_of), traffic_of(traffic));
  return {values(gain.mapping),
          {gain.seconds, gain.mapped_seconds, gain.bytes, gain.mapped_bytes},
          from_ints(gain.ranks),
          gain.to_string()};
}

std::string launcher_file(const std::string& kind, const TopologyPtr& topology,
                          const Numbers& slot_of) {
#ifdef TESSERA_PYTHON_HAS_CONFIG
  return kind == "open_mpi" ? open_mpi_rank_file(topology->value, to_ints(slot_of))
                            : slurm_host_file(topology->value, to_ints(slot_of));
#else
  static_cast<void>(kind), static_cast<void>(topology), static_cast<void>(slot_of);
  without_config("a launcher's rank file");
#endif
}

void register_config(Library& library) {
  library.class_<PyGroupConfig>("ProcessGroupConfig")
      .def(torch::init([](const std::string& root) {
        return c10::make_intrusive<PyGroupConfig>(ProcessGroupConfig({.name = root}));
      }))
      .def("add_node",
           [](const ConfigPtr& self, const std::string& name, const std::string& parent,
              std::optional<std::int64_t> size, const std::string& orthogonal_group,
              const std::string& scope, const std::string& order, const std::string& backend,
              double timeout) {
             self->value.add_node({name, maybe(size), orthogonal_group, scope, order,
                                   group_options(backend, timeout)},
                                  parent);
           })
      .def("add_orthogonal",
           [](const ConfigPtr& self, const std::string& name, const Names& of,
              const std::string& scope, const std::string& backend, double timeout) {
             self->value.add_orthogonal({name, of, scope, group_options(backend, timeout)});
           })
      .def("set_leaf_group_sizes",
           [](const ConfigPtr& self, const Names& names, const Numbers& sizes, bool parents) {
             std::map<std::string, int> all;
             for (const Axis& leaf : mesh_axes(names, sizes)) all[leaf.name] = leaf.size;
             self->value.set_leaf_group_sizes(all, parents);
           })
      .def("set_order", [](const ConfigPtr& self, const std::string& name,
                           const std::string& order) { self->value.set_order(name, order); })
      .def("set_orthogonal",
           [](const ConfigPtr& self, const std::string& name, const std::string& orthogonal_group,
              const std::string& scope) {
             self->value.set_orthogonal(name, orthogonal_group, scope);
           })
      .def("copy",
           [](const ConfigPtr& self) { return c10::make_intrusive<PyGroupConfig>(self->value); })
      .def("inside_world",
           [](const ConfigPtr& self, const std::string& replicas) {
             return c10::make_intrusive<PyGroupConfig>(self->value.inside_world(replicas));
           })
      .def("node_names", [](const ConfigPtr& self) { return self->value.node_names(); })
      .def("leaf_groups",
           [](const ConfigPtr& self, const std::string& below) {
             return below.empty() ? self->value.leaf_groups() : self->value.leaf_groups(below);
           })
      .def("parent",
           [](const ConfigPtr& self, const std::string& name) { return self->value.parent(name); })
      .def("children", [](const ConfigPtr& self,
                          const std::string& name) { return self->value.children(name); })
      .def("closeness", [](const ConfigPtr& self) { return self->value.closeness(); })
      .def("size", [](const ConfigPtr& self,
                      const std::string& name) { return maybe(self->value.size(name)); })
      .def(
          "resolve",
          [](const ConfigPtr& self, std::int64_t world) {
            return c10::make_intrusive<PyGroupConfig>(self->value.resolve(static_cast<int>(world)));
          })
      .def("table", [](const ConfigPtr& self,
                       const Numbers& ranks) { return table(self->value.mesh(to_ints(ranks))); })
      .def("text", [](const ConfigPtr& self) { return self->value.to_string(); })
      .def("same", [](const ConfigPtr& self, const ConfigPtr& other) {
        return self->value == other->value;
      });
  library.def("group_config", &config_from);
  library.def("format_group_config", &config_text);
}

}  // namespace

void register_trees(Library& library) {
  library.class_<PyTopology>("Topology")
      .def(torch::init([](const Numbers& devices) {
        return c10::make_intrusive<PyTopology>(Topology::of_counts(to_ints(devices)));
      }))
      .def("slots", [](const TopologyPtr& self) -> std::int64_t { return self->value.slots(); })
      .def("hosts", [](const TopologyPtr& self) {
        std::vector<std::tuple<std::string, std::int64_t>> all;
        for (const Host& host : self->value.hosts) all.emplace_back(host.name, host.devices);
        return all;
      });
  register_config(library);
  library.def("topology", &topology_from);
  library.def("launcher_file", &launcher_file);
  library.def("map_ranks", &map_ranks);
  library.def("find_topology", &find_machines);
  library.def("read_traffic", &traffic_from);
  library.def("write_traffic", &write_step);
  library.def("mapping_gain", &gain_values);
  // The table of a mesh whose ranks sit as a mapping says.
  library.def("mapped_mesh", [](const Names& names, const Numbers& sizes, const Numbers& slot_of) {
    RankMapping mapping;
    mapping.slot_of = to_ints(slot_of);
    return from_ints(mapped_mesh(mesh_axes(names, sizes), mapping).ranks());
  });
  library.def("create_groups",
              [](const ConfigPtr& config, const std::optional<Numbers>& ranks, bool eager) {
                if (ranks) {
                  here().create_process_groups(config->value, to_ints(*ranks), eager);
                } else {
                  here().create_process_groups(config->value, eager);
                }
              });
  library.def("create_groups_on", [](const ConfigPtr& config, const TopologyPtr& topology,
                                     const std::optional<Numbers>& slot_of,
                                     const TrafficTexts& traffic, bool eager) {
    if (!slot_of)
      return values(
          here().create_process_groups(config->value, topology->value, traffic_of(traffic), eager));
    return values(create_process_groups(here(), config->value, found_topology(topology, *slot_of),
                                        traffic_of(traffic), eager));
  });
}

}  // namespace tessera::python
