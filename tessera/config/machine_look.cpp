#include "tessera/config/topology_file.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <utility>

#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/config/detail/document.h"
#include "tessera/config/internal/hwloc_topology.h"
#include "tessera/mesh/errors.h"

namespace tessera {
namespace {

// What a rank says begins with what it is: a topology of a host in JSON, the path of a file with
// its contents behind it, or why there is nothing.
constexpr char kJson = '{', kFile = 'f', kSlurm = 's', kUnknown = '?';

std::string inside_of_host(int ranks) {
  try {
    return format_topology(live_host_of(ranks, "host0"), FileFormat::json);
  } catch (const NotAvailable& error) {
    return kUnknown + std::string(error.what());
  } catch (const ConfigFileError& error) {
    return kUnknown + std::string(error.what());
  }
}

std::string around(const MachineSources& sources) {
  if (!sources.file.empty()) {
    detail::format_of(sources.file);
    return concat(kFile, sources.file, '\n', detail::read_text(sources.file));
  }
  std::error_code absent;
  if (!std::filesystem::exists(sources.slurm, absent))
    return concat(kUnknown, "there is no ", sources.slurm);
  try {
    return concat(kSlurm, sources.slurm, '\n', detail::read_text(sources.slurm));
  } catch (const ConfigFileError& error) {
    return kUnknown + std::string(error.what());
  }
}

/// Puts a host's inside in its place. Classes of links have the same values wherever hwloc is
/// asked, so that their names tell them apart.
void put_inside(Topology& whole, Host& host, const Topology& one) {
  std::vector<int> class_of;
  for (const LinkClass& link : one.device_links) {
    auto at = std::ranges::find(whole.device_links, link.name, &LinkClass::name);
    if (at == whole.device_links.end()) at = whole.device_links.insert(at, link);
    class_of.push_back(static_cast<int>(at - whole.device_links.begin()));
  }
  const Host& inside = one.hosts.front();
  host.link_class = class_of[inside.link_class];
  host.rail = inside.rail;
  host.links = inside.links;
  for (DeviceLink& link : host.links) link.link_class = class_of[link.link_class];
}

/// The machines of a file with the job's ranks on their slots.
FoundTopology on_file(FoundTopology job, const std::string& path, const std::string& text) {
  const Topology given = parse_topology(text, detail::format_of(path), path);
  const int ranks = static_cast<int>(job.slot_of.size());
  if (given.slots() != ranks)
    throw MappingError(path, " has ", given.slots(), " slots, and the job ", ranks,
                       " ranks: measure it again (tessera bench topology), or leave the file out");
  std::map<std::string, int> first_slot;
  for (std::size_t h = 0; h < given.hosts.size(); ++h)
    first_slot[given.hosts[h].name] = given.first_slot(static_cast<int>(h));
  const auto known = [&](const Host& host) {
    return std::ranges::any_of(given.hosts, [&](const Host& other) {
      return other.name == host.name && other.devices == host.devices;
    });
  };
  if (std::ranges::all_of(job.topology.hosts, known)) {
    const auto host_of = job.topology.hosts_of_slots();
    for (int& slot : job.slot_of) {
      const int host = host_of[slot];
      slot += first_slot[job.topology.hosts[host].name] - job.topology.first_slot(host);
    }
  } else {
    job.slot_of = numbers_below(ranks);
    job.unknown.push_back(
        concat("where the ranks are: the hosts of ", path,
               " are not those that the ranks are on, so rank r is taken to run on slot r"));
  }
  job.topology = given;
  return job;
}

void put_switches(FoundTopology& job, const std::string& around) {
  std::string why = around.substr(std::min<std::size_t>(1, around.size()));
  if (around.starts_with(kSlurm)) {
    const auto end = around.find('\n');
    try {
      job.topology = with_slurm_switches(job.topology, around.substr(end + 1), 1e-6, 0,
                                         around.substr(1, end - 1));
      return;
    } catch (const ConfigurationError& error) {
      why = error.what();
    }
  }
  job.unknown.push_back(concat("how the hosts are connected: ", why));
}

FoundTopology join(FoundTopology job, const std::vector<std::string>& insides,
                   const std::string& around) {
  if (around.starts_with(kFile)) {
    const auto end = around.find('\n');
    return on_file(std::move(job), around.substr(1, end - 1), around.substr(end + 1));
  }
  for (std::size_t h = 0; h < insides.size(); ++h) {
    Host& host = job.topology.hosts[h];
    const std::string& said = insides[h];
    if (said.starts_with(kJson)) {
      put_inside(job.topology, host, parse_topology(said, FileFormat::json, host.name));
    } else if (host.devices > 1) {
      job.unknown.push_back(concat("the inside of ", host.name, ": ",
                                   said.starts_with(kUnknown) ? said.substr(1) : said));
    }
  }
  if (job.topology.hosts.size() > 1) put_switches(job, around);
  if (job.slot_of.size() > 1)
    job.unknown.emplace_back(
        "latencies and bandwidths: those of the topology are defaults; `tessera bench topology` "
        "measures them into a file");
  job.topology.check();
  return job;
}

}  // namespace

MachineLook machine_look(const MachineSources& sources) {
  return {.inside = inside_of_host, .around = [sources] { return around(sources); }, .join = join};
}

}  // namespace tessera
