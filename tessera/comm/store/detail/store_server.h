#pragma once
// StoreServer: the job's key-value store, served by one thread of rank 0. It also knows which ranks
// are present: a rank whose connection ends before it has deregistered is lost, and all others are
// told at once.
//
// A connection is a stranger until it has proven that it knows the job's secret. Strangers get
// little: some seconds, 4 KiB of memory each, some hundred at a time, one block of bytes per turn.
// Nothing that they do ends the meeting of the others.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/comm/store/detail/secret.h"
#include "tessera/comm/store/detail/socket.h"
#include "tessera/comm/store/detail/wire.h"

namespace tessera::detail {

class StoreServer : Pinned {
 public:
  /// Serves on a listening socket until destroyed. Ranks of another `job` are turned away. Raises
  /// the soft limit of descriptors where the world needs more of them. Throws InvalidArgument for a
  /// secret without a name, and RendezvousError if the system has no descriptors or threads left.
  StoreServer(Socket listener, int world_size, std::string job, Secret secret = Secret::none());
  /// Waits up to the linger for ranks that have not deregistered, then ends the thread.
  ~StoreServer();

  int port() const { return port_; }
  /// Sets how long the destructor waits. Zero by default: a rank 0 that fails must not wait for the
  /// others.
  void set_linger(std::chrono::milliseconds linger) { linger_ = linger; }

 private:
  struct Client {
    Socket socket;
    std::string in, out;
    bool greeted = false;  // its magic was right
    bool closing = false;  // close when `out` is sent
    bool broken = false;   // to be dropped, and told nothing more
    int rank = -1;         // once it is in the meeting
    std::string who;
    std::uint64_t number = 0;  // of the connection, in the order of arrival
    std::string nonce;         // of its challenge
    Deadline since;
  };
  struct Waiter {  // a get or wait for keys that do not exist yet
    int fd;
    std::uint64_t call;
    bool values;
    std::vector<std::string> keys;
    std::size_t known;  // keys[0, known) exist
  };
  /// A roll call in progress: who asked, and which members have not answered yet.
  struct Question {
    int fd;  // of the rank that asked
    std::uint64_t call;
    std::set<int> open;
  };
  /// Which ranks use the keys of a prefix, and which have said that they need them no more.
  struct Forgetting {
    std::size_t size = 0;
    std::set<int> done;
    std::vector<int> members;
  };

  // store_server.cpp: the thread and its sockets
  void run();
  bool turn();
  void handle(int fd, std::uint32_t events);
  void drop_broken();
  void give_up(Client& client);
  void accept_some();
  void listen_for_more(bool on);
  bool watch(int operation, int fd, std::uint32_t events);
  void watch_strangers();
  void read(Client& client);
  void write(Client& client);
  void drop(int fd);
  void send(Client& client, std::string frame);
  void send_to_all(const std::string& frame);
  Client* of_rank(int rank);

  // store_meeting.cpp: which connections are admitted
  void greet(Client& client, Reader& in);
  void let_in(Client& client, int rank, std::chrono::milliseconds limit);
  void refuse(Client& client, const std::string& text, const std::vector<int>& ranks = {});
  void fail_meeting(const std::string& text, const std::vector<int>& ranks);
  void check_deadline();
  std::vector<int> missing() const;
  void tell_missing();

  // store_calls.cpp: keys, and news of groups
  void serve(Client& client, Reader& in);
  bool serve_keys(Client& client, Reader& in);
  void stored(const std::string& key);
  void answer_waiter(const Waiter& waiter);
  void settle(const std::shared_ptr<Waiter>& waiter);
  void stop_waiting(int fd, const std::uint64_t* call);
  void forget(Client& client, Reader& in);
  bool forgotten(const std::string& prefix, const Forgetting& entry);
  void tell_lost(int rank, const std::string& who);

  Socket listener_;
  int port_;
  int world_size_;
  std::string job_;
  Secret secret_;
  std::atomic<std::chrono::milliseconds> linger_{std::chrono::milliseconds(0)};
  std::atomic<bool> stop_{false};
  Socket epoll_, wake_;

  // Used by the thread alone.
  Deadline end_ = Deadline::max();  // of the linger
  std::unordered_map<int, std::unique_ptr<Client>> clients_;
  std::map<std::uint64_t, int> strangers_;  // oldest first; by number of the connection
  std::size_t most_strangers_;
  std::uint64_t connections_ = 0;
  bool listening_ = true, resting_ = false;
  Deadline listen_again_ = Deadline::max();
  bool no_descriptors_ = false;  // accept() failed for lack of them
  int turned_away_ = 0;          // connections that could not prove that they know the secret
  std::string last_stranger_;
  int handled_ = -1;             // whose event is being handled
  std::vector<int> broken_;      // to be dropped when the current event is done
  std::vector<int> fd_of_rank_;  // -1: not connected
  std::vector<bool> left_;       // deregistered
  int here_ = 0, gone_ = 0;
  bool complete_ = false;
  std::string failure_;  // why the meeting failed
  std::vector<int> failure_ranks_;
  Deadline deadline_ = Deadline::max();  // of the meeting: the earliest that any rank asked for
  std::chrono::milliseconds shortest_{0};
  // When somebody who looks at the job is told for whom it waits.
  Deadline tell_ = Deadline::max();
  // ordered, so that the keys of a prefix are adjacent
  std::map<std::string, std::string, std::less<>> values_;
  // keyed by the first key that is missing
  std::unordered_map<std::string, std::vector<std::shared_ptr<Waiter>>> waiting_;
  std::map<std::string, Forgetting> forgetting_;
  std::unordered_map<std::uint64_t, Question> questions_;  // by number
  std::uint64_t next_question_ = 1;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace tessera::detail
