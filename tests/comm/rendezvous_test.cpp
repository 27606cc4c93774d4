// The meeting of the ranks and the job's store: ranks are threads here, each with a connection of
// its own.

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <fstream>
#include <functional>
#include <limits>
#include <mutex>
#include <random>
#include <sstream>
#include <thread>
#include <vector>

#include "meet.h"
#include "tessera/base/text.h"
#include "tessera/comm/store/detail/job_store.h"
#include "tessera/comm/store/detail/socket.h"
#include "tessera/comm/store/detail/store_connection.h"
#include "tessera/comm/store/detail/store_server.h"
#include "tessera/comm/store/store.h"

namespace tessera::rendezvous_test {
namespace {

using namespace std::chrono_literals;
using namespace testing;
using detail::Clock;
using detail::Socket;
using std::chrono::milliseconds;

TEST(Rendezvous, MeetsAnyNumberOfRanks) {
  for (const int world : {2, 3, 8, 33}) {
    std::atomic<int> seen{0};
    const auto outcomes =
        meet(launches(world, free_port()), 20s, [&](Rendezvous& meeting, int rank) {
          EXPECT_EQ(meeting.address, "127.0.0.1");
          meeting.store->set(concat("rank", rank), std::to_string(rank * rank));
          for (int other = 0; other < world; ++other)
            EXPECT_EQ(meeting.store->get_to_str(concat("rank", other)),
                      std::to_string(other * other));
          EXPECT_LE(meeting.store->add("count", 1), world);
          ++seen;
        });
    for (const auto& outcome : outcomes) EXPECT_EQ(outcome.error, "");
    EXPECT_EQ(seen, world);
  }
}

TEST(Rendezvous, OneRankNeedsNoPort) {
  auto meeting = Rendezvous::meet(Launch{}, 1s);
  meeting.store->set("a", "b");
  EXPECT_EQ(meeting.store->get_to_str("a"), "b");
  EXPECT_EQ(meeting.connection, nullptr);
}

TEST(Rendezvous, TheSamePortServesOneMeetingAfterTheOther) {
  const int port = free_port();
  for (int round = 0; round < 5; ++round)
    for (const auto& outcome : meet(launches(3, port), 20s)) EXPECT_EQ(outcome.error, "");
}

TEST(Rendezvous, ListensOnTheChosenAddressAlone) {
  const int port = free_port();
  std::ostringstream hex;
  hex << std::uppercase << std::hex << port;
  meet(launches(2, port), 20s, [&](Rendezvous&, int rank) {
    if (rank != 0) return;
    int listeners = 0;
    for (const char* file : {"/proc/net/tcp", "/proc/net/tcp6"}) {
      std::ifstream in(file);
      std::string line, slot, local, remote, state;
      for (std::getline(in, line); std::getline(in, line);) {
        std::istringstream(line) >> slot >> local >> remote >> state;
        if (state != "0A" || !contains(local, concat(":", hex.str()))) continue;
        ++listeners;
        EXPECT_EQ(local.substr(0, 9), "0100007F:") << "a listener on something else than 127.0.0.1";
      }
    }
    EXPECT_EQ(listeners, 1);
  });
}

TEST(Rendezvous, NamesTheMissingRanksOnEveryRank) {
  for (const auto& [world, missing] :
       std::vector<std::pair<int, std::vector<int>>>{{4, {2}}, {5, {1, 3}}, {2, {1}}}) {
    auto present = launches(world, free_port());
    std::erase_if(present, [&, &gone = missing](const Launch& l) {
      return std::ranges::find(gone, l.rank) != gone.end();
    });
    milliseconds longest{0};
    for (const auto& outcome : meet(present, 1000ms)) {
      EXPECT_EQ(outcome.ranks, missing) << outcome.error;
      EXPECT_TRUE(contains(outcome.error, "did not come")) << outcome.error;
      EXPECT_LT(outcome.took, 1000ms + kGrace);
      longest = std::max(longest, outcome.took);
    }
    // A rank that begins later than rank 0 hears of it when rank 0's limit is over.
    EXPECT_GE(longest, 900ms);
  }
}

TEST(Rendezvous, SaysForWhomItWaitsLongBeforeItsLimit) {
  auto all = launches(3, free_port());
  all.erase(all.begin() + 1);
  ::testing::internal::CaptureStderr();
  meet(all, 6s);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("rank 0 waits on port"), std::string::npos) << said;
  EXPECT_NE(said.find("for ranks [1] of 3: start them with this address and port"),
            std::string::npos)
      << said;
}

TEST(Rendezvous, RefusesTwoRanksOfOneNumber) {
  for (const int twice : {0, 1, 2}) {
    auto all = launches(4, free_port());
    all.pop_back();
    all.push_back(all[twice]);
    int named = 0;
    for (const auto& outcome : meet(all, 5s)) {
      EXPECT_FALSE(outcome.error.empty());
      EXPECT_LT(outcome.took, 5s + kGrace);
      if (contains(outcome.error, concat("two processes say that they are rank ", twice)) &&
          outcome.ranks == std::vector<int>{twice}) {
        ++named;
        continue;
      }
      // A rank that comes late finds no store any more.
      EXPECT_TRUE(contains(outcome.error, "could not be reached")) << outcome.error;
    }
    EXPECT_GE(named, 2);
  }
}

TEST(Rendezvous, RefusesRanksThatDisagreeAboutTheWorld) {
  const int port = free_port();
  const auto outcomes = meet({launch_of(0, 3, port), launch_of(1, 4, port)}, 3s);
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(contains(outcome.error, "world size is 4, rank 0 says 3")) << outcome.error;
    EXPECT_LT(outcome.took, 3s + kGrace);
  }
}

TEST(Rendezvous, NamesThePortThatIsInUse) {
  const Socket other = detail::listen_on("127.0.0.1", 0);
  const int port = detail::local_port(other);
  const auto outcomes = meet({launch_of(0, 2, port)}, 1s);
  EXPECT_TRUE(contains(outcomes[0].error, concat("port ", port, " of 127.0.0.1")))
      << outcomes[0].error;
  EXPECT_TRUE(contains(outcomes[0].error, "in use")) << outcomes[0].error;
  EXPECT_LT(outcomes[0].took, 1s + kGrace);
}

TEST(Rendezvous, SaysThatNoServerListens) {
  const auto outcomes = meet({launch_of(1, 2, free_port())}, 400ms);
  EXPECT_TRUE(contains(outcomes[0].error, "could not be reached")) << outcomes[0].error;
  EXPECT_TRUE(contains(outcomes[0].error, "refused")) << outcomes[0].error;
  EXPECT_LT(outcomes[0].took, 400ms + kGrace);
}

TEST(Rendezvous, SaysThatTheAddressIsNotRankZeros) {
  auto launch = launch_of(0, 2, free_port());
  launch.address = "192.0.2.1";  // reserved for documentation: no host has it
  const auto outcomes = meet({launch}, 400ms);
  EXPECT_TRUE(contains(outcomes[0].error, "192.0.2.1")) << outcomes[0].error;
  EXPECT_TRUE(contains(outcomes[0].error, "this host's addresses")) << outcomes[0].error;
}

TEST(Rendezvous, EndsWhenPacketsAreSwallowed) {
  // A listener that accepts nothing, its queue full: further connections get no answer at all.
  const Socket full = detail::listen_on("127.0.0.1", 0);
  ::listen(full.fd(), 0);
  std::vector<Socket> queue;
  for (int i = 0; i < 4; ++i) {
    try {
      queue.push_back(
          detail::connect_to("127.0.0.1", detail::local_port(full), false, Clock::now() + 100ms));
    } catch (const RendezvousError&) {
      break;
    }
  }
  const auto outcomes = meet({launch_of(1, 2, detail::local_port(full))}, 600ms);
  EXPECT_FALSE(outcomes[0].error.empty());
  EXPECT_LT(outcomes[0].took, 600ms + kGrace);
}

/// Accepts connections and says the same to each.
class Service {
 public:
  explicit Service(std::string answer)
      : listener_(detail::listen_on("127.0.0.1", 0)), thread_([this, answer] {
          for (;;) {
            Socket client(::accept(listener_.fd(), nullptr, nullptr));
            if (stop_) return;
            detail::send_all(client, answer.data(), answer.size(), Clock::now() + 1s);
            held_.push_back(std::move(client));
          }
        }) {}
  ~Service() {
    stop_ = true;
    ::shutdown(listener_.fd(), SHUT_RDWR);
    thread_.join();
  }
  int port() const { return detail::local_port(listener_); }

 private:
  Socket listener_;
  std::vector<Socket> held_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

TEST(Rendezvous, RecognisesAnotherService) {
  Service talks("HTTP/1.1 400 Bad Request\r\n\r\n"), silent("");
  for (Service* service : {&talks, &silent}) {
    const auto outcomes = meet({launch_of(1, 2, service->port())}, 500ms);
    EXPECT_TRUE(contains(outcomes[0].error, "something else")) << outcomes[0].error;
    EXPECT_LT(outcomes[0].took, 500ms + kGrace);
    auto through_agent = launch_of(1, 2, service->port());
    through_agent.agent_serves_store = true;
    const auto again = meet({through_agent}, 500ms);
    EXPECT_TRUE(contains(again[0].error, "torchrun's agent")) << again[0].error;
    EXPECT_LT(again[0].took, 500ms + kGrace);
  }
}

TEST(Rendezvous, GoesThroughTheStoreOfAnAgent) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(free_port());
  options.isServer = true;
  options.waitWorkers = false;
  c10d::TCPStore agent("127.0.0.1", options);
  // Twice: the second time is a restart, and finds what the first left in the agent's store.
  for (int attempt = 0; attempt < 2; ++attempt) {
    auto all = launches(3, agent.getPort());
    for (auto& launch : all) launch.agent_serves_store = true;
    for (const auto& outcome : meet(all, 20s, [](Rendezvous& meeting, int rank) {
           meeting.store->set(std::to_string(rank), "x");
         }))
      EXPECT_EQ(outcome.error, "");
  }
  auto alone = launch_of(1, 2, free_port());
  alone.agent_serves_store = true;
  EXPECT_TRUE(contains(meet({alone}, 200ms)[0].error, "could not be reached"));
}

TEST(JobStore, DoesWhatHashStoreDoes) {
  meet(launches(2, free_port()), 20s, [](Rendezvous& meeting, int rank) {
    if (rank != 0) return;
    auto& ours = *meeting.store;
    const c10::intrusive_ptr<c10d::Store> reference = c10::make_intrusive<c10d::HashStore>();
    std::mt19937 random(7);
    auto pick = [&](int n) { return static_cast<int>(random() % n); };
    for (int step = 0; step < 2000; ++step) {
      const std::string key = concat("k", pick(20)), value = concat("v", pick(5)),
                        expected = pick(3) ? concat("v", pick(5)) : "";
      switch (pick(7)) {
        case 0:
          ours.set(key, value);
          reference->set(key, value);
          break;
        case 1: {
          const std::string counter = concat("n", pick(3));
          const int amount = pick(100) - 50;
          ASSERT_EQ(ours.add(counter, amount), reference->add(counter, amount));
          break;
        }
        case 2:
          ASSERT_EQ(ours.compareSet(key, expected, value),
                    reference->compareSet(key, expected, value));
          break;
        case 3:
          ASSERT_EQ(ours.check({key}), reference->check({key}));
          break;
        case 4:
          ASSERT_EQ(ours.deleteKey(key), reference->deleteKey(key));
          break;
        case 5:
          if (reference->check({key})) {
            ASSERT_EQ(ours.get(key), reference->get(key));
          }
          break;
        case 6: {
          const std::vector<std::uint8_t> bytes{0, static_cast<std::uint8_t>(pick(256)), 255};
          ours.append(key, bytes);
          reference->append(key, bytes);
          break;
        }
      }
      ASSERT_EQ(ours.getNumKeys(), reference->getNumKeys());
    }
    ours.multiSet({"x", "y"}, {{1, 2}, {}});
    EXPECT_EQ(ours.multiGet({"y", "x"}), (std::vector<std::vector<std::uint8_t>>{{}, {1, 2}}));
    constexpr std::numeric_limits<std::int64_t> of;
    EXPECT_EQ(ours.add("large", of.max()), of.max());
    EXPECT_EQ(ours.add("large", 1), of.min());
  });
}

TEST(JobStore, WaitsForKeysUpToItsLimit) {
  meet(launches(2, free_port()), 20s, [](Rendezvous& meeting, int rank) {
    if (rank == 1) {
      auto impatient = meeting.store->clone();
      impatient->setTimeout(100ms);
      EXPECT_THROW(impatient->get("never"), c10::DistStoreError);
      EXPECT_THROW(impatient->wait({"a", "never"}, 50ms), c10::DistStoreError);
      meeting.store->set("b", "1");  // still of use, and its own limit is as it was
      EXPECT_EQ(meeting.store->get_to_str("a"), "2");
    } else {
      meeting.store->wait({"b"});
      meeting.store->set("a", "2");
    }
  });
}

TEST(JobStore, ACallThatIsGivenUpEndsAtOnce) {
  meet(launches(2, free_port()), 20s, [](Rendezvous& meeting, int) {
    const auto store = c10::make_intrusive<detail::JobStore>(meeting.connection, 20s);
    std::thread other([&] {
      std::this_thread::sleep_for(100ms);
      store->interrupt();
    });
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THROW(store->wait({"never"}, 15s), c10::DistStoreError);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
    other.join();
    meeting.store->set("b", "1");  // others go on
  });
}

/// Collects what a connection tells.
struct News {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> items;
  void add(std::string item) {
    const std::lock_guard lock(mutex);
    items.push_back(std::move(item));
    changed.notify_all();
  }
  bool wait_for(const std::string& item) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, 20s,
                            [&] { return std::ranges::find(items, item) != items.end(); });
  }
  detail::StoreConnection::Listener listener() {
    return {[this](const std::string& group, const detail::Poison& poison) {
              add(concat("poisoned ", group, " ", list(poison.ranks), " ", poison.reason));
            },
            [this](int rank, bool on_purpose, const std::string&) {
              add(concat(on_purpose ? "left " : "lost ", rank));
            },
            [](const std::string& group) {
              return group == "known" ? std::optional(detail::Position{7, "all_reduce"})
                                      : std::nullopt;
            }};
  }
};

TEST(StoreConnection, TellsWhoIsLostAndWhoLeft) {
  for (const int victim : {0, 1, 2}) {
    std::vector<News> news(4);
    auto held = held_meeting(4);
    for (int rank = 0; rank < 4; ++rank) held[rank]->connection->listen(news[rank].listener());
    held[3]->connection->leave();
    for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(news[rank].wait_for("left 3"));
    // Unlike leave(), what a killed process does: its sockets are closed.
    if (victim == 0)
      held[0]->server.reset();
    else
      held[victim]->connection->disconnect();
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_TRUE(news[rank].wait_for(concat("lost ", victim))) << "rank " << rank;
    }
    for (auto& meeting : held) meeting->connection->listen({});
    for (int rank = 3; rank >= 0; --rank) held[rank].reset();
  }
}

TEST(StoreConnection, CarriesPoisonAndRollCalls) {
  std::vector<News> news(3);
  auto held = held_meeting(3);
  for (int rank = 0; rank < 3; ++rank) held[rank]->connection->listen(news[rank].listener());
  held[1]->connection->announce("g", {1, 2}, {{1}, "because", false});
  EXPECT_TRUE(news[2].wait_for("poisoned g [1] because"));
  const auto known = held[2]->connection->roll_call("known", {0, 1, 2}, 20s);
  ASSERT_EQ(known.size(), 3u);
  for (const auto& entry : known) {
    EXPECT_EQ(entry.answer, detail::RollEntry::Answer::here);
    EXPECT_EQ(entry.position.begun, 7u);
    EXPECT_EQ(entry.position.operation, "all_reduce");
  }
  held[0]->connection->leave();
  EXPECT_TRUE(news[1].wait_for("left 0"));
  const auto unknown = held[1]->connection->roll_call("unknown", {0, 2}, 20s);
  EXPECT_EQ(unknown[0].answer, detail::RollEntry::Answer::gone);
  EXPECT_EQ(unknown[1].answer, detail::RollEntry::Answer::here);
  EXPECT_EQ(unknown[1].position.operation, "");
  for (auto& meeting : held) meeting->connection->listen({});
  for (const auto& item : news[0].items)
    EXPECT_FALSE(contains(item, "poisoned")) << "rank 0 is no member of g";
  for (int rank = 2; rank >= 0; --rank) held[rank].reset();
}

TEST(StoreServer, SurvivesNonsense) {
  detail::StoreServer server(detail::listen_on("127.0.0.1", 0), 2, "");
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    Socket socket = detail::connect_to("127.0.0.1", server.port(), false, Clock::now() + 5s);
    std::string bytes(round % 2 ? detail::store_magic : "");
    if (round % 4 == 3)
      bytes += detail::Writer(detail::Frame::hello)
                   .number(std::int32_t(random() | 64))
                   .number(std::int32_t(2))
                   .take();
    for (int i = static_cast<int>(random() % 64); i > 0; --i) bytes += static_cast<char>(random());
    detail::send_all(socket, bytes.data(), bytes.size(), Clock::now() + 1s);
  }
  std::vector<std::thread> threads;
  std::atomic<int> met{0};
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      std::string why;
      auto connection = detail::StoreConnection::meet(
          detail::connect_to("127.0.0.1", server.port(), false, Clock::now() + 5s),
          {rank, 2, "", "here", detail::Secret::none()}, Clock::now() + 10s, why);
      if (connection) ++met;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(met, 2);
}

}  // namespace
}  // namespace tessera::rendezvous_test
