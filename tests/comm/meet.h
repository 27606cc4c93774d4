#pragma once
// Ranks as threads that meet at a store, each with a connection of its own.

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../support/free_port.h"
#include "tessera/base/text.h"
#include "tessera/comm/store/detail/socket.h"
#include "tessera/comm/store/detail/store_connection.h"
#include "tessera/comm/store/detail/store_server.h"
#include "tessera/comm/store/store.h"

namespace tessera::testing {

using namespace std::chrono_literals;
using detail::Clock;
using detail::Socket;
using std::chrono::milliseconds;

// What ends late is a failure; busy machines get this much more.
inline constexpr milliseconds kGrace = 4s;

inline Launch launch_of(int rank, int world, int port) {
  Launch launch;
  launch.rank = launch.local_rank = rank;
  launch.world_size = launch.local_size = world;
  launch.address = "127.0.0.1";
  launch.port = port;
  return launch;
}

struct Outcome {
  std::string error;       // empty: it met
  std::vector<int> ranks;  // of the error
  milliseconds took{0};
};

/// Every launch on a thread of its own; `after` runs once it has met.
inline std::vector<Outcome> meet(const std::vector<Launch>& launches, milliseconds limit,
                                 const std::function<void(Rendezvous&, int)>& after = {}) {
  std::vector<Outcome> outcomes(launches.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < launches.size(); ++i) {
    threads.emplace_back([&, i] {
      const auto begin = Clock::now();
      try {
        auto meeting = Rendezvous::meet(launches[i], limit);
        outcomes[i].took = std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
        if (after) after(meeting, launches[i].rank);
        if (meeting.server) meeting.server->set_linger(10s);
        meeting.connection->leave();
      } catch (const RendezvousError& error) {
        outcomes[i].took = std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
        outcomes[i].error = error.what();
        outcomes[i].ranks = error.ranks();
      } catch (const std::exception& error) {
        outcomes[i].error = concat("not a RendezvousError: ", error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return outcomes;
}

inline std::vector<Launch> launches(int world, int port) {
  std::vector<Launch> all;
  for (int rank = 0; rank < world; ++rank) all.push_back(launch_of(rank, world, port));
  return all;
}

/// All ranks of a meeting, held by this thread.
inline std::vector<std::unique_ptr<Rendezvous>> held_meeting(int world) {
  std::vector<std::unique_ptr<Rendezvous>> held(world);
  std::vector<std::thread> threads;
  const auto all = launches(world, free_port());
  for (int rank = 0; rank < world; ++rank)
    threads.emplace_back(
        [&, rank] { held[rank] = std::make_unique<Rendezvous>(Rendezvous::meet(all[rank], 20s)); });
  for (auto& thread : threads) thread.join();
  return held;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace tessera::testing
