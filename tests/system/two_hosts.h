#pragma once
// Two hosts on one machine: each is a network namespace with an address of its own on a virtual
// cable (veth). What is real here: separate loopbacks, separate ports, and a cable that can be cut.

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "tessera/base/text.h"

namespace tessera {

inline bool run(const std::string& command) {
  return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
}

/// Two namespaces, gone with this object however the test ends.
class TwoHosts {
 public:
  TwoHosts() : prefix_(concat("tessera", ::getpid())) {
    // of an earlier process of this number
    for (int host = 0; host < 2; ++host) run(concat("ip netns del ", space(host)));
    ok_ = run(concat("ip netns add ", space(0))) && run(concat("ip netns add ", space(1))) &&
          run(concat("ip link add tsa", ::getpid(), " netns ", space(0), " type veth peer name tsb",
                     ::getpid(), " netns ", space(1)));
    for (int host = 0; host < 2; ++host) {
      ok_ =
          ok_ && run(concat("ip -n ", space(host), " link set lo up")) &&
          run(concat("ip -n ", space(host), " addr add ", address(host), "/24 dev ", link(host))) &&
          run(concat("ip -n ", space(host), " link set ", link(host), " up"));
    }
  }
  ~TwoHosts() {
    // takes its end of the cable along
    for (int host = 0; host < 2; ++host) run(concat("ip netns del ", space(host)));
  }
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  bool ok() const { return ok_; }
  std::string space(int host) const { return concat(prefix_, host == 0 ? "a" : "b"); }
  std::string link(int host) const { return concat(host == 0 ? "tsa" : "tsb", owner_); }
  static std::string address(int host) { return concat("10.213.77.", host + 1); }
  void enter(int host) const {
    const int fd = ::open(concat("/var/run/netns/", space(host)).c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0 || ::setns(fd, CLONE_NEWNET) != 0)
      throw std::runtime_error(concat("cannot enter ", space(host)));
    ::close(fd);
  }
  void cut() const { run(concat("ip -n ", space(0), " link set ", link(0), " down")); }

 private:
  std::string prefix_;
  int owner_ = ::getpid();  // children ask too
  bool ok_ = false;
};

/// "": go on; else why this machine cannot run the test.
inline std::string obstacle() {
  if (::geteuid() != 0)
    return "network namespaces need root; run this test as root (in a container of its own, for "
           "instance)";
  if (!run("ip -V")) return "the program ip was not found; install iproute2";
  TwoHosts hosts;
  if (!hosts.ok())
    return "this kernel or container does not let root make network namespaces joined by veth";
  return "";
}

}  // namespace tessera
