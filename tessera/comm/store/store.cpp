#include "tessera/comm/store/store.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <istream>
#include <optional>
#include <thread>

#include "tessera/base/text.h"
#include "tessera/comm/store/detail/job_store.h"
#include "tessera/comm/store/detail/secret_file.h"
#include "tessera/comm/store/detail/socket.h"
#include "tessera/comm/store/detail/store_connection.h"
#include "tessera/comm/store/detail/store_server.h"
#include "tessera/launch/internal/secret.h"

namespace tessera {

using detail::Clock;
using detail::Hello;
using detail::JobStore;
using detail::Secret;
using detail::Socket;
using detail::StoreConnection;
using detail::StoreServer;

namespace {

constexpr auto kBoardKey = "tessera/rendezvous";

bool has_other_hosts(const Launch& launch) {
  return launch.hosts.size() > 1 || launch.local_size < launch.world_size;
}

void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

/// Rank 0 introduces itself to whatever uses the port. Throws if that knows of another rank 0;
/// false if it is an earlier store of Tessera that is about to end.
bool port_is_foreign(const std::string& address, int port, const Hello& hello) {
  const Deadline soon = deadline_after(std::chrono::milliseconds(300));
  std::string why;
  bool no_secret = false;
  try {
    return StoreConnection::meet(detail::connect_to(address, port, false, soon), hello, soon, why,
                                 &no_secret) != nullptr ||
           no_secret;
  } catch (const RendezvousError& error) {
    if (!error.ranks().empty()) throw;
    return true;
  }
}

Socket listen(const Launch& launch, const Hello& hello, int port, Deadline deadline) {
  const bool other_hosts = has_other_hosts(launch);
  std::string address = "127.0.0.1";
  // A port that is free to choose needs no address but loopback on one host.
  if (!launch.address.empty() && (other_hosts || port != 0)) {
    std::string reason;
    const auto addresses = detail::targets(launch.address, other_hosts, deadline, reason);
    if (addresses.empty())
      throw RendezvousError(concat("rank 0 cannot serve the job's store: ", reason,
                                   "; give the address of rank 0's host"));
    const auto own = detail::own_addresses();
    const auto mine = std::ranges::find_if(addresses, [&](const std::string& a) {
      return detail::is_loopback_address(a) || std::ranges::find(own, a) != own.end();
    });
    address = mine == addresses.end() ? addresses.front() : *mine;
  }
  for (;;) {
    bool in_use = false;
    try {
      return detail::listen_on(address, port, &in_use);
    } catch (const RendezvousError&) {
      if (!in_use || port_is_foreign(address, port, hello) || Clock::now() >= deadline) throw;
    }
    pause();
  }
}

/// What rank 0 published through another store, torchrun's agent's or the program's, the board:
/// "address port secret job".
struct Published {
  std::string address, secret, job;
  int port = 0;
};

/// Published in place of the secret: it is in a file.
constexpr auto kByFile = "-";

std::string to_text(const Published& where) {
  return where.address + " " + std::to_string(where.port) + " " + where.secret + " " + where.job;
}

Published read_published(c10d::Store& board, Deadline deadline) {
  // Not setTimeout(), which others that use the store would notice.
  board.wait({kBoardKey}, std::max(std::chrono::milliseconds(1), time_left(deadline)));
  TextReader in(board.get_to_str(kBoardKey));
  Published where;
  in >> where.address >> where.port >> where.secret >> std::ws;
  std::getline(in, where.job);
  return where;
}

// ---- torchrun's agent ----

// c10d's own greeting (TCPStoreBackend.hpp: query numbers and magic), sent here first because c10d
// waits for the answer without a limit.
constexpr std::uint8_t kValidate = 0, kPing = 13;
constexpr std::uint32_t kMagic = 0x3C85F7CE;

// Returns the numeric address at which the store answers: c10d looks up names without a limit,
// too.
std::string probe(const std::string& host, int port, Deadline deadline) {
  const Socket socket = detail::connect_to(host, port, false, deadline);
  const std::uint32_t nonce = 0x7e55e7a;
  char question[10];
  question[0] = kValidate;
  std::memcpy(question + 1, &kMagic, 4);
  question[5] = kPing;
  std::memcpy(question + 6, &nonce, 4);
  std::uint32_t answer = 0;
  const auto sent = detail::send_all(socket, question, sizeof question, deadline);
  const auto got = sent == detail::Transfer::done
                       ? detail::receive_all(socket, &answer, sizeof answer, deadline)
                       : sent;
  if (got == detail::Transfer::done && answer == nonce) return detail::peer_address(socket);
  throw RendezvousError(concat("torchrun's agent should serve a store on ", host, ":", port,
                               ", but ",
                               got == detail::Transfer::late ? "what listens there is silent"
                                                             : "something else listens there",
                               "; give the job a port that no other program uses"));
}

// torchrun's agent serves a c10d store before its workers start. It is used for one thing: to find
// where rank 0's own store listens. Throws RendezvousError if something else answers there, or
// nothing does by the deadline.
c10::intrusive_ptr<c10d::Store> agent_store(const std::string& host, int port, Deadline deadline) {
  const std::string address = probe(host, port, deadline);
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.isServer = false;
  options.waitWorkers = false;
  // c10d counts whole seconds
  options.timeout = std::max(std::chrono::milliseconds(1000), time_left(deadline));
  try {
    return c10::make_intrusive<c10d::TCPStore>(address, options);
  } catch (const c10::Error& error) {
    throw RendezvousError(concat("the store of torchrun's agent on ", host, ":", port, ": ",
                                 error.what_without_backtrace()));
  }
}

// ---- the meeting ----

// A larger number is a mistake (an overflow, a variable that means something else), and the state
// kept for every rank would not fit into memory.
constexpr int kMostRanks = 1 << 23;

// How long a rank waits for a secret file to appear: file systems that several hosts share show new
// files late.
constexpr std::chrono::seconds kFileDelay{20};

void check(const Launch& launch, std::chrono::milliseconds limit, bool needs_port) {
  if (launch.world_size < 1 || launch.rank < 0 || launch.rank >= launch.world_size)
    throw RendezvousError(concat("rank ", launch.rank, " of a world of ", launch.world_size,
                                 " ranks does not exist; ranks are 0 to world size - 1"),
                          {launch.rank});
  if (launch.world_size > kMostRanks)
    throw RendezvousError(concat("a world of ", launch.world_size, " ranks was asked for; at most ",
                                 kMostRanks,
                                 " can meet: check WORLD_SIZE or what the launcher sets"));
  if (limit.count() < 1)
    throw RendezvousError(
        concat("the rendezvous was given ", limit.count(), " ms; give a positive limit"));
  if (launch.world_size == 1 || !needs_port) return;
  if (launch.port < 1 || launch.port > 65535)
    throw RendezvousError(concat("a job of ", launch.world_size,
                                 " ranks needs a port for its store, and ", launch.port,
                                 " is none (1 to 65535)"));
  if (detail::is_any_address(launch.address))
    throw RendezvousError(
        concat("the address of rank 0 is given as ", detail::printable(launch.address),
               ", which means any address of a host: the store listens on one alone, and the other "
               "ranks must reach it; give the address or name of rank 0's host on the network "
               "between the ranks (MASTER_ADDR), or 127.0.0.1 if all ranks are on one host"));
}

/// Rank 0: serves the store and connects to it.
void serve(Rendezvous& meeting, const Launch& launch, Hello hello, c10d::Store* board,
           Deadline deadline) {
  std::optional<detail::SecretFile> file;
  const bool other_hosts = has_other_hosts(launch);
  Socket listener;
  if (hello.secret.name.empty() && board && other_hosts) hello.secret = {"agent", new_secret()};
  // The name stays empty until the port is bound: what uses it may be this user's store, which
  // names a file of its own.
  listener = listen(launch, hello, board ? 0 : launch.port, deadline);
  if (hello.secret.name.empty()) {
    file.emplace(other_hosts);
    hello.secret = {file->name(), file->secret()};
  }
  meeting.address = detail::local_address(listener);
  meeting.server = std::make_shared<StoreServer>(std::move(listener), launch.world_size, hello.job,
                                                 hello.secret);
  const int port = meeting.server->port();
  if (board) {
    const bool published = hello.secret.name == "agent";
    board->set(kBoardKey, to_text({meeting.address, published ? hello.secret.value : kByFile,
                                   hello.job, port}));
  }
  hello.where = concat(meeting.address, ":", std::to_string(port));
  Socket socket = detail::connect_to(meeting.address, port, false, deadline);
  std::string why;
  meeting.connection = StoreConnection::meet(std::move(socket), hello, deadline, why);
  if (!meeting.connection)
    throw RendezvousError(concat("rank 0 lost its own store on ", hello.where, ": ", why), {0});
}

/// The other ranks: find the store and connect to it.
void join(Rendezvous& meeting, const Launch& launch, Hello hello, c10d::Store* board,
          Deadline deadline, std::chrono::milliseconds limit) {
  const bool other_hosts = has_other_hosts(launch);
  std::string host = launch.address.empty() ? "127.0.0.1" : launch.address;
  int port = launch.port;
  Deadline file_expected = Deadline::max();
  for (std::string why;;) {
    if (board) {
      try {
        const Published where = read_published(*board, deadline);
        host = where.address;
        port = where.port;
        hello.job = where.job;
        if (launch.secret.empty())
          hello.secret = where.secret == kByFile ? Secret{} : Secret{"agent", where.secret};
      } catch (const c10::Error&) {
        const std::string through =
            launch.agent_serves_store
                ? concat("torchrun's agent on ", launch.address, ":", std::to_string(launch.port))
                : "the store that was given";
        throw RendezvousError(
            concat("rank ", launch.rank, ": rank 0 did not say within ", limit.count(),
                   " ms where its store listens (through ", through, "); check that rank 0 runs"),
            {0});
      }
      hello.where = concat(host, ":", std::to_string(port));
    }
    bool no_secret = false;
    try {
      // An agent's store may hold the address of an earlier attempt, whose store is gone: look
      // again soon.
      Socket socket = detail::connect_to(
          host, port, !board && other_hosts,
          board ? std::min(deadline, deadline_after(std::chrono::milliseconds(300))) : deadline);
      meeting.address = detail::local_address(socket);
      meeting.connection =
          StoreConnection::meet(std::move(socket), hello, deadline, why, &no_secret);
    } catch (const RendezvousError& error) {
      if (!why.empty() && Clock::now() >= deadline)
        throw RendezvousError(concat(error.what(), "; before that: ", why), error.ranks());
      if (!board || !error.ranks().empty() || Clock::now() >= deadline) throw;
    }
    if (meeting.connection) return;
    if (!no_secret)
      file_expected = Deadline::max();
    else
      file_expected = std::min(file_expected, deadline_after(kFileDelay));
    if (Clock::now() >= std::min(deadline, file_expected))
      throw RendezvousError(concat("rank ", launch.rank, ": no rendezvous with the job's store on ",
                                   hello.where, " within ", limit.count(), " ms: ", why),
                            {0});
    pause();
  }
}

}  // namespace

Rendezvous Rendezvous::meet(const Launch& launch, std::chrono::milliseconds limit,
                            c10::intrusive_ptr<c10d::Store> board) {
  check(launch, limit, board == nullptr);
  const Deadline deadline = deadline_after(limit);
  Rendezvous meeting;
  if (launch.world_size == 1) {
    meeting.store = c10::make_intrusive<c10d::HashStore>();
    meeting.address = "127.0.0.1";
    return meeting;
  }
  const std::string host = launch.address.empty() ? "127.0.0.1" : launch.address;
  Hello hello{launch.rank,
              launch.world_size,
              launch.job_id,
              concat(host, ":", std::to_string(launch.port)),
              {}};
  if (launch.secret == kNoSecret)
    hello.secret = Secret::none();
  else if (!launch.secret.empty())
    hello.secret = Secret::given(launch.secret);
  if (launch.agent_serves_store) board = agent_store(host, launch.port, deadline);
  if (board) hello.job = "job " + new_secret();
  if (launch.rank == 0)
    serve(meeting, launch, std::move(hello), board.get(), deadline);
  else
    join(meeting, launch, std::move(hello), board.get(), deadline, limit);
  // All have come, and read it; the job's secret may be in it.
  if (launch.rank == 0 && board && !launch.agent_serves_store) board->deleteKey(kBoardKey);
  meeting.store = c10::make_intrusive<JobStore>(meeting.connection, bounded_limit(limit));
  return meeting;
}

}  // namespace tessera
