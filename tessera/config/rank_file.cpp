#include "tessera/config/rank_file.h"

#include <map>
#include <optional>

#include "tessera/base/internal/name.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/config/detail/document.h"
#include "tessera/config/errors.h"

namespace tessera {
namespace {

struct RankLine {
  int rank = 0;
  std::string host;
  int slot = 0;
};

// "rank 3=host1 slot=2", with blanks around the words; nullopt for another line.
std::optional<RankLine> parse_rank_line(std::string line) {
  if (line.find_first_of("\r\v\f") != line.npos) return std::nullopt;  // no blanks here
  // The first and the last: a host may hold others.
  for (const std::size_t equals : {line.rfind('='), line.find('=')})
    if (equals != line.npos) line.replace(equals, 1, " = ");
  TextReader in(line);
  std::vector<std::string> words;
  for (std::string word; words.size() < 8 && in >> word;) words.push_back(word);
  if (words.size() != 7 || words[0] != "rank" || words[2] != "=" || words[4] != "slot" ||
      words[5] != "=")
    return std::nullopt;
  const auto rank = parse_number(words[1]), slot = parse_number(words[6]);
  // At most nine digits, so that every number fits.
  if (!rank || !slot || words[1].size() > 9 || words[6].size() > 9) return std::nullopt;
  return RankLine{static_cast<int>(*rank), words[3], static_cast<int>(*slot)};
}

}  // namespace

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
  std::map<std::string, int> first, used, devices;
  int slots = 0;
  for (const Host& host : topology.hosts) {
    first[host.name] = slots;
    devices[host.name] = host.devices;
    slots += host.devices;
  }
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
    const auto fail = [&](const auto&... why) {
      return ConfigFileError(source, ":", number, ": ", why...);
    };
    const auto known = [&](const std::string& host) {
      if (!first.contains(host)) throw fail("host '", printable(host), "' is not in the topology");
    };
    const auto entry = parse_rank_line(line);
    const bool has_rank = entry.has_value();
    if (lines++ > 0 && has_rank != ranked)
      throw fail(
          "lines of two forms are mixed: either \"rank N=host slot=M\" or a host's name on each "
          "line");
    ranked = has_rank;
    if (has_rank) {
      known(entry->host);
      if (entry->slot >= devices[entry->host])
        throw fail("slot ", entry->slot, " of host '", entry->host, "', which has ",
                   devices[entry->host], " devices");
      if (!by_rank.emplace(entry->rank, first[entry->host] + entry->slot).second)
        throw fail("rank ", entry->rank, " is duplicated");
    } else {
      if (line.find_first_of(" \t=") != std::string::npos)
        throw fail("'", printable(line), "' is neither \"rank N=host slot=M\" nor a host's name");
      known(line);
      if (used[line] == devices[line])
        throw fail("host '", line, "' is named more often than it has devices, ", devices[line]);
      by_rank.emplace(lines - 1, first[line] + used[line]++);
    }
  }
  std::vector<int> slot_of;
  for (const auto& [rank, slot] : by_rank) {
    if (rank != static_cast<int>(slot_of.size()))
      throw ConfigFileError(source, ": rank ", slot_of.size(), " is missing");
    slot_of.push_back(slot);
  }
  return slot_of;
}

std::vector<int> read_rank_file(const std::string& path, const Topology& topology) {
  return parse_rank_file(detail::read_text(path), topology, path);
}

}  // namespace tessera
