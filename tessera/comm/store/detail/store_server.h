#pragma once
// StoreServer: the job's key-value store, served by one thread of rank 0. It also knows who is
// there: a rank whose connection ends without a goodbye is lost, and all others hear of it at once.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tessera/comm/store/detail/socket.h"
#include "tessera/comm/store/detail/wire.h"

namespace tessera::detail {

class StoreServer {
 public:
  /// Serves on a listening socket until destroyed. Connections with another `job` are turned away.
  StoreServer(Socket listener, int world_size, std::string job);
  /// Waits up to the linger for ranks that have not said goodbye, then ends the thread.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  int port() const { return port_; }
  /// How long the destructor waits. Zero by default: a rank 0 that fails must not wait for the
  /// others.
  void set_linger(std::chrono::milliseconds linger) { linger_ = linger; }

 private:
  struct Client {
    Socket socket;
    std::string in, out;
    bool greeted = false;  // its magic was right
    bool closing = false;  // close when `out` is sent
    int rank = -1;         // after its hello
    std::string who;
  };
  struct Waiter {  // a get or wait for keys that do not exist yet
    int fd;
    std::uint64_t call;
    bool values;
    std::vector<std::string> keys;
    std::size_t known;  // keys[0, known) exist
  };

  void run();
  void accept_all();
  void read(Client& client);
  void write(Client& client);
  void drop(int fd);
  void send(Client& client, std::string frame);
  void send_to_all(const std::string& frame, int except_rank = -1);
  void serve(Client& client, Reader& in);
  void greet(Client& client, Reader& in);
  void refuse(Client& client, const std::string& text, const std::vector<int>& ranks = {});
  void fail_meeting(const std::string& text, const std::vector<int>& ranks);
  void check_deadline();
  void stored(const std::string& key);
  void answer_waiter(const Waiter& waiter);
  bool settle(Waiter& waiter);
  Client* of_rank(int rank);

  Socket listener_;
  int port_;
  int world_size_;
  std::string job_;
  std::atomic<std::chrono::milliseconds> linger_{std::chrono::milliseconds(0)};
  std::atomic<bool> stop_{false};
  Socket epoll_, wake_;

  // Used by the thread alone.
  std::unordered_map<int, std::unique_ptr<Client>> clients_;
  std::vector<int> broken_;      // to be dropped when the current event is done
  std::vector<int> fd_of_rank_;  // -1: not here
  std::vector<bool> left_;       // said goodbye
  int here_ = 0, gone_ = 0;
  bool complete_ = false;
  std::string failure_;  // why the meeting failed
  std::vector<int> failure_ranks_;
  Deadline deadline_ = Deadline::max();  // of the meeting: the earliest that any rank asked for
  std::chrono::milliseconds shortest_{0};
  std::unordered_map<std::string, std::string> values_;
  // by the first key that is missing
  std::unordered_map<std::string, std::vector<std::shared_ptr<Waiter>>> waiting_;
  // number -> who asked, its call
  std::unordered_map<std::uint64_t, std::pair<int, std::uint64_t>> questions_;
  std::uint64_t next_question_ = 1;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace tessera::detail
