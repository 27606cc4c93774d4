#pragma once
// A port for a test.

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <fstream>

#include "tessera/base/error.h"
#include "tessera/comm/store/detail/socket.h"

namespace tessera::testing {

/// A port of 127.0.0.1 at which nobody listens. It lies below the range from which the system
/// itself hands out ports, so that no program gets it by chance before the test listens there, and
/// tests that run at the same time look in different places.
inline int free_port() {
  constexpr int kFirst = 10000;
  // Asked each time: a forked process has a copy of the counter.
  const std::uint32_t own = static_cast<std::uint32_t>(::getpid()) * 2654435761u;
  static std::atomic<std::uint32_t> next{0};
  int handed_out_from = 32768;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> handed_out_from;
  const int ports = handed_out_from - kFirst;
  for (int tries = 0; ports >= 1000 && tries < ports; ++tries) {
    const int port = kFirst + static_cast<int>((own + next++) % static_cast<std::uint32_t>(ports));
    bool in_use = false;
    try {
      detail::listen_on("127.0.0.1", port, &in_use);
      return port;
    } catch (const Error&) {
      if (!in_use) throw;
    }
  }
  return detail::local_port(detail::listen_on("127.0.0.1", 0));
}

}  // namespace tessera::testing
