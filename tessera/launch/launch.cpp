#include "tessera/launch/launch.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/launch/detail/launch_reader.h"
#include "tessera/launch/internal/secret.h"

extern char** environ;

namespace tessera {
namespace {

/// The user's own secret comes first, then the key that the launcher gave this job alone.
void read_secret(const Environment& environment, Launch& launch) {
  std::vector<const char*> names{"TESSERA_SECRET"};
  if (launch.launcher == "open_mpi") names.push_back("OMPI_MCA_orte_precondition_transports");
  if (launch.launcher == "pmi") names.push_back("PMI_SHARED_SECRET");
  for (const char* name : names) {
    const auto value = environment.get(name);
    if (!value || value->empty()) continue;
    launch.secret = *value;
    launch.origin["secret"] = name;
    return;
  }
}

Launch from_environment(const Environment& environment, const LaunchOverrides& overrides) {
  if (overrides.rank && overrides.world_size) {
    Launch launch;
    launch.launcher = "code";
    read_secret(environment, launch);
    return launch;
  }
  for (const detail::LauncherFamily& family : detail::launcher_families()) {
    if (!family.present(environment)) continue;
    detail::LaunchReader reader(environment, overrides, family.name);
    family.read(reader);
    Launch launch = reader.launch();
    read_secret(environment, launch);
    return launch;
  }
  return {};
}

void apply(const LaunchOverrides& given, Launch& launch) {
  auto put = [&](const auto& from, auto& to, const char* name) {
    if (!from) return;
    to = *from;
    launch.origin[name] = "given in code";
  };
  put(given.rank, launch.rank, "rank");
  put(given.world_size, launch.world_size, "world_size");
  put(given.address, launch.address, "address");
  put(given.port, launch.port, "port");
  put(given.hosts, launch.hosts, "hosts");
  put(given.secret, launch.secret, "secret");
  put(given.ranks_per_host, launch.ranks_per_host, "ranks_per_host");
  if (launch.launcher == "code") {
    const bool local = launch.world_size == 1 || detail::is_loopback(launch.address);
    launch.local_rank = local ? launch.rank : 0;
    launch.local_size = local ? launch.world_size : 1;
    launch.node_rank = local ? 0 : -1;
    launch.origin["local_rank"] =
        local ? "all ranks are on this host"
              : "assumed: one rank per host, as local_rank and local_size are not given";
  }
  put(given.local_rank, launch.local_rank, "local_rank");
  put(given.local_size, launch.local_size, "local_size");
  put(given.node_rank, launch.node_rank, "node_rank");
  if (given.address || given.port) launch.agent_serves_store = false;
}

std::string shown(const Launch& launch, const std::string& field, int value) {
  const auto origin = launch.origin.find(field);
  return concat(field, " ", value,
                origin == launch.origin.end() ? "" : concat(" (", origin->second, ")"));
}

}  // namespace

Environment Environment::of_process() {
  Environment result;
  for (char** v = environ; v && *v; ++v) {
    const std::string text = *v;
    const auto equals = text.find('=', 1);
    if (equals != std::string::npos)
      result.variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  char name[256] = {};
  if (gethostname(name, sizeof name - 1) == 0) result.hostname = name;
  return result;
}

std::optional<std::string> Environment::get(const std::string& name) const {
  const auto found = variables.find(name);
  if (found == variables.end()) return std::nullopt;
  return found->second;
}

Launch detect_launch(const Environment& environment, const LaunchOverrides& overrides) {
  Launch launch = from_environment(environment, overrides);
  apply(overrides, launch);
  if (launch.local_size == launch.world_size && launch.node_rank <= 0) {
    launch.node_rank = 0;
    if (launch.ranks_per_host.empty()) launch.ranks_per_host = {launch.world_size};
    if (launch.hosts.empty() && !environment.hostname.empty() && launch.ranks_per_host.size() == 1)
      launch.hosts = {environment.hostname};
  }
  validate(launch);
  return launch;
}

namespace {

// Throws if `wrong`; `why` joined is the reason.
template <class... Why>
void refuse_if(bool wrong, const Launch& launch, const Why&... why) {
  if (wrong) throw ConfigurationError("launcher ", launch.launcher, ": ", why...);
}

// The hosts and the counts of ranks on them, where they are known.
void validate_hosts(const Launch& launch) {
  const auto& hosts = launch.hosts;
  const auto& counts = launch.ranks_per_host;
  const std::string node_rank = shown(launch, "node_rank", launch.node_rank);
  refuse_if(!hosts.empty() && !counts.empty() && hosts.size() != counts.size(), launch,
            hosts.size(), " hosts ", list(hosts), " for ", counts.size(), " counts of ranks ",
            list(counts));
  refuse_if(!hosts.empty() && launch.node_rank >= static_cast<int>(hosts.size()), launch, node_rank,
            " is not below the number of hosts in ", list(hosts));
  if (counts.empty()) return;
  refuse_if(std::ranges::any_of(counts, [](int count) { return count < 0; }), launch,
            "ranks_per_host ", list(counts), " holds a negative number");
  refuse_if(std::accumulate(counts.begin(), counts.end(), 0ll) != launch.world_size, launch,
            "ranks_per_host ", list(counts), " (",
            launch.origin.count("ranks_per_host") ? launch.origin.at("ranks_per_host") : "derived",
            ") does not sum to ", shown(launch, "world_size", launch.world_size));
  refuse_if(launch.node_rank >= static_cast<int>(counts.size()), launch, node_rank,
            " is not below the number of hosts in ranks_per_host ", list(counts));
  refuse_if(launch.node_rank >= 0 && counts[launch.node_rank] != launch.local_size, launch,
            shown(launch, "local_size", launch.local_size), " contradicts entry ", launch.node_rank,
            " of ranks_per_host ", list(counts));
}

}  // namespace

void validate(const Launch& launch) {
  const std::string world_size = shown(launch, "world_size", launch.world_size),
                    local_size = shown(launch, "local_size", launch.local_size),
                    node_rank = shown(launch, "node_rank", launch.node_rank),
                    port = shown(launch, "port", launch.port);
  refuse_if(launch.world_size < 1, launch, world_size, " is not positive");
  refuse_if(launch.rank < 0 || launch.rank >= launch.world_size, launch,
            shown(launch, "rank", launch.rank), " is not between 0 and ", world_size, " less 1");
  refuse_if(launch.local_size < 1 || launch.local_size > launch.world_size, launch, local_size,
            " is not between 1 and ", world_size);
  refuse_if(launch.local_rank < 0 || launch.local_rank >= launch.local_size, launch,
            shown(launch, "local_rank", launch.local_rank), " is not between 0 and ", local_size,
            " less 1");
  refuse_if(launch.node_rank < -1, launch, node_rank,
            " is neither a node's number nor -1 (unknown)");
  refuse_if(launch.local_size == launch.world_size && launch.node_rank > 0 &&
                launch.ranks_per_host.empty(),
            launch, node_rank, " cannot be where ", local_size, " and ", world_size,
            " put all ranks on one node");
  constexpr std::size_t kShortestSecret = 16;
  refuse_if(!launch.secret.empty() && launch.secret != kNoSecret &&
                launch.secret.size() < kShortestSecret,
            launch, "the job's secret (",
            launch.origin.count("secret") ? launch.origin.at("secret") : "given in code", ") has ",
            launch.secret.size(), " characters and can be guessed; give at least ", kShortestSecret,
            ", for example of `openssl rand -hex 16`");
  refuse_if(launch.port < 0 || launch.port > 65535, launch, port, " is not between 1 and 65535");
  refuse_if(!launch.address.empty() && launch.port == 0, launch, "the address '", launch.address,
            "' has no port");
  refuse_if(launch.address.empty() && launch.port != 0, launch, port, " has no address");
  validate_hosts(launch);
}

void require_rendezvous(const Launch& launch) {
  if (launch.world_size == 1 || !launch.address.empty()) return;
  std::string advice = "set MASTER_ADDR and MASTER_PORT to a free port on the host of rank 0";
  if (launch.launcher == "open_mpi")
    advice += ", and pass them on: mpirun -x MASTER_ADDR=host -x MASTER_PORT=29500 ...";
  if (launch.launcher == "pmi")
    advice += ", and pass them on: mpiexec -genv MASTER_ADDR host -genv MASTER_PORT 29500 ...";
  if (launch.launcher == "code")
    advice = "give address and port in code, beside rank and world_size";
  throw ConfigurationError("launcher ", launch.launcher, ": ", launch.world_size,
                           " ranks on several hosts have no address to meet at; ", advice);
}

int derived_port(unsigned long long job_id, unsigned long long step_id) {
  return 61440 + static_cast<int>((job_id + 977 * step_id) % 4096);
}

std::string to_text(const Launch& launch) {
  std::string text;
  auto line = [&](const std::string& name, const auto& value) {
    const auto origin = launch.origin.find(name);
    text += concat(name, std::string(name.size() < 20 ? 20 - name.size() : 1, ' '), value,
                   origin == launch.origin.end() ? "" : concat("  (", origin->second, ")"), "\n");
  };
  line("launcher", launch.launcher);
  line("rank", launch.rank);
  line("world_size", launch.world_size);
  line("local_rank", launch.local_rank);
  line("local_size", launch.local_size);
  line("node_rank", launch.node_rank);
  line("hosts", list(launch.hosts));
  line("ranks_per_host", list(launch.ranks_per_host));
  line("address", launch.address.empty() ? "none" : launch.address);
  line("port", launch.port);
  line("agent_serves_store", launch.agent_serves_store ? "yes" : "no");
  line("job_id", launch.job_id.empty() ? "none" : launch.job_id);
  return text;
}

}  // namespace tessera
