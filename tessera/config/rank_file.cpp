#include "tessera/config/rank_file.h"

#include <map>
#include <optional>
#include <string_view>

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
std::optional<RankLine> parse_rank_line(std::string_view line) {
  const auto skip_blanks = [&] {
    const auto skipped = std::min(line.find_first_not_of(" \t"), line.size());
    line.remove_prefix(skipped);
    return skipped > 0;
  };
  const auto take = [&](std::string_view word) {
    if (line.substr(0, word.size()) != word) return false;
    line.remove_prefix(word.size());
    return true;
  };
  // At most nine digits, so that every number fits.
  const auto number = [&]() -> std::optional<int> {
    const auto digits = std::min(line.find_first_not_of("0123456789"), line.size());
    if (digits == 0 || digits > 9) return std::nullopt;
    const auto value = parse_number(line.substr(0, digits));
    line.remove_prefix(digits);
    return static_cast<int>(*value);
  };
  RankLine found;
  if (!take("rank") || !skip_blanks()) return std::nullopt;
  const auto rank = number();
  skip_blanks();
  if (!rank || !take("=")) return std::nullopt;
  skip_blanks();
  const auto host = std::min(line.find_first_of(" \t"), line.size());
  found.host = line.substr(0, host);
  line.remove_prefix(host);
  if (found.host.empty() || !skip_blanks() || !take("slot")) return std::nullopt;
  skip_blanks();
  if (!take("=")) return std::nullopt;
  skip_blanks();
  const auto slot = number();
  if (!slot || !line.empty()) return std::nullopt;
  found.rank = *rank;
  found.slot = *slot;
  return found;
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
    const auto fail = [&](const std::string& why) {
      return ConfigFileError(concat(source, ":", number, ": ", why));
    };
    const auto known = [&](const std::string& host) {
      if (!first.contains(host))
        throw fail(concat("host '", printable(host), "' is not in the topology"));
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
        throw fail(concat("slot ", entry->slot, " of host '", entry->host, "', which has ",
                          devices[entry->host], " devices"));
      if (!by_rank.emplace(entry->rank, first[entry->host] + entry->slot).second)
        throw fail(concat("rank ", entry->rank, " is duplicated"));
    } else {
      if (line.find_first_of(" \t=") != std::string::npos)
        throw fail(
            concat("'", printable(line), "' is neither \"rank N=host slot=M\" nor a host's name"));
      known(line);
      if (used[line] == devices[line])
        throw fail(
            concat("host '", line, "' is named more often than it has devices, ", devices[line]));
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
