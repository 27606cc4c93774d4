#include "tessera/comm/store/store.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <random>
#include <thread>

#include "tessera/base/text.h"
#include "tessera/comm/store/detail/agent_store.h"
#include "tessera/comm/store/detail/job_store.h"
#include "tessera/comm/store/detail/socket.h"
#include "tessera/comm/store/detail/store_connection.h"
#include "tessera/comm/store/detail/store_server.h"

namespace tessera {

using detail::Clock;
using detail::Deadline;
using detail::Hello;
using detail::JobStore;
using detail::Socket;
using detail::StoreConnection;
using detail::StoreServer;

RendezvousError::~RendezvousError() = default;
Rendezvous::Rendezvous() = default;
Rendezvous::Rendezvous(Rendezvous&&) noexcept = default;
Rendezvous& Rendezvous::operator=(Rendezvous&&) noexcept = default;
Rendezvous::~Rendezvous() = default;

namespace {

constexpr auto kAgentKey = "tessera/rendezvous";

bool has_other_hosts(const Launch& launch) {
  return launch.hosts.size() > 1 || launch.local_size < launch.world_size;
}

void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

/// Rank 0 says who it is to whatever holds the port. Throws if that knows of another rank 0; false
/// if it is an earlier store of ours that is about to end.
bool port_is_foreign(const std::string& address, int port, const Hello& hello) {
  const Deadline soon = Clock::now() + std::chrono::milliseconds(300);
  std::string why;
  try {
    return StoreConnection::meet(detail::connect_to(address, port, false, soon), hello, soon,
                                 why) != nullptr;
  } catch (const RendezvousError& error) {
    if (!error.ranks().empty()) throw;
    return true;
  }
}

Socket listen(const Launch& launch, const Hello& hello, int port, Deadline deadline) {
  const bool other_hosts = has_other_hosts(launch);
  std::string address = "127.0.0.1";
  // With an agent the port is ours to choose, so on one host nobody needs to reach more than
  // loopback.
  if (!launch.address.empty() && (other_hosts || !launch.agent_serves_store)) {
    std::string reason;
    const auto addresses = detail::targets(launch.address, other_hosts, reason);
    if (addresses.empty())
      throw RendezvousError(concat("rank 0 cannot serve the job's store: ", reason,
                                   "; give the address of rank 0's host"));
    const auto own = detail::own_addresses();
    const auto mine = std::find_if(addresses.begin(), addresses.end(), [&](const std::string& a) {
      return detail::is_loopback_address(a) || std::find(own.begin(), own.end(), a) != own.end();
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

std::string random_name() {
  std::random_device source;
  return concat("job ", std::hex, source(), source());
}

/// "address port name of the job", as rank 0 published it.
struct Published {
  std::string address, job;
  int port = 0;
};

Published read_published(c10d::Store& agent) {
  const std::string text = agent.get_to_str(kAgentKey);
  TextReader in(text);
  Published where;
  in >> where.address >> where.port;
  std::getline(in >> std::ws, where.job);
  return where;
}

}  // namespace

Rendezvous Rendezvous::meet(const Launch& launch, std::chrono::milliseconds limit) {
  const Deadline deadline = Clock::now() + limit;
  if (launch.world_size < 1 || launch.rank < 0 || launch.rank >= launch.world_size)
    throw RendezvousError(concat("rank ", launch.rank, " of a world of ", launch.world_size,
                                 " ranks does not exist; ranks are 0 to world size - 1"),
                          {launch.rank});
  if (limit.count() < 1)
    throw RendezvousError(
        concat("the rendezvous was given ", limit.count(), " ms; give a positive limit"));
  Rendezvous meeting;
  if (launch.world_size == 1) {
    meeting.store = c10::make_intrusive<c10d::HashStore>();
    meeting.address = "127.0.0.1";
    return meeting;
  }
  if (launch.port < 1 || launch.port > 65535)
    throw RendezvousError(concat("a job of ", launch.world_size,
                                 " ranks needs a port for its store, and ", launch.port,
                                 " is none (1 to 65535)"));

  const bool other_hosts = has_other_hosts(launch);
  std::string host = launch.address.empty() ? "127.0.0.1" : launch.address;
  Hello hello{launch.rank, launch.world_size, launch.job_id, concat(host, ":", launch.port)};
  c10::intrusive_ptr<c10d::Store> agent;
  if (launch.agent_serves_store) {
    agent = detail::agent_store(host, launch.port, deadline);
    hello.job = random_name();
  }
  if (launch.rank == 0) {
    Socket listener = listen(launch, hello, agent ? 0 : launch.port, deadline);
    const std::string address = detail::local_address(listener);
    meeting.server =
        std::make_unique<StoreServer>(std::move(listener), launch.world_size, hello.job);
    if (agent) agent->set(kAgentKey, concat(address, " ", meeting.server->port(), " ", hello.job));
    hello.where = concat(address, ":", meeting.server->port());
    Socket socket = detail::connect_to(address, meeting.server->port(), false, deadline);
    meeting.address = address;
    std::string why;
    meeting.connection = StoreConnection::meet(std::move(socket), hello, deadline, why);
    if (!meeting.connection)
      throw RendezvousError(concat("rank 0 lost its own store on ", hello.where, ": ", why), {0});
  } else {
    for (std::string why;;) {
      int port = launch.port;
      if (agent) {
        try {
          agent->setTimeout(std::chrono::milliseconds(std::max(1, detail::remaining_ms(deadline))));
          const Published where = read_published(*agent);
          host = where.address;
          port = where.port;
          hello.job = where.job;
        } catch (const c10::Error&) {
          throw RendezvousError(
              concat("rank ", launch.rank, ": rank 0 did not say within ", limit.count(),
                     " ms where its store listens (through torchrun's agent on ", launch.address,
                     ":", launch.port, "); check that rank 0 runs"),
              {0});
        }
        hello.where = concat(host, ":", port);
      }
      try {
        // What the agent's store holds may be of an earlier attempt, whose store is gone: look
        // again soon.
        Socket socket = detail::connect_to(
            host, port, !agent && other_hosts,
            agent ? std::min(deadline, Clock::now() + std::chrono::milliseconds(300)) : deadline);
        meeting.address = detail::local_address(socket);
        meeting.connection = StoreConnection::meet(std::move(socket), hello, deadline, why);
      } catch (const RendezvousError& error) {
        if (!why.empty() && Clock::now() >= deadline)
          throw RendezvousError(concat(error.what(), "; before that: ", why), error.ranks());
        if (!agent || !error.ranks().empty() || Clock::now() >= deadline) throw;
      }
      if (meeting.connection) break;
      if (Clock::now() >= deadline)
        throw RendezvousError(
            concat("rank ", launch.rank, ": no rendezvous with the job's store on ", hello.where,
                   " within ", limit.count(), " ms: ", why),
            {0});
      pause();
    }
  }
  meeting.store = c10::make_intrusive<JobStore>(meeting.connection, limit);
  return meeting;
}

}  // namespace tessera
