// tessera-bench-topology: one rank of the probe. Rank 0 writes the topology.

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <thread>

#include "measure.h"
#include "tessera/base/internal/counted.h"
#include "tessera/base/text.h"
#include "tessera/config/errors.h"
#include "tessera/config/rank_file.h"
#include "tessera/config/topology_file.h"

namespace {

using namespace tessera;

std::string row(const std::string& what, std::vector<double> latencies,
                std::vector<double> bandwidths) {
  std::ranges::sort(latencies);
  std::ranges::sort(bandwidths);
  char text[160];
  std::snprintf(text, sizeof text, "  %-24s %5zu %10.3g %9.3g .. %-9.3g %10.3g %9.3g .. %.3g\n",
                what.c_str(), latencies.size(), 1e6 * latencies[latencies.size() / 2],
                1e6 * latencies.front(), 1e6 * latencies.back(),
                1e-9 * bandwidths[bandwidths.size() / 2], 1e-9 * bandwidths.front(),
                1e-9 * bandwidths.back());
  return text;
}

std::string report(const app::ProbedJob& job, const ProbedTopology& found) {
  const Topology& topology = found.topology;
  const auto host_of = topology.hosts_of_slots();
  std::string text = concat(counted(topology.slots(), "rank"), " on ",
                            counted(topology.hosts.size(), "host"), '\n');
  text +=
      "  measured                 pairs     latency in us (least .. most)   bandwidth in GB/s "
      "(least .. most)\n";
  const auto rows = [&](const std::string& what, const auto& wanted) {
    std::vector<double> latencies, bandwidths;
    for (const LinkSample& s : job.probe.samples)
      if (wanted(host_of[s.a], host_of[s.b])) {
        latencies.push_back(s.latency);
        bandwidths.push_back(s.bandwidth);
      }
    if (!latencies.empty()) text += row(what, latencies, bandwidths);
  };
  for (std::size_t h = 0; h < topology.hosts.size() && h < 32; ++h)
    rows("inside " + topology.hosts[h].name,
         [&](int a, int b) { return a == static_cast<int>(h) && a == b; });
  rows("between hosts", [](int a, int b) { return a != b; });
  if (job.probe.adapter > 0)
    text +=
        concat("  a host with all its ranks at once sends ", 1e-9 * job.probe.adapter, " GB/s\n");
  for (const LinkClass& link : topology.device_links)
    text += concat("  link class '", link.name, "': ", 1e6 * link.latency, " us, ",
                   1e-9 * link.bandwidth, " GB/s", link.shared ? ", shared by the host" : "", "\n");
  if (topology.hosts.size() > 1)
    text += concat("  network: ", 1e6 * topology.network.latency, " us, ",
                   1e-9 * topology.network.bandwidth, " GB/s\n");
  if (!topology.switches.empty())
    text += concat("  ", topology.switches.size() - 1, " sets of hosts that are near each other\n");
  const auto cores = std::thread::hardware_concurrency();
  if (topology.hosts[0].devices > static_cast<int>(cores))
    text += concat("  note: ", topology.hosts[0].devices, " ranks on the ", cores, " cores of ",
                   topology.hosts[0].name, " take turns: the numbers say little\n");
  for (const auto& note : found.notes) text += "  note: " + note + "\n";
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program(
      "Measures the links between the ranks of a job, and writes the topology that `tessera plan "
      "--topology` reads");
  program.name("tessera bench topology");
  program.footer(
      "Start it as the job is started:\n"
      "  tessera run -n 4 -- tessera bench topology --out topology.json\n"
      "  srun -N 16 --ntasks-per-node 8 tessera bench topology --out topology.json\n"
      "then: tessera plan --topology topology.json --mesh data=8,model=16 --traffic "
      "model=all_reduce:512MB");
  std::string out = "-", rank_file;
  ManagerOptions manager_options;
  app::ProbeOptions options;
  double kilobytes = 4096, limit = 60;
  program
      .add_option("--out", out,
                  "Write the topology here (.json, .yaml; '-': JSON to standard output)")
      ->capture_default_str();
  program.add_option(
      "--rankfile", rank_file,
      "Also write where the ranks of this job run, as a rank file (for tessera plan --mapping)");
  program
      .add_option("--backend", manager_options.backend,
                  "auto (default), gloo, shm or mpi: what the job will use")
      ->check(CLI::IsMember({"auto", "gloo", "shm", "mpi"}));
  program.add_option("--kilobytes", kilobytes, "Size of the messages that measure bandwidth")
      ->check(CLI::Range(1.0, 1e6))
      ->capture_default_str();
  program.add_option("--seconds", options.seconds, "Time for one number of one pair, about")
      ->check(CLI::Range(1e-4, 60.0))
      ->capture_default_str();
  program.add_option("--pairs", options.pairs, "Pairs to measure inside a host, at most")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  program
      .add_option("--rounds", options.rounds,
                  "Rounds between hosts, at most; each measures every host against another")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  program.add_option("--limit", limit, "Seconds that one call may take")
      ->check(CLI::Range(1.0, 1e6))
      ->capture_default_str();
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? 0 : 2;
  }
  options.bytes = static_cast<std::int64_t>(kilobytes * 1024);
  manager_options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(limit * 1000));
  try {
    if (out != "-" && !out.ends_with(".json") && !out.ends_with(".yaml") && !out.ends_with(".yml"))
      throw InvalidArgument("--out ", out, ": the name must end in .json, .yaml or .yml");
    const auto manager = DistributedManager::initialize(manager_options);
    if (manager.world_size() < 2)
      throw InvalidArgument(
          "one rank has no links; start the probe as the job is started, for instance: tessera run "
          "-n 4 -- tessera bench topology");
    const auto job = app::probe_job(manager, options);
    if (manager.rank() != 0) return 0;
    const auto found = topology_of_probe(job.probe);
    std::ostream& text = out == "-" ? std::cerr : std::cout;
    text << report(job, found);
    bool in_order = true;
    std::vector<int> slot_of(job.rank_of_slot.size());
    for (std::size_t slot = 0; slot < slot_of.size(); ++slot) {
      slot_of[job.rank_of_slot[slot]] = static_cast<int>(slot);
      in_order = in_order && job.rank_of_slot[slot] == static_cast<int>(slot);
    }
    if (!in_order && rank_file.empty())
      text << "  note: the ranks of a host are not neighbours in this job; --rankfile FILE writes "
              "where they run, for tessera plan --mapping FILE\n";
    if (out == "-")
      std::cout << format_topology(found.topology, FileFormat::json) << std::flush;
    else
      write_topology(found.topology, out);
    if (!rank_file.empty()) {
      std::ofstream file(rank_file, std::ios::binary);
      file << open_mpi_rank_file(found.topology, slot_of);
      file.close();
      if (!file)
        throw ConfigurationError(rank_file,
                                 ": cannot be written; check the folder and its permissions");
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "tessera bench topology: " << error.what() << "\n";
    return 1;
  }
}
