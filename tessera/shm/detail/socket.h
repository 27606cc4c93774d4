#pragma once
// Local stream sockets that transfer descriptors, with time limits.

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/deadline.h"
#include "tessera/shm/detail/segment.h"
#include "tessera/shm/types.h"

namespace tessera::shm::detail {

/// A listening socket without a file: its name is 16 random bytes in the abstract namespace, which
/// every user of the host can see and connect to.
struct Listener {
  Descriptor socket;
  std::string name;
};
Listener listen_locally();

/// Accepts the next connection; empty if there is none now.
Descriptor accept_from(const Descriptor& listener);
/// Connects to a listening socket. Throws SetupError: other_host if no process of this host
/// listens on that name, absent at the deadline.
Descriptor connect_to(const std::string& name, Deadline deadline);

/// Of the process that made the other end, as reported by the kernel: its user, and a pidfd.
uid_t user_of(const Descriptor& socket);
Descriptor process_of(const Descriptor& socket);
/// A pidfd of this process.
Descriptor own_process();

/// Sends or receives a message of at most kMostText bytes and kMaxRanks + 1 descriptors; without
/// `descriptors` none are accepted. Throws SetupError (absent) if the other end is gone or the
/// deadline passes.
inline constexpr std::size_t kMostText = 65536;
/// What a message begins with: the numbers of its bytes and of its descriptors.
using TextHead = std::array<std::uint32_t, 2>;
void send_text(const Descriptor& socket, const std::string& text,
               const std::vector<int>& descriptors, Deadline deadline);
std::string receive_text(const Descriptor& socket, std::vector<Descriptor>* descriptors,
                         Deadline deadline);

/// At most 256 random bytes from the kernel's generator.
std::string random_bytes(std::size_t count);

}  // namespace tessera::shm::detail
