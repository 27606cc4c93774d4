#pragma once
// Local stream sockets that carry descriptors, with time limits.

#include <sys/types.h>

#include <string>
#include <vector>

#include "tessera/base/deadline.h"
#include "tessera/shm/detail/segment.h"
#include "tessera/shm/types.h"

namespace tessera::shm::detail {

/// A listening socket without a file: the name is 16 random bytes in the abstract namespace.
struct Listener {
  Descriptor socket;
  std::string name;
};
Listener listen_locally(int backlog);

/// The next connection. Throws SetupError (absent) at the deadline.
Descriptor accept_from(const Descriptor& listener, Deadline deadline);
/// Throws SetupError (other_host) where nobody listens on that name here.
Descriptor connect_to(const std::string& name);

/// Who is at the other end, as the kernel says.
struct Peer {
  Descriptor process;
  uid_t user;
};
Peer peer_of(const Descriptor& socket);
/// A pidfd of this process.
Descriptor own_process();

/// A message of at most kMostText bytes and kMaxRanks + 1 descriptors. Throws SetupError (absent)
/// if the other end is gone or the deadline passes.
inline constexpr std::size_t kMostText = 65536;
void send_text(const Descriptor& socket, const std::string& text,
               const std::vector<int>& descriptors, Deadline deadline);
std::string receive_text(const Descriptor& socket, std::vector<Descriptor>* descriptors,
                         Deadline deadline);

/// From the kernel's generator.
std::string random_bytes(std::size_t count);

}  // namespace tessera::shm::detail
