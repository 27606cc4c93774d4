#include "tessera/config/rank_file.h"

#include <map>
#include <regex>
#include <sstream>

#include "tessera/base/text.h"
#include "tessera/config/detail/document.h"
#include "tessera/config/errors.h"

namespace tessera {

std::string open_mpi_rank_file(const Topology& topology, const std::vector<int>& slot_of) {
  const auto host_of = topology.hosts_of_slots();
  std::vector<int> first;
  for (std::size_t h = 0; h < topology.hosts.size(); ++h)
    first.push_back(h == 0 ? 0 : first.back() + topology.hosts[h - 1].devices);
  TextStream out;
  for (std::size_t r = 0; r < slot_of.size(); ++r) {
    const int h = host_of.at(slot_of[r]);
    out << "rank " << r << '=' << topology.hosts[h].name << " slot=" << slot_of[r] - first[h]
        << '\n';
  }
  return std::move(out).str();
}

std::string slurm_host_file(const Topology& topology, const std::vector<int>& slot_of) {
  const auto host_of = topology.hosts_of_slots();
  TextStream out;
  for (int slot : slot_of) out << topology.hosts[host_of.at(slot)].name << '\n';
  return std::move(out).str();
}

bool keeps_device_order(const Topology& topology, const std::vector<int>& slot_of) {
  const auto host_of = topology.hosts_of_slots();
  std::vector<int> last(topology.hosts.size(), -1);
  for (int slot : slot_of) {
    int& before = last[host_of.at(slot)];
    if (slot < before) return false;
    before = slot;
  }
  return true;
}

std::vector<int> parse_rank_file(const std::string& text, const Topology& topology,
                                 const std::string& source) {
  std::map<std::string, int> first, used;
  std::map<std::string, int> devices;
  int slots = 0;
  for (const Host& host : topology.hosts) {
    first[host.name] = slots;
    devices[host.name] = host.devices;
    slots += host.devices;
  }
  const std::regex open_mpi("rank\\s+([0-9]{1,9})\\s*=\\s*(\\S+)\\s+slot\\s*=\\s*([0-9]{1,9})");
  std::map<int, int> by_rank;
  TextReader in(text);
  std::string line;
  int number = 0, lines = 0;
  bool ranked = false;
  while (std::getline(in, line)) {
    ++number;
    line = line.substr(0, line.find('#'));
    const auto begin = line.find_first_not_of(" \t\r");
    if (begin == std::string::npos) continue;
    line = line.substr(begin, line.find_last_not_of(" \t\r") - begin + 1);
    const auto fail = [&](const std::string& why) {
      return ConfigFileError(concat(source, ":", number, ": ", why));
    };
    const auto known = [&](const std::string& host) {
      if (!first.contains(host)) throw fail(concat("host '", host, "' is not in the topology"));
    };
    std::smatch match;
    const bool has_rank = std::regex_match(line, match, open_mpi);
    if (lines++ > 0 && has_rank != ranked)
      throw fail(
          "lines of two forms are mixed: either \"rank N=host slot=M\" or a host's name on each "
          "line");
    ranked = has_rank;
    if (has_rank) {
      const int rank = std::stoi(match[1]), device = std::stoi(match[3]);
      known(match[2]);
      if (device >= devices[match[2]])
        throw fail(concat("slot ", device, " of host '", match[2].str(), "', which has ",
                          devices[match[2]], " devices"));
      if (!by_rank.emplace(rank, first[match[2]] + device).second)
        throw fail(concat("rank ", rank, " stands twice"));
    } else {
      if (line.find_first_of(" \t=") != std::string::npos)
        throw fail(concat("'", line, "' is neither \"rank N=host slot=M\" nor a host's name"));
      known(line);
      if (used[line] == devices[line])
        throw fail(concat("host '", line, "' stands here more often than it has devices, ",
                          devices[line]));
      by_rank.emplace(lines - 1, first[line] + used[line]++);
    }
  }
  std::vector<int> slot_of;
  for (const auto& [rank, slot] : by_rank) {
    if (rank != static_cast<int>(slot_of.size()))
      throw ConfigFileError(concat(source, ": rank ", slot_of.size(), " is missing"));
    slot_of.push_back(slot);
  }
  return slot_of;
}

std::vector<int> read_rank_file(const std::string& path, const Topology& topology) {
  return parse_rank_file(detail::read_text(path), topology, path);
}

}  // namespace tessera
