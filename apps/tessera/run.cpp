#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "commands.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/counted.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/config/internal/hwloc_topology.h"
#include "tessera/config/topology_file.h"
#include "tessera/config/traffic_file.h"
#include "tessera/launch/local_run.h"

namespace tessera::app {
namespace {

struct RunOptions {
  LocalRun run;
  std::string threads = "auto";
  std::string bind = "none";
  std::string output = "live";
  // MiB.
  std::int64_t keep = 1024;
  std::string traffic, topology;
};

int threads_from(const std::string& text) {
  if (text == "auto") return LocalRun::automatic;
  if (text == "off") return LocalRun::off;
  if (text.empty() || text.size() > 6 ||
      text.find_first_not_of("0123456789") != std::string::npos || std::stoi(text) < 1) {
    throw InvalidArgument("--threads ", text, ": give auto, off or a number from 1 to 999999");
  }
  return std::stoi(text);
}

// This host, as it was measured or as hwloc sees it.
Topology host_of(const RunOptions& options) {
  if (!options.topology.empty()) return read_topology(options.topology);
  try {
    return live_host_of(options.run.ranks, "host0");
  } catch (const NotAvailable& error) {
    throw NotAvailable("--map ", options.traffic, ": ", error.what(),
                       "; say what this host is by --topology FILE (of `tessera bench topology`, ",
                       "or \"hosts: 1x", options.run.ranks, "\" where all slots are alike)");
  }
}

// The slot of each rank for the traffic of --map, on this host.
std::vector<int> mapped_slots(const RunOptions& options) {
  const int ranks = options.run.ranks;
  const MeshTraffic step = read_traffic(options.traffic);
  if (const int size = Mesh(step.axes).size(); size != ranks)
    throw InvalidArgument("--map ", options.traffic, " is traffic of a mesh of ",
                          counted(size, "rank"), ", but -n is ", ranks);
  const Topology host = host_of(options);
  if (host.hosts.size() != 1 || host.slots() != ranks)
    throw InvalidArgument("--topology ", options.topology, " has ", counted(host.slots(), "slot"),
                          " on ", counted(host.hosts.size(), "host"),
                          "; `tessera run` needs one host with ", ranks);
  const RankMapping mapping = optimise_mapping(CostModel(host, step.axes, step.traffic));
  std::cerr << concat("tessera run: ranks on slots ", list(mapping.slot_of), ", ",
                      significant(1e3 * mapping.seconds, 3), " ms per step instead of ",
                      significant(1e3 * mapping.naive_seconds, 3), "\n");
  return mapping.slot_of;
}

}  // namespace

Command add_run(CLI::App& program) {
  auto options = std::make_shared<RunOptions>();
  LocalRun& run = options->run;
  CLI::App* parser = program.add_subcommand("run", "Start ranks of a program on this host");
  parser->footer(
      "Example: tessera run -n 2 --timeout 60 -- ./train --epochs 3\nWhat stands behind \"--\" is "
      "the program and its own arguments.");
  parser
      ->add_option("-n,--ranks,--np,--nproc-per-node,--nproc_per_node", run.ranks,
                   "Number of ranks (-np too)")
      ->required()
      ->check(CLI::Range(1, 100000));
  parser
      ->add_option("--timeout", run.timeout,
                   "End everything after this many seconds, exit status 124 (0: no limit)")
      ->check(CLI::Range(0.0, 1e8));
  parser->add_option("--grace", run.grace, "Seconds from SIGTERM to SIGKILL")
      ->check(CLI::Range(0.0, 1e8))
      ->capture_default_str();
  parser
      ->add_option("--linger", run.linger,
                   "After a failure, seconds that the other ranks get to end by themselves")
      ->check(CLI::Range(0.0, 1e8))
      ->capture_default_str();
  parser->add_option("--log-dir", run.log_folder,
                     "Also write each rank's output to rank-R.out and rank-R.err in this folder");
  parser
      ->add_option(
          "--threads", options->threads,
          "OMP_NUM_THREADS of each rank: auto (cores / ranks, unless it is set), a number, or off")
      ->capture_default_str();
  parser
      ->add_option("--allocator", run.allocator,
                   "Where the ranks' memory comes from: system; keep (freed memory is kept for the "
                   "next tensor: fewer page faults); or the path of an allocator's shared library")
      ->capture_default_str();
  parser
      ->add_option("--bind", options->bind,
                   "Tie each rank to its share of the cores: none or cores")
      ->check(CLI::IsMember({"none", "cores"}))
      ->capture_default_str();
  CLI::Option* bind = parser->get_option("--bind");
  CLI::Option* map = parser->add_option("--map", options->traffic,
                                        "Map the ranks to this host's devices and cores for the "
                                        "traffic in this file (ts.write_traffic), "
                                        "and tie them to these cores unless --bind says none");
  parser
      ->add_option(
          "--topology", options->topology,
          "With --map: this host as `tessera bench topology` measured it, in place of what "
          "hwloc sees")
      ->needs(map);
  parser
      ->add_option("--output", options->output,
                   "live: lines as they come; by-rank: all of rank 0, then all of rank 1, ...")
      ->check(CLI::IsMember({"live", "by-rank"}))
      ->capture_default_str();
  parser
      ->add_option("--keep", options->keep,
                   "With by-rank: MiB of lines that wait for their turn; beyond, they come live")
      ->check(CLI::Range(0, 1 << 30))
      ->capture_default_str();
  parser->add_option("program", run.command, "Program and its arguments")->required();
  parser->positionals_at_end();
  return {parser, [options, bind] {
            LocalRun request = options->run;
            request.threads = threads_from(options->threads);
            if (!options->traffic.empty()) request.slot_of = mapped_slots(*options);
            request.bind = bind->count() > 0 ? options->bind == "cores" : !request.slot_of.empty();
            request.output =
                options->output == "live" ? LocalRun::Output::live : LocalRun::Output::by_rank;
            request.keep_bytes = options->keep << 20;
            return run_local(request).exit_status;
          }};
}

}  // namespace tessera::app
