// One function per launcher family: which variables it sets, and what follows from them. Their
// table, which says when a family is present, is at the end.

#include <algorithm>
#include <climits>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/internal/file.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/launch/detail/launch_reader.h"
#include "tessera/launch/detail/run_scope.h"
#include "tessera/launch/internal/node_list.h"

namespace tessera::detail {
namespace {

std::function<bool(const Environment&)> any_of(std::vector<const char*> names) {
  return [names](const Environment& e) {
    return std::ranges::any_of(names, [&](const char* name) { return e.has(name); });
  };
}

constexpr unsigned long long largest_id = 1ull << 62;

// Open MPI and Hydra do not say where rank 0 runs. On one host that does not matter.
void mpi_rendezvous(LaunchReader& in) {
  Launch& launch = in.launch();
  const bool one_host = launch.local_size == launch.world_size;
  launch.node_rank = one_host ? 0 : -1;
  in.note("node_rank", one_host ? "all ranks are on one host" : "not given by this launcher");
  if (one_host && launch.world_size > 1) {
    launch.address = loopback_address();
    in.note("address", "all ranks are on one host");
    if (in.has("PMIX_NAMESPACE")) {
      const std::string name = in.text("PMIX_NAMESPACE");
      launch.port = derived_port(Hash().text(name).value() % 4096, 0);
      in.note("port", concat("derived from PMIX_NAMESPACE=", name));
    } else {
      launch.port = 29500;
      in.note("port",
              "default of a launcher that names no port; set MASTER_PORT where several jobs share "
              "the host");
    }
  } else if (in.has("MASTER_ADDR") != in.has("MASTER_PORT") && !in.overrides().address &&
             !in.overrides().port && launch.world_size > 1) {
    in.require({"MASTER_ADDR", "MASTER_PORT"});
  }
  in.master();
}

void read_tessera(LaunchReader& in) {
  in.require({"TESSERA_RANK", "TESSERA_WORLD_SIZE", "TESSERA_LOCAL_RANK", "TESSERA_LOCAL_SIZE",
              "TESSERA_NODE_RANK", "TESSERA_ADDRESS", "TESSERA_PORT"});
  in.integer(&Launch::rank, "rank", "TESSERA_RANK");
  in.integer(&Launch::world_size, "world_size", "TESSERA_WORLD_SIZE");
  in.integer(&Launch::local_rank, "local_rank", "TESSERA_LOCAL_RANK");
  in.integer(&Launch::local_size, "local_size", "TESSERA_LOCAL_SIZE");
  in.integer(&Launch::node_rank, "node_rank", "TESSERA_NODE_RANK");
  in.integer(&Launch::port, "port", "TESSERA_PORT");
  in.launch().address = in.text("TESSERA_ADDRESS");
  in.note("address", concat("TESSERA_ADDRESS=", in.launch().address));
}

void read_torchrun(LaunchReader& in) {
  in.require({"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
              "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"});
  in.integer(&Launch::rank, "rank", "RANK");
  in.integer(&Launch::world_size, "world_size", "WORLD_SIZE");
  in.integer(&Launch::local_rank, "local_rank", "LOCAL_RANK");
  in.integer(&Launch::local_size, "local_size", "LOCAL_WORLD_SIZE");
  in.integer(&Launch::node_rank, "node_rank", "GROUP_RANK");
  in.master_required();
  in.launch().job_id = *in.environment().get("TORCHELASTIC_RUN_ID");
  if (in.has("GROUP_WORLD_SIZE") && static_cast<unsigned long long>(in.launch().node_rank) >=
                                        in.number("GROUP_WORLD_SIZE", INT_MAX)) {
    in.fail(in.shown("GROUP_RANK"), " is not below ", in.shown("GROUP_WORLD_SIZE"));
  }
  if (in.has("TORCHELASTIC_USE_AGENT_STORE")) {
    const std::string value = in.text("TORCHELASTIC_USE_AGENT_STORE");
    if (value != "True" && value != "False")
      in.fail(in.shown("TORCHELASTIC_USE_AGENT_STORE"), " is neither True nor False");
    in.launch().agent_serves_store = value == "True";
    in.note("agent_serves_store", concat("TORCHELASTIC_USE_AGENT_STORE=", value));
  }
}

void read_open_mpi(LaunchReader& in) {
  // OMPI_COMM_WORLD_NODE_RANK is not the number of a node: it counts the processes of all jobs on
  // this node.
  in.require({"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
              "OMPI_COMM_WORLD_LOCAL_SIZE"});
  in.integer(&Launch::rank, "rank", "OMPI_COMM_WORLD_RANK");
  in.integer(&Launch::world_size, "world_size", "OMPI_COMM_WORLD_SIZE");
  in.integer(&Launch::local_rank, "local_rank", "OMPI_COMM_WORLD_LOCAL_RANK");
  in.integer(&Launch::local_size, "local_size", "OMPI_COMM_WORLD_LOCAL_SIZE");
  if (in.has("PMIX_NAMESPACE")) in.launch().job_id = in.text("PMIX_NAMESPACE");
  mpi_rendezvous(in);
}

void read_pmi(LaunchReader& in) {
  const bool pals = in.has("PMI_LOCAL_RANK") || in.has("PMI_LOCAL_SIZE");
  const std::string local_rank = pals ? "PMI_LOCAL_RANK" : "MPI_LOCALRANKID";
  const std::string local_size = pals ? "PMI_LOCAL_SIZE" : "MPI_LOCALNRANKS";
  in.require({"PMI_RANK", "PMI_SIZE", local_rank, local_size});
  in.integer(&Launch::rank, "rank", "PMI_RANK");
  in.integer(&Launch::world_size, "world_size", "PMI_SIZE");
  in.integer(&Launch::local_rank, "local_rank", local_rank);
  in.integer(&Launch::local_size, "local_size", local_size);
  mpi_rendezvous(in);
}

void read_jsm(LaunchReader& in) {
  Launch& launch = in.launch();
  in.require({"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "LSB_JOBID",
              "LSB_DJOB_RANKFILE"});
  in.integer(&Launch::rank, "rank", "JSM_NAMESPACE_RANK");
  in.integer(&Launch::world_size, "world_size", "JSM_NAMESPACE_SIZE");
  in.integer(&Launch::local_rank, "local_rank", "JSM_NAMESPACE_LOCAL_RANK");
  const unsigned long long job = in.number("LSB_JOBID", largest_id);
  launch.job_id = *in.environment().get("LSB_JOBID");

  // The launch node first, then one line per slot.
  const std::string path = in.text("LSB_DJOB_RANKFILE");
  std::string text;
  try {
    text = read_whole_file(path);
  } catch (const FileError& error) {
    in.fail(in.shown("LSB_DJOB_RANKFILE"), ": the file cannot be read: ", error.what());
  }
  TextReader words(text);
  std::set<std::string> known;
  std::string host;
  words >> host;
  while (words >> host) {
    if (const auto fault = name_fault(host))
      in.fail(in.shown("LSB_DJOB_RANKFILE"), ": the host '", printable(host), "' ", *fault);
    if (known.insert(host).second) launch.hosts.push_back(host);
  }
  if (launch.hosts.empty())
    in.fail(in.shown("LSB_DJOB_RANKFILE"),
            ": the file names no compute host (the first line is the launch node)");
  in.note("hosts", concat("LSB_DJOB_RANKFILE=", path));

  const int hosts = static_cast<int>(launch.hosts.size());
  if (in.has("JSM_NAMESPACE_LOCAL_SIZE")) {
    in.integer(&Launch::local_size, "local_size", "JSM_NAMESPACE_LOCAL_SIZE");
  } else if (launch.world_size % hosts == 0) {
    launch.local_size = launch.world_size / hosts;
    in.note("local_size",
            concat("assumed equal on the ", hosts,
                   " hosts of LSB_DJOB_RANKFILE, as JSM_NAMESPACE_LOCAL_SIZE is not set"));
  } else if (!in.overrides().local_size) {
    in.fail("JSM_NAMESPACE_LOCAL_SIZE is not set, and ", in.shown("JSM_NAMESPACE_SIZE"),
            " ranks cannot be divided evenly over the ", hosts, " hosts of ",
            in.shown("LSB_DJOB_RANKFILE"), "; give local_size in code");
  }
  launch.node_rank = -1;
  const std::string& me = in.environment().hostname;
  for (int h = 0; h < hosts; ++h)
    if (hosts == 1 || (!me.empty() && launch.hosts[h].substr(0, launch.hosts[h].find('.')) ==
                                          me.substr(0, me.find('.'))))
      launch.node_rank = h;
  in.note("node_rank", launch.node_rank < 0 ? "this host's name is not in LSB_DJOB_RANKFILE"
                                            : "place of this host in LSB_DJOB_RANKFILE");
  launch.address = launch.hosts.front();
  in.note("address", concat("first compute host of LSB_DJOB_RANKFILE=", path));
  launch.port = derived_port(job, 0);
  in.note("port", concat("derived from LSB_JOBID=", launch.job_id));
  in.master();
}

// True if the environment is that of a step started by srun (a batch script or an interactive shell
// is none).
bool is_slurm_step(const Environment& environment) {
  for (const char* name : {"SLURM_STEP_ID", "SLURM_STEPID"}) {
    // Slurm's numbers for its own steps (batch script, interactive shell, external processes) begin
    // here: SLURM_MAX_NORMAL_STEP_ID.
    const auto id = environment.get(name);
    const auto value = id ? parse_number(*id) : std::nullopt;
    if (value && *value > 0xfffffff0u) return false;
  }
  return any_of({"SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS",
                 "SLURM_STEP_NUM_NODES", "SLURM_STEP_ID", "SLURM_STEPID"})(environment);
}

// True if PMI_RANK and PMI_SIZE are only what srun --mpi=pmi2 adds to its own variables.
bool pmi_belongs_to_slurm(const Environment& environment) {
  if (any_of({"MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"})(
          environment))
    return false;
  auto same = [&](const char* a, const char* b) {
    const auto x = environment.get(a), y = environment.get(b);
    return x && y && parse_number(*x) && parse_number(*x) == parse_number(*y);
  };
  return is_slurm_step(environment) && same("PMI_RANK", "SLURM_PROCID") &&
         (same("PMI_SIZE", "SLURM_STEP_NUM_TASKS") || same("PMI_SIZE", "SLURM_NTASKS"));
}

// The first host of SLURM_HOSTFILE, which is that of rank 0: names as in a node list, "name*4" for
// four ranks, and comments.
std::string first_of_host_file(LaunchReader& in) {
  const std::string path = in.text("SLURM_HOSTFILE");
  std::string text;
  try {
    text = read_whole_file(path);
  } catch (const FileError& error) {
    in.fail(in.shown("SLURM_HOSTFILE"), ", whose first host is that of rank 0, cannot be ",
            "read here: ", error.what(), "; put it where all hosts see it, or set ",
            "MASTER_ADDR to that host");
  }
  TextReader lines(text);
  for (std::string line; std::getline(lines, line);) {
    line = line.substr(0, line.find('#'));
    const auto begin = line.find_first_not_of(" \t\r");
    if (begin == std::string::npos) continue;
    line = line.substr(begin, line.find_first_of("*\r", begin) - begin);
    return expand_node_list(line).front();
  }
  in.fail(in.shown("SLURM_HOSTFILE"), ": the file names no host");
}

// Where rank 0 runs. The nodes of a step are sorted by name, and every distribution of Slurm's
// starts rank 0 on the first one, but for one: "arbitrary" starts it where the user says.
void slurm_address(LaunchReader& in, const std::string& nodes) {
  Launch& launch = in.launch();
  const auto distribution = in.environment().get("SLURM_DISTRIBUTION");
  const bool arbitrary = distribution && distribution->rfind("arbitrary", 0) == 0;
  const bool given = in.has("MASTER_ADDR") || in.overrides().address;
  launch.address = launch.hosts.front();
  in.note("address", concat("first host of SLURM_STEP_NODELIST=", nodes));
  if (given || launch.hosts.size() == 1) return;
  if (arbitrary && in.has("SLURM_HOSTFILE")) {
    launch.address = first_of_host_file(in);
    in.note("address",
            concat("first host of SLURM_HOSTFILE=", *in.environment().get("SLURM_HOSTFILE")));
  }
  const auto node = static_cast<std::size_t>(launch.node_rank);
  if (launch.rank == 0 && node < launch.hosts.size() && launch.hosts[node] != launch.address)
    in.fail("rank 0 runs on '", launch.hosts[node], "' and the others look for it on '",
            launch.address, "', the ", launch.origin.at("address"),
            "; set MASTER_ADDR to rank 0's host");
}

void read_slurm(LaunchReader& in) {
  Launch& launch = in.launch();
  const std::string tasks = in.first_set({"SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"});
  const std::string job = in.first_set({"SLURM_JOB_ID", "SLURM_JOBID"});
  const std::string step = in.first_set({"SLURM_STEP_ID", "SLURM_STEPID"});
  in.require({job, tasks, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST",
              "SLURM_STEP_TASKS_PER_NODE"});
  in.integer(&Launch::rank, "rank", "SLURM_PROCID");
  in.integer(&Launch::world_size, "world_size", tasks);
  in.integer(&Launch::local_rank, "local_rank", "SLURM_LOCALID");
  in.integer(&Launch::node_rank, "node_rank", "SLURM_NODEID");
  const std::string nodes = in.text("SLURM_STEP_NODELIST");
  const std::string counts = in.text("SLURM_STEP_TASKS_PER_NODE");
  launch.hosts = expand_node_list(nodes);
  launch.ranks_per_host = expand_task_counts(counts);
  in.note("hosts", concat("SLURM_STEP_NODELIST=", nodes));
  in.note("ranks_per_host", concat("SLURM_STEP_TASKS_PER_NODE=", counts));
  if (in.has("SLURM_STEP_NUM_TASKS") && in.number("SLURM_STEP_NUM_TASKS", INT_MAX) !=
                                            static_cast<unsigned long long>(launch.world_size)) {
    in.fail(in.shown("SLURM_STEP_NUM_TASKS"), " contradicts ", in.shown(tasks));
  }
  if (in.has("SLURM_STEP_NUM_NODES") &&
      in.number("SLURM_STEP_NUM_NODES", INT_MAX) != launch.hosts.size()) {
    in.fail(in.shown("SLURM_STEP_NUM_NODES"), " contradicts ", in.shown("SLURM_STEP_NODELIST"),
            ", which names ", launch.hosts.size(), " hosts");
  }
  // In a step this may still be the number of the whole job, so only a smaller one is a
  // contradiction.
  if (in.has("SLURM_NNODES") && in.number("SLURM_NNODES", INT_MAX) < launch.hosts.size()) {
    in.fail(in.shown("SLURM_NNODES"), " contradicts ", in.shown("SLURM_STEP_NODELIST"),
            ", which names ", launch.hosts.size(), " hosts");
  }
  if (static_cast<std::size_t>(launch.node_rank) < launch.ranks_per_host.size()) {
    launch.local_size = launch.ranks_per_host[launch.node_rank];
    in.note("local_size",
            concat("entry ", launch.node_rank, " of SLURM_STEP_TASKS_PER_NODE=", counts));
  } else {
    in.fail(in.shown("SLURM_NODEID"), " is not below the number of entries in ",
            in.shown("SLURM_STEP_TASKS_PER_NODE"));
  }
  const unsigned long long job_number = in.number(job, largest_id);
  const unsigned long long step_number = in.has(step) ? in.number(step, largest_id) : 0;
  launch.job_id = *in.environment().get(job);
  slurm_address(in, nodes);
  launch.port = derived_port(job_number, step_number);
  in.note("port", concat("derived from ", job, "=", launch.job_id, " and step ", step_number));
  in.master();
}

void read_plain(LaunchReader& in) {
  Launch& launch = in.launch();
  in.require({"RANK", "WORLD_SIZE"});
  in.integer(&Launch::rank, "rank", "RANK");
  in.integer(&Launch::world_size, "world_size", "WORLD_SIZE");
  in.master_required();
  if (in.has("LOCAL_RANK") || in.has("LOCAL_WORLD_SIZE")) {
    in.require({"LOCAL_RANK", "LOCAL_WORLD_SIZE"});
    in.integer(&Launch::local_rank, "local_rank", "LOCAL_RANK");
    in.integer(&Launch::local_size, "local_size", "LOCAL_WORLD_SIZE");
    launch.node_rank = launch.local_size == launch.world_size ? 0 : -1;
  } else if (launch.world_size == 1 || is_loopback(launch.address)) {
    launch.local_rank = launch.rank;
    launch.local_size = launch.world_size;
    launch.node_rank = 0;
    in.note("local_rank", "all ranks are on this host, as MASTER_ADDR is a loopback address");
  } else {
    launch.node_rank = launch.rank;
    in.note("local_rank",
            "assumed: one rank per host, as LOCAL_RANK and LOCAL_WORLD_SIZE are not set");
  }
  if (in.has("NODE_RANK")) in.integer(&Launch::node_rank, "node_rank", "NODE_RANK");
}

}  // namespace

// The first family that is present is read.
std::vector<LauncherFamily> launcher_families() {
  const auto pmi = any_of({"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
                           "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"});
  return {
      {"tessera",
       any_of({"TESSERA_RANK", "TESSERA_WORLD_SIZE", "TESSERA_LOCAL_RANK", "TESSERA_LOCAL_SIZE",
               "TESSERA_NODE_RANK", "TESSERA_ADDRESS", "TESSERA_PORT"}),
       read_tessera},
      {"torchrun",
       any_of({"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT",
               "TORCHELASTIC_MAX_RESTARTS"}),
       read_torchrun},
      {"open_mpi",
       any_of({"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
               "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_NODE_RANK"}),
       read_open_mpi},
      {"pmi", [pmi](const Environment& e) { return pmi(e) && !pmi_belongs_to_slurm(e); }, read_pmi},
      {"jsm",
       any_of({"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
               "JSM_NAMESPACE_LOCAL_SIZE"}),
       read_jsm},
      {"slurm", is_slurm_step, read_slurm},
      {"plain", any_of({"RANK", "WORLD_SIZE"}), read_plain},
  };
}

}  // namespace tessera::detail
