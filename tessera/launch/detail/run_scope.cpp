#include "tessera/launch/detail/run_scope.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/launch/detail/allocator.h"
#include "tessera/launch/internal/cores.h"
#include "tessera/launch/internal/secret.h"

extern char** environ;

namespace tessera::detail {
namespace {

// If inherited, they would tell every rank that it is one process of the outer launcher.
bool belongs_to_outer_launcher(const std::string& variable) {
  for (const char* prefix : {"TESSERA_RANK=",
                             "TESSERA_WORLD_SIZE=",
                             "TESSERA_LOCAL_",
                             "TESSERA_NODE_RANK=",
                             "TESSERA_ADDRESS=",
                             "TESSERA_PORT=",
                             "TESSERA_SECRET=",
                             "TESSERA_TERMINAL_COLUMNS=",
                             "TORCHELASTIC_",
                             "GROUP_RANK=",
                             "GROUP_WORLD_SIZE=",
                             "ROLE_RANK=",
                             "ROLE_WORLD_SIZE=",
                             "ROLE_NAME=",
                             "RANK=",
                             "WORLD_SIZE=",
                             "LOCAL_RANK=",
                             "LOCAL_WORLD_SIZE=",
                             "NODE_RANK=",
                             "MASTER_ADDR=",
                             "MASTER_PORT=",
                             "OMPI_COMM_WORLD_",
                             "OMPI_UNIVERSE_SIZE=",
                             "OMPI_MCA_ess",
                             "OMPI_MCA_orte_",
                             "PMIX_",
                             "PMI_",
                             "MPI_LOCALRANKID=",
                             "MPI_LOCALNRANKS=",
                             "JSM_NAMESPACE_",
                             "SLURM_PROCID=",
                             "SLURM_LOCALID=",
                             "SLURM_NODEID=",
                             "SLURM_STEP"}) {
    if (variable.rfind(prefix, 0) == 0) return true;
  }
  return false;
}

}  // namespace

std::string loopback_address() {
  const ReservedPort port;
  return port.address();
}

ReservedPort::ReservedPort() {
  const int on = 1;
  std::string why;
  for (const int family : {AF_INET, AF_INET6}) {
    sockaddr_storage address{};
    socklen_t size = sizeof(sockaddr_in);
    address.ss_family = static_cast<sa_family_t>(family);
    if (family == AF_INET) {
      reinterpret_cast<sockaddr_in&>(address).sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    } else {
      reinterpret_cast<sockaddr_in6&>(address).sin6_addr = in6addr_loopback;
      size = sizeof(sockaddr_in6);
    }
    auto* const at = reinterpret_cast<sockaddr*>(&address);
    fd_ = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd_ >= 0 && setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        bind(fd_, at, size) == 0 && getsockname(fd_, at, &size) == 0) {
      port_ = ntohs(family == AF_INET ? reinterpret_cast<sockaddr_in&>(address).sin_port
                                      : reinterpret_cast<sockaddr_in6&>(address).sin6_port);
      address_ = family == AF_INET ? "127.0.0.1" : "::1";
      return;
    }
    why += concat(why.empty() ? "" : ", ", family == AF_INET ? "127.0.0.1" : "::1", ": ",
                  std::strerror(errno));
    if (fd_ >= 0) close(fd_);
  }
  throw Error(concat("no free port on this host's loopback interface (", why, ")"));
}

ReservedPort::~ReservedPort() { close(fd_); }

SignalScope::SignalScope() {
  sigset_t watched;
  sigemptyset(&watched);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) {
    struct sigaction now{};
    if (sigaction(signal, nullptr, &now) != 0 || now.sa_handler != SIG_IGN)
      sigaddset(&watched, signal);
  }
  sigaddset(&watched, SIGCHLD);
  sigset_t blocked = watched;
  // A limit on the size of files makes a write fail, and does not end this process.
  sigaddset(&blocked, SIGXFSZ);
  struct sigaction ignore{};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &pipe_action_);
  struct sigaction usual{};
  usual.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &usual, &child_action_);
  sigprocmask(SIG_BLOCK, &blocked, &mask_);
  fd_ = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
  prctl(PR_GET_CHILD_SUBREAPER, &subreaper_);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
}

SignalScope::~SignalScope() {
  prctl(PR_SET_CHILD_SUBREAPER, subreaper_);
  if (fd_ >= 0) close(fd_);
  sigaction(SIGCHLD, &child_action_, nullptr);
  sigaction(SIGPIPE, &pipe_action_, nullptr);
  // A write that failed has left its signal, which would end this process now.
  sigset_t limit;
  sigemptyset(&limit);
  sigaddset(&limit, SIGXFSZ);
  const timespec now{};
  if (sigismember(&mask_, SIGXFSZ) == 0) sigtimedwait(&limit, nullptr, &now);
  sigprocmask(SIG_SETMASK, &mask_, nullptr);
}

DescriptorScope::DescriptorScope() {
  if (getrlimit(RLIMIT_NOFILE, &before_) != 0) return;
  rlimit raised = before_;
  raised.rlim_cur = raised.rlim_max;
  setrlimit(RLIMIT_NOFILE, &raised);  // If it is refused, the limit stays as it is.
}

DescriptorScope::~DescriptorScope() {
  if (before_.rlim_max > 0) setrlimit(RLIMIT_NOFILE, &before_);
}

std::vector<std::string> shared_environment(const LocalRun& run, int usable_cores,
                                            const ReservedPort& port, int columns) {
  std::vector<std::string> environment;
  auto set = [&](const std::string& name, const auto& value) {
    environment.push_back(concat(name, "=", value));
  };
  bool has_threads = false;
  for (char** v = environ; *v; ++v) {
    const std::string variable = *v;
    if (belongs_to_outer_launcher(variable)) continue;
    if (variable.rfind("OMP_NUM_THREADS=", 0) == 0) {
      if (run.threads > 0) continue;
      has_threads = true;
    }
    environment.push_back(variable);
  }
  for (const auto& [name, value] : allocator_variables(run.allocator, environment)) {
    std::erase_if(environment, [&name = name](const std::string& v) {
      return v.rfind(concat(name, "="), 0) == 0;
    });
    set(name, value);
  }
  if (run.threads > 0) set("OMP_NUM_THREADS", run.threads);
  if (run.threads == LocalRun::automatic && !has_threads)
    set("OMP_NUM_THREADS", threads_per_rank(usable_cores, run.ranks));
  for (const char* name :
       {"TESSERA_WORLD_SIZE", "WORLD_SIZE", "TESSERA_LOCAL_SIZE", "LOCAL_WORLD_SIZE"})
    set(name, run.ranks);
  set("TESSERA_NODE_RANK", 0);
  set("TESSERA_SECRET", new_secret());
  for (const char* name : {"TESSERA_ADDRESS", "MASTER_ADDR"}) set(name, port.address());
  for (const char* name : {"TESSERA_PORT", "MASTER_PORT"}) set(name, port.port());
  if (columns > 0) set("TESSERA_TERMINAL_COLUMNS", columns);
  return environment;
}

}  // namespace tessera::detail
