#pragma once
// Rank 0's door while a group is made. Its socket is visible to every user of the host, so a thread
// of its own accepts whoever connects, at once: nobody can fill the queue before the ranks, and
// nobody is waited for. Who belongs to another user is sent away before a byte is read; who does
// not know the secret, as soon as that is seen.

#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/shm/detail/socket.h"

namespace tessera::shm::detail {

/// Begins with the secret of the meeting, which the ranks know from their directory.
struct Hello {
  Descriptor socket;
  std::string text;
};

class Reception : Pinned {
 public:
  /// Admits each of the ranks 1 to `size` - 1, the first word of whose hello, after the secret, is
  /// their rank, until all are in, or the deadline.
  Reception(const Listener& listener, std::string secret, int size, Deadline deadline);
  ~Reception();

  /// Waits until the ranks with true are in, and closes. Element r is rank r's, without the secret;
  /// without a socket if it did not come in time. Throws what stopped the thread.
  std::vector<Hello> close(std::vector<bool> expected);

 private:
  void run();
  bool complete();
  void accept_all();
  /// False once there is nothing more to read from it.
  bool read(Hello& visitor);
  bool admit(Hello& visitor);

  const Listener& listener_;
  const std::string secret_;
  const Deadline deadline_;
  std::vector<Hello> admitted_;
  /// Who has not said who they are, in the order in which they came.
  std::vector<Hello> visitors_;
  std::exception_ptr error_;
  std::mutex mutex_;
  std::vector<bool> expected_;
  std::thread thread_;
};

}  // namespace tessera::shm::detail
