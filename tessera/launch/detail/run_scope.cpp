#include "tessera/launch/detail/run_scope.h"

#include <arpa/inet.h>
#include <elf.h>
#include <errno.h>
#include <features.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/launch/internal/cores.h"
#include "tessera/launch/internal/secret.h"

extern char** environ;

namespace tessera::detail {
namespace {

// ---- the memory allocator of the ranks ----

// glibc's malloc: everything from the heap, nothing of it back to the system before the end.
// top_pad: the heap grows by 16 MiB, and not by a request at a time.
constexpr const char* kKeep =
    "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776:"
    "glibc.malloc.top_pad=16777216";

std::string value_of(const std::vector<std::string>& environment, const std::string& name) {
  for (const std::string& variable : environment)
    if (variable.rfind(name + "=", 0) == 0) return variable.substr(name.size() + 1);
  return "";
}

// The start of an ELF file: its class, its byte order, its type and the machine it is for.
std::array<unsigned char, 20> elf_start(const std::string& path) {
  std::array<unsigned char, 20> start{};
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(start.data()), start.size());
  if (!file || std::memcmp(start.data(), ELFMAG, SELFMAG) != 0) return {};
  return start;
}

// The dynamic linker only warns of a file that it cannot load, and starts the program without it.
std::string loadable(const std::string& path) {
  std::error_code error;
  const std::string found = std::filesystem::canonical(path, error);
  if (error) throw InvalidArgument("--allocator ", path, ": ", error.message());
  const auto library = elf_start(found), own = elf_start("/proc/self/exe");
  constexpr std::size_t kType = 16, kMachine = 18;
  const bool same = library[0] != 0 && library[EI_CLASS] == own[EI_CLASS] &&
                    library[EI_DATA] == own[EI_DATA] && library[kMachine] == own[kMachine] &&
                    library[kMachine + 1] == own[kMachine + 1];
  if (!same || library[kType + (own[EI_DATA] == ELFDATA2MSB ? 1 : 0)] != ET_DYN)
    throw InvalidArgument("--allocator ", path,
                          " is not a shared library for programs of this machine");
  if (found.find_first_of(" :") != std::string::npos)
    throw InvalidArgument("--allocator ", found,
                          ": the dynamic linker takes no path with a blank or a colon");
  return found;
}

// The variables, with their values, by which a program that is started with them uses
// LocalRun::allocator; `inherited` gives the present value of a variable, which ours are added to.
// Throws InvalidArgument for a choice that does not exist and a file that the programs of this
// machine cannot load, and NotAvailable for "keep" where the C library is not glibc.
std::vector<std::pair<std::string, std::string>> allocator_variables(
    const std::string& choice, const std::vector<std::string>& inherited) {
  if (choice == "system") return {};
  if (choice == "keep") {
#ifdef __GLIBC__
    // Of two values of one setting the later counts: what the user has set stays.
    const std::string theirs = value_of(inherited, "GLIBC_TUNABLES");
    return {{"GLIBC_TUNABLES", concat(kKeep, theirs.empty() ? "" : ":", theirs)}};
#else
    throw NotAvailable(
        "--allocator keep sets glibc's malloc, and this C library is another one; give the path "
        "of an allocator's shared library");
#endif
  }
  if (choice.find('/') == std::string::npos)
    throw InvalidArgument("--allocator ", choice,
                          ": give system, keep, or the path of a shared library, with a /");
  const std::string theirs = value_of(inherited, "LD_PRELOAD");
  return {{"LD_PRELOAD", concat(loadable(choice), theirs.empty() ? "" : ":", theirs)}};
}

// ---- their environment ----

// If inherited, they would tell every rank that it is one process of the outer launcher.
constexpr const char* kOuterLaunchers =
    "TESSERA_RANK= TESSERA_WORLD_SIZE= TESSERA_LOCAL_ TESSERA_NODE_RANK= TESSERA_ADDRESS= "
    "TESSERA_PORT= TESSERA_SECRET= TESSERA_TERMINAL_COLUMNS= TORCHELASTIC_ GROUP_RANK= "
    "GROUP_WORLD_SIZE= ROLE_RANK= ROLE_WORLD_SIZE= ROLE_NAME= RANK= WORLD_SIZE= LOCAL_RANK= "
    "LOCAL_WORLD_SIZE= NODE_RANK= MASTER_ADDR= MASTER_PORT= OMPI_COMM_WORLD_ OMPI_UNIVERSE_SIZE= "
    "OMPI_MCA_ess OMPI_MCA_orte_ PMIX_ PMI_ MPI_LOCALRANKID= MPI_LOCALNRANKS= JSM_NAMESPACE_ "
    "SLURM_PROCID= SLURM_LOCALID= SLURM_NODEID= SLURM_STEP";

bool belongs_to_outer_launcher(const std::string& variable) {
  TextReader prefixes(kOuterLaunchers);
  for (std::string prefix; prefixes >> prefix;)
    if (variable.starts_with(prefix)) return true;
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
    fd_ = Descriptor(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int fd = fd_.get();
    if (fd_ && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        bind(fd, at, size) == 0 && getsockname(fd, at, &size) == 0) {
      port_ = ntohs(family == AF_INET ? reinterpret_cast<sockaddr_in&>(address).sin_port
                                      : reinterpret_cast<sockaddr_in6&>(address).sin6_port);
      address_ = family == AF_INET ? "127.0.0.1" : "::1";
      return;
    }
    why += concat(why.empty() ? "" : ", ", family == AF_INET ? "127.0.0.1" : "::1", ": ",
                  std::strerror(errno));
  }
  throw Error("no free port on this host's loopback interface (", why, ")");
}

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
