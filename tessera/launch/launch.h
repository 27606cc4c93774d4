#pragma once
// Launch: rank, world and rendezvous of this process, as its launcher reports them.
//
// detect_launch() knows, in this order of precedence (launchers nest: torchrun or mpirun inside
// sbatch is normal):
//
//   code        LaunchOverrides with rank and world_size
//   tessera     TESSERA_RANK, ...                    set by `tessera run`
//   torchrun    TORCHELASTIC_RUN_ID, RANK, ...       set by torchrun, also with --no-python
//   open_mpi    OMPI_COMM_WORLD_RANK, ...            mpirun, mpiexec and prterun of Open MPI
//   pmi         PMI_RANK, MPI_LOCALRANKID, ...       mpiexec of MPICH and Intel MPI (Hydra), Cray
//               PALS
//   jsm         JSM_NAMESPACE_RANK, ...              jsrun of LSF
//   slurm       SLURM_STEP_NODELIST, SLURM_PROCID... srun; a batch script without srun is no step,
//               and an interactive shell neither
//   plain       RANK, WORLD_SIZE, MASTER_ADDR, ...   Kubernetes operators, scripts
//   single      nothing of the above
//
// The first family of which a variable is set decides; if that family is incomplete or contradicts
// itself, ConfigurationError names the variables and their values. docs/launching.md has an example
// of each.
//
// Where address and port come from (Launch::origin says it for each value):
//
//   tessera     TESSERA_ADDRESS, TESSERA_PORT
//   torchrun    MASTER_ADDR, MASTER_PORT; with TORCHELASTIC_USE_AGENT_STORE=True the agent serves
//               the store already
//   plain       MASTER_ADDR, MASTER_PORT
//   slurm       first host of SLURM_STEP_NODELIST; derived_port(job id, step id)
//   jsm         first compute host of LSB_DJOB_RANKFILE (its second line; the first is the launch
//               node); derived_port(job id, 0)
//   open_mpi    all ranks on one host: 127.0.0.1 (::1 on a host without IPv4), and a port from
//               PMIX_NAMESPACE or else 29500;
//   pmi         several hosts: nowhere, as these launchers do not say where rank 0 runs: both stay
//               empty, and require_rendezvous() asks for them
//
// In the last four MASTER_ADDR and MASTER_PORT, where set, replace those values (over several
// hosts, open_mpi and pmi need both or none).

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Rank, world and rendezvous of one process. Unequal ranks per node are normal.
struct Launch {
  /// "code", "tessera", "torchrun", "open_mpi", "pmi", "jsm", "slurm", "plain", "single".
  std::string launcher = "single";
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_size = 1;
  /// -1 if the launcher does not say (open_mpi, pmi, jsm, plain over several hosts).
  int node_rank = 0;
  /// Names of the hosts in node order, if the launcher says; else empty.
  std::vector<std::string> hosts;
  /// Address of the rendezvous store; empty for a single process, and where require_rendezvous()
  /// throws.
  std::string address;
  int port = 0;
  /// torchrun's agent already listens on address:port.
  bool agent_serves_store = false;

  /// What a process must know to join the job (secret.h): TESSERA_SECRET, which `tessera run` sets
  /// and which may be set by hand, the same on every rank; else the key that Open MPI
  /// (OMPI_MCA_orte_precondition_transports) or PALS (PMI_SHARED_SECRET) gives each of its jobs.
  /// Empty: rank 0 makes a secret and passes it to the others by a file that only their user can
  /// read, or through the store of torchrun's agent. "none": there is no secret. Never printed.
  std::string secret;

  /// Number of ranks on each host in node order, if the launcher says; else empty. Sums to
  /// world_size.
  std::vector<int> ranks_per_host;
  /// Identifier of the batch job or of the torchrun job; empty if there is none.
  std::string job_id;
  /// The source of each value above: {"rank": "SLURM_PROCID=2", "address": "first host of
  /// SLURM_STEP_NODELIST=n[1-2]"}.
  std::map<std::string, std::string> origin;
};

/// Environment variables as a value, so that detect_launch() can be tested without a launcher.
struct Environment {
  std::map<std::string, std::string> variables;
  /// Name of this host; empty: unknown.
  std::string hostname;

  /// The environment of this process.
  static Environment of_process();
  std::optional<std::string> get(const std::string& name) const;
  bool has(const std::string& name) const { return variables.count(name) != 0; }
};

/// Values given in code. With rank and world_size the environment is not read at all; otherwise the
/// values given replace those of the environment.
struct LaunchOverrides {
  std::optional<int> rank;
  std::optional<int> world_size;
  std::optional<int> local_rank;
  std::optional<int> local_size;
  std::optional<int> node_rank = {};
  std::optional<std::vector<std::string>> hosts = {};
  std::optional<std::vector<int>> ranks_per_host = {};
  std::optional<std::string> address;
  std::optional<int> port;
  std::optional<std::string> secret = {};
};

/// Reads rank, world and rendezvous of this process. Reads no file but LSB_DJOB_RANKFILE (jsm).
/// Throws ConfigurationError as described above.
Launch detect_launch(const Environment& environment, const LaunchOverrides& overrides = {});

/// Throws ConfigurationError if the values contradict each other: rank >= world_size,
/// ranks_per_host that does not sum to world_size, ...
void validate(const Launch& launch);

/// Throws ConfigurationError, with what to set for this launcher, if several ranks have no address
/// and port to meet at.
void require_rendezvous(const Launch& launch);

/// A port for the rendezvous of a batch job: 61440 + (job id + 977 * step id) mod 4096, above the
/// ports that Linux assigns by itself (32768-60999). Job 1234, step 0: 62674.
int derived_port(unsigned long long job_id, unsigned long long step_id);

/// The launch as text, one "name  value  (origin)" per line.
std::string to_text(const Launch& launch);

}  // namespace tessera
