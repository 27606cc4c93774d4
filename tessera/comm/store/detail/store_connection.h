#pragma once
// StoreConnection: a rank's one connection to the job's store. Calls of several threads share it;
// one thread of its own reads what arrives, so that news of lost ranks comes through while other
// threads block, and no call waits longer than its limit, whatever happened to rank 0.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tessera/comm/group/detail/group_watch.h"
#include "tessera/comm/store/detail/secret.h"
#include "tessera/comm/store/detail/socket.h"
#include "tessera/comm/store/detail/wire.h"

namespace tessera::detail {

/// How a rank introduces itself at the meeting.
struct Hello {
  int rank = 0;
  int world_size = 1;
  std::string job;
  /// "10.0.0.1:29500", for messages.
  std::string where;
  /// A secret without a name: that of the file that the store names.
  Secret secret = Secret::none();
};

class StoreConnection : public FaultChannel {
 public:
  /// Speaks to the server behind `socket` and blocks until all ranks are there. Each end proves to
  /// the other that it knows the job's secret. Throws RendezvousError. Returns null, with the
  /// reason in `why`, if another try may help: a store of an earlier meeting is about to end or has
  /// just ended, or the secret file that the store names does not exist (`no_secret`), which may be
  /// so for a while on a file system that several hosts share.
  static std::shared_ptr<StoreConnection> meet(Socket socket, const Hello& hello, Deadline deadline,
                                               std::string& why, bool* no_secret = nullptr);
  ~StoreConnection() override;

  /// Sends a call and waits for its reply, a whole frame. Throws c10::DistStoreError after `limit`,
  /// if the store is gone, or when `stop` becomes true and wake() is called.
  std::string call(Frame kind, const std::function<void(Writer&)>& fields,
                   std::chrono::milliseconds limit, const std::atomic<bool>* stop = nullptr);
  void wake();

  /// Says that this rank does not need the keys that begin with `prefix` any more; when all `size`
  /// ranks that use them have said so, or have ended, the store removes them. `members` are those
  /// ranks; it is enough if one of them names them.
  void forget(const std::string& prefix, std::size_t size,
              const std::vector<int>& members) noexcept;

  /// Deregisters this rank: its end is not a loss. Later calls throw.
  void leave() noexcept;
  /// Closes the connection as the death of the process would. For tests.
  void disconnect() noexcept;

  void listen(Listener listener) override;
  void announce(const std::string& group, const std::vector<int>& members,
                const Poison& poison) noexcept override;
  std::vector<RollEntry> roll_call(const std::string& group, const std::vector<int>& members,
                                   std::chrono::milliseconds limit) noexcept override;

  const std::string& where() const { return hello_.where; }

 private:
  struct Pending {
    bool replied = false;
    std::string reply;
    std::vector<RollEntry> answers;
  };

  StoreConnection(Socket socket, const Hello& hello) : socket_(std::move(socket)), hello_(hello) {}
  void run();
  void take(const std::string& frame);
  void lose_store();
  void send(const std::string& frame, Deadline deadline);
  void tell(std::function<void(const Listener&)> news);

  Socket socket_;
  Hello hello_;
  std::mutex send_mutex_;

  std::mutex mutex_;  // guards the five below
  std::condition_variable changed_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Pending>> pending_;
  std::uint64_t next_call_ = 1;
  std::string gone_;  // why no call can succeed any more

  std::mutex listener_mutex_;  // guards listener_ and news_; held while the listener runs
  Listener listener_;
  bool listening_ = false;
  std::vector<std::function<void(const Listener&)>> news_;  // what came before there was a listener

  std::atomic<bool> left_{false};
  std::thread reader_;
};

}  // namespace tessera::detail
