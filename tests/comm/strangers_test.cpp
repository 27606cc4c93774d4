// Who is not of the job stays outside, costs little, and ends nothing; and what a caller may get
// wrong at the meeting of the ranks.

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <thread>

#include "meet.h"
#include "tessera/base/text.h"
#include "tessera/comm/store/detail/hmac.h"
#include "tessera/comm/store/detail/secret_file.h"

namespace {
std::atomic<bool> name_service_answers{false};
std::atomic<int> slow_questions{0};
constexpr auto kSlowName = "slow.invalid";
}  // namespace

// The name service as this program sees it: for one name it does not answer.
extern "C" int getaddrinfo(const char* host, const char* service, const addrinfo* hints,
                           addrinfo** out) {
  if (std::strcmp(host, kSlowName) == 0) {
    ++slow_questions;
    for (int i = 0; i < 3000 && !name_service_answers; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return EAI_AGAIN;
  }
  using Function = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  static const auto real = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  return real(host, service, hints, out);
}

namespace tessera::strangers_test {
namespace {

using namespace std::chrono_literals;
using namespace testing;
using detail::Clock;
using detail::Frame;
using detail::Hello;
using detail::Secret;
using detail::Socket;
using detail::StoreConnection;
using detail::StoreServer;
using detail::Writer;

std::string hex(std::string_view bytes) {
  std::string out;
  for (const unsigned char byte : bytes)
    for (const int digit : {byte >> 4, byte & 15}) out += "0123456789abcdef"[digit];
  return out;
}

TEST(Hmac, MatchesPublishedVectors) {
  const auto digest = [](std::string_view message) {
    const auto bytes = detail::sha256(message);
    return hex({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  };
  // FIPS 180-4 examples, then RFC 4231, cases 1, 2 and 6.
  EXPECT_EQ(digest("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(digest(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(digest(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  EXPECT_EQ(hex(detail::hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(detail::hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(detail::hmac_sha256(std::string(131, '\xaa'),
                                    "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_TRUE(detail::same_proof("ab", "ab"));
  EXPECT_FALSE(detail::same_proof("ab", "ac"));
  EXPECT_FALSE(detail::same_proof("ab", "abc"));
}

const Secret kSecret = Secret::given("0123456789abcdef0123456789abcdef");

Socket connect(const StoreServer& server) {
  return detail::connect_to("127.0.0.1", server.port(), false, Clock::now() + 10s);
}

/// Empty if it met; else why not.
std::string come(const StoreServer& server, int rank, int world, const Secret& secret,
                 milliseconds limit = 10s, const std::string& job = "") {
  const Hello hello{rank, world, job, "here", secret};
  std::string why;
  try {
    if (StoreConnection::meet(connect(server), hello, Clock::now() + limit, why)) return {};
    return why;
  } catch (const RendezvousError& error) {
    return error.what();
  }
}

/// Both ranks of a world of two come, with the right secret.
void expect_meeting(const StoreServer& server) {
  std::array<std::string, 2> outcomes;
  std::thread other([&] { outcomes[1] = come(server, 1, 2, kSecret); });
  outcomes[0] = come(server, 0, 2, kSecret);
  other.join();
  EXPECT_EQ(outcomes[0], "");
  EXPECT_EQ(outcomes[1], "");
}

/// Closed by the other end within the limit.
bool is_closed(const Socket& socket, milliseconds limit) {
  char part[4096];
  const auto end = Clock::now() + limit;
  for (;;) {
    pollfd waiting{socket.fd(), POLLIN, 0};
    const auto left = time_left(end);
    if (::poll(&waiting, 1, static_cast<int>(left.count())) == 0) return false;
    if (::recv(socket.fd(), part, sizeof part, MSG_DONTWAIT) <= 0) return true;
  }
}

TEST(Strangers, CannotJoinAndEndNothing) {
  StoreServer server(detail::listen_on("127.0.0.1", 0), 2, "", kSecret);
  for (const Secret& wrong : {Secret::given("0123456789abcdef0123456789abcdee"), Secret::given("")})
    // Plausible, and with a world that is not ours: both once ended the meeting of all.
    for (const auto& [rank, world] : {std::pair(1, 2), std::pair(0, 2), std::pair(1, 99)}) {
      const auto outcome = come(server, rank, world, wrong);
      EXPECT_TRUE(contains(outcome, "does not know the job's secret")) << outcome;
    }
  // Without any, and with a file: told at once, for this rank was started otherwise.
  EXPECT_TRUE(contains(come(server, 1, 2, Secret::none()), "TESSERA_SECRET"));
  EXPECT_TRUE(contains(come(server, 1, 2, Secret{}), "TESSERA_SECRET"));
  expect_meeting(server);
}

TEST(Strangers, AProofIsOfNoUseTwice) {
  StoreServer server(detail::listen_on("127.0.0.1", 0), 2, "", kSecret);
  const auto say_hello = [&](const std::string& store_nonce, const Socket& socket) {
    auto hello = detail::hello_fields(1, 2, 10'000, "me", "", "n");
    const auto fields = Writer(hello).take();
    const std::string bytes = std::string(detail::store_magic) +
                              hello.text(detail::rank_proof(kSecret, store_nonce, fields)).take();
    detail::send_all(socket, bytes.data(), bytes.size(), Clock::now() + 5s);
  };
  // The nonce of another connection, as one has it who has listened in.
  const Socket socket = connect(server);
  say_hello(std::string(32, '0'), socket);
  // Long before a stranger who says nothing would be.
  EXPECT_TRUE(is_closed(socket, 4500ms));
  expect_meeting(server);
}

TEST(Strangers, OfAnotherUserDoNotServeARank) {
  // A store that names a secret file it cannot know, and one that asks for no secret.
  for (const std::string& name : {std::string(32, 'a'), std::string("none"), std::string("x")}) {
    StoreServer server(detail::listen_on("127.0.0.1", 0), 2, "", {name, "guess"});
    const auto outcome = come(server, 1, 2, Secret{});
    EXPECT_FALSE(outcome.empty());
    EXPECT_TRUE(contains(outcome, "TESSERA_SECRET")) << outcome;
  }
  // One that knows the name of the source but not the secret cannot pose as the store.
  StoreServer server(detail::listen_on("127.0.0.1", 0), 2, "",
                     Secret::given("a guess of 16 letters"));
  EXPECT_TRUE(contains(come(server, 1, 2, kSecret), "secret"));
  EXPECT_THROW(StoreServer(detail::listen_on("127.0.0.1", 0), 2, "", Secret{}), InvalidArgument);
}

// The secret of a rank that knows none yet: a store that asks for it could belong to any user.
TEST(Strangers, WithASecretOfNoNameDoNotServeARank) {
  const Socket listener = detail::listen_on("127.0.0.1", 0);
  std::thread stranger([&] {
    const Socket socket(::accept(listener.fd(), nullptr, nullptr));
    const auto say = [&](const std::string& bytes) {
      detail::send_all(socket, bytes.data(), bytes.size(), Clock::now() + 5s);
    };
    const std::string nonce(32, '7');
    say(std::string(detail::store_magic) +
        Writer(Frame::challenge).number(std::uint8_t{0}).text("").text(nonce).take());
    std::string heard(detail::store_magic.size() + sizeof(std::uint32_t), '\0');
    if (detail::receive_all(socket, heard.data(), heard.size(), Clock::now() + 5s) !=
        detail::Transfer::done)
      return;
    std::uint32_t size = 0;
    std::memcpy(&size, heard.data() + detail::store_magic.size(), sizeof size);
    std::string frame(size, '\0');
    detail::receive_all(socket, frame.data(), size, Clock::now() + 5s);
    detail::Reader in(frame);
    const auto rank = in.number<std::int32_t>(), world = in.number<std::int32_t>();
    const auto limit = in.number<std::int64_t>();
    const auto who = in.text(), job = in.text(), its = in.text();
    const auto fields = detail::hello_fields(rank, world, limit, who, job, its).take();
    say(Writer(Frame::welcome).text(detail::store_proof(Secret{}, nonce, fields)).take());
    say(Writer(Frame::ready).take());
    char byte;
    while (::recv(socket.fd(), &byte, 1, 0) > 0) {
    }
  });
  const Hello hello{1, 2, "", "here", Secret{}};
  std::string why;
  EXPECT_THROW(StoreConnection::meet(detail::connect_to("127.0.0.1", detail::local_port(listener),
                                                        false, Clock::now() + 10s),
                                     hello, Clock::now() + 5s, why),
               RendezvousError);
  stranger.join();
}

TEST(StoreServer, WithoutDescriptorsSaysSo) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  Socket listener = detail::listen_on("127.0.0.1", 0);
  // The next descriptor but one is not to be had: one for epoll, none to wake its thread with.
  const int probe = ::dup(listener.fd());
  ::close(probe);
  rlimit few = before;
  few.rlim_cur = static_cast<rlim_t>(probe) + 1;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  std::string why;
  try {
    const StoreServer server(std::move(listener), 2, "", kSecret);
  } catch (const RendezvousError& error) {
    why = error.what();
  }
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_TRUE(contains(why, "ulimit -n")) << why;
}

// A rank that leaves answers no question that it was not asked.
TEST(StoreServer, CountsTheAnswersOfThoseWhoWereAsked) {
  auto held = held_meeting(3);
  std::atomic<bool> asked{false}, heard{false};
  detail::StoreConnection::Listener asker, slow;
  asker.lost = [&](int, bool, const std::string&) { heard = true; };
  slow.lost = [](int, bool, const std::string&) {};
  slow.position = [&](const std::string&) {
    asked = true;
    for (int i = 0; i < 10'000 && !heard; ++i) std::this_thread::sleep_for(1ms);
    return std::optional(detail::Position{7, "all_reduce"});
  };
  held[0]->connection->listen(asker);
  held[1]->connection->listen(slow);
  std::thread leaves([&] {
    for (int i = 0; i < 10'000 && !asked; ++i) std::this_thread::sleep_for(1ms);
    held[2]->connection->leave();
  });
  const auto roll = held[0]->connection->roll_call("g", {1}, 20s);
  leaves.join();
  ASSERT_EQ(roll.size(), 1u);
  EXPECT_EQ(roll[0].answer, detail::RollEntry::Answer::here);
  EXPECT_EQ(roll[0].position.begun, 7u);
  for (int rank = 0; rank < 2; ++rank) held[rank]->connection->listen({});
  for (int rank = 2; rank >= 0; --rank) held[rank].reset();
}

/// The kind of the next frame, and of a challenge its nonce.
std::pair<Frame, std::string> next_frame(const Socket& socket) {
  std::uint32_t size = 0;
  std::string frame;
  const auto take = [&](void* to, std::size_t bytes) {
    if (detail::receive_all(socket, static_cast<char*>(to), bytes, Clock::now() + 10s) !=
        detail::Transfer::done)
      throw std::runtime_error("the store said nothing more");
  };
  take(&size, sizeof size);
  frame.resize(size);
  take(frame.data(), size);
  detail::Reader in(frame);
  if (in.kind != Frame::challenge) return {in.kind, {}};
  in.number<std::uint8_t>();
  in.text();
  return {in.kind, std::string(in.text())};
}

// All ranks of a large job are killed at once: each is lost to all others, of whom none reads it.
TEST(StoreServer, ManyDeathsAtOnceCostLittleMemory) {
  constexpr int kRanks = 2000;
  constexpr std::size_t kDescriptors = 2 * kRanks + 200;
  if (detail::allow_descriptors(kDescriptors) < kDescriptors)
    GTEST_SKIP() << "needs " << kDescriptors << " descriptors (ulimit -Hn)";
  const auto most_kib = [] {
    rusage used{};
    ::getrusage(RUSAGE_SELF, &used);
    return used.ru_maxrss;
  };
  long before = 0;
  {
    StoreServer server(detail::listen_on("127.0.0.1", 0), kRanks, "", kSecret);
    server.set_linger(30s);
    std::vector<Socket> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      const Socket& socket = ranks.emplace_back(connect(server));
      std::string magic(detail::store_magic.size(), '\0');
      ASSERT_EQ(detail::receive_all(socket, magic.data(), magic.size(), Clock::now() + 10s),
                detail::Transfer::done);
      const auto [kind, nonce] = next_frame(socket);
      ASSERT_EQ(kind, Frame::challenge);
      auto hello = detail::hello_fields(rank, kRanks, 60'000, "me", "", "n");
      const auto fields = Writer(hello).take();
      const std::string bytes = std::string(detail::store_magic) +
                                hello.text(detail::rank_proof(kSecret, nonce, fields)).take();
      detail::send_all(socket, bytes.data(), bytes.size(), Clock::now() + 10s);
      ASSERT_EQ(next_frame(socket).first, Frame::welcome);
    }
    for (const Socket& socket : ranks) ASSERT_EQ(next_frame(socket).first, Frame::ready);
    before = most_kib();
    ranks.clear();
  }  // it ends when it has seen all of them go
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the address sanitizer keeps what is freed";
#endif
  EXPECT_LT(most_kib() - before, 32 * 1024) << "KiB";
}

TEST(Strangers, SilentOnesAreFewAndSoonClosed) {
  StoreServer server(detail::listen_on("127.0.0.1", 0), 2, "", kSecret);
  std::vector<Socket> silent;
  for (int i = 0; i < 400; ++i) silent.push_back(connect(server));
  const auto begin = Clock::now();
  expect_meeting(server);
  EXPECT_LT(Clock::now() - begin, 5s);
  EXPECT_TRUE(is_closed(silent.front(), 20s));
  // The ranks' own connections stand beside them for as long as they like.
}

TEST(Strangers, LongOnesAreClosed) {
  StoreServer server(detail::listen_on("127.0.0.1", 0), 2, "", kSecret);
  for (const std::uint32_t announced : {5000u, 1u << 29}) {
    const Socket socket = connect(server);
    std::string bytes(detail::store_magic);
    bytes.append(reinterpret_cast<const char*>(&announced), 4);
    bytes.append(1 << 20, 'x');
    detail::send_all(socket, bytes.data(), bytes.size(), Clock::now() + 2s);
    EXPECT_TRUE(is_closed(socket, 4500ms)) << announced;
  }
  expect_meeting(server);
}

TEST(Strangers, CannotWriteToTheTerminal) {
  StoreServer server(detail::listen_on("127.0.0.1", 0), 2, "ours\x1b[31m\n", kSecret);
  const auto outcome = come(server, 1, 2, kSecret, 5s, "other\x1b[2J\nroot: all is well");
  EXPECT_TRUE(contains(outcome, "belongs to 'other.[2J.root: all is well'")) << outcome;
  for (const char c : outcome) EXPECT_TRUE(c >= 32 && c < 127) << static_cast<int>(c);
}

TEST(Secrets, AreFilesThatOnlyTheirUserCanRead) {
  std::string name, folder;
  {
    const detail::SecretFile file(false);
    name = file.name();
    EXPECT_EQ(detail::read_secret_file(name), file.secret());
    EXPECT_EQ(file.secret().size(), 32u);
    folder = concat("/tmp/tessera-", geteuid());
    struct stat about{};
    ASSERT_EQ(::stat((folder + "/" + name).c_str(), &about), 0);
    EXPECT_EQ(about.st_mode & 0777, 0600u);
    // Others could have written it.
    ::chmod((folder + "/" + name).c_str(), 0640);
    EXPECT_EQ(detail::read_secret_file(name), std::nullopt);
  }
  EXPECT_EQ(detail::read_secret_file(name), std::nullopt) << "it outlived its rank 0";
  // Of this process alone: the folder is that of all programs of this user.
  std::string linked = std::to_string(::getpid());
  linked.insert(0, 32 - linked.size(), 'b');
  const std::string link = folder + "/" + linked;
  ASSERT_EQ(::symlink("/etc/hostname", link.c_str()), 0);
  EXPECT_EQ(detail::read_secret_file(linked), std::nullopt);
  ::unlink(link.c_str());
  for (const char* wrong : {"", "../../../etc/passwd", "/etc/passwd", "short"})
    EXPECT_EQ(detail::read_secret_file(wrong), std::nullopt) << wrong;
}

TEST(Secrets, ReachTheRanksWithoutAWord) {
  // By file; given by the launcher; none, as was asked for. No file is left behind.
  for (const char* secret : {"", "0123456789abcdef", "none"}) {
    auto all = launches(3, free_port());
    for (auto& launch : all) launch.secret = secret;
    for (const auto& outcome : meet(all, 20s)) EXPECT_EQ(outcome.error, "") << secret;
  }
  auto all = launches(2, free_port());
  all[0].secret = "0123456789abcdef";
  all[1].secret = "0123456789abcdeg";
  const auto outcomes = meet(all, 2s);
  EXPECT_TRUE(contains(outcomes[1].error, "does not know the job's secret")) << outcomes[1].error;
  EXPECT_TRUE(contains(outcomes[0].error, "1 connection was turned away")) << outcomes[0].error;
  EXPECT_EQ(outcomes[0].ranks, std::vector<int>{1});
}

TEST(Rendezvous, RefusesAnyAddresses) {
  for (const char* any : {"0.0.0.0", "::", "0", "0.0", "::ffff:0.0.0.0", "0:0:0:0:0:0:0:0"})
    for (const int rank : {0, 1}) {
      auto launch = launch_of(rank, 2, free_port());
      launch.address = any;
      const auto outcome = meet({launch}, 60s)[0];
      EXPECT_TRUE(contains(outcome.error, "any address")) << any << ": " << outcome.error;
      EXPECT_TRUE(contains(outcome.error, "MASTER_ADDR")) << outcome.error;
      EXPECT_LT(outcome.took, 5s);
    }
  EXPECT_FALSE(detail::is_any_address("127.0.0.1"));
  EXPECT_FALSE(detail::is_any_address("::1"));
  EXPECT_FALSE(detail::is_any_address("node0"));
}

TEST(Rendezvous, RefusesAnImplausibleWorldSize) {
  const auto outcome = meet({launch_of(0, 2147483647, free_port())}, 5s)[0];
  EXPECT_TRUE(contains(outcome.error, "WORLD_SIZE")) << outcome.error;
}

TEST(Rendezvous, TakesTheLongestLimitThereIs) {
  for (const auto limit : {milliseconds::max(), milliseconds(1'000'000'000'000'000)}) {
    const auto outcomes = meet(launches(3, free_port()), limit, [](Rendezvous& meeting, int rank) {
      meeting.store->set(concat("rank", rank), "x");
      meeting.store->wait({"rank0", "rank1", "rank2"}, milliseconds::max());
    });
    for (const auto& outcome : outcomes) EXPECT_EQ(outcome.error, "");
  }
}

TEST(Rendezvous, EndsWhenTheNameServiceIsSilent) {
  auto launch = launch_of(1, 2, free_port());
  launch.address = kSlowName;
  for (const int rank : {0, 1}) {
    launch.rank = launch.local_rank = rank;
    const auto outcome = meet({launch}, 400ms)[0];
    EXPECT_TRUE(contains(outcome.error, "name service does not answer")) << outcome.error;
    EXPECT_LT(outcome.took, 400ms + kGrace);
  }
  // The thread that asks may come to it after the limit.
  const auto end = Clock::now() + 20s;
  while (slow_questions < 2 && Clock::now() < end) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(slow_questions, 2);
  name_service_answers = true;
}

TEST(Rendezvous, KeepsIdleConnectionsAlive) {
  StoreServer server(detail::listen_on("127.0.0.1", 0), 2, "", kSecret);
  const Socket socket = connect(server);
  int alive = 0, quiet = 0;
  socklen_t size = sizeof alive;
  getsockopt(socket.fd(), SOL_SOCKET, SO_KEEPALIVE, &alive, &size);
  getsockopt(socket.fd(), IPPROTO_TCP, TCP_KEEPIDLE, &quiet, &size);
  EXPECT_EQ(alive, 1);
  EXPECT_LE(quiet, 60);
}

TEST(StoreServer, ForgetsKeysThatNoRankNeeds) {
  auto held = held_meeting(3);
  auto& store = *held[0]->store;
  const auto before = store.getNumKeys();
  for (const char* key : {"g/a", "g/b", "h/a", "g", "ga"}) store.set(key, "x");
  held[0]->connection->forget("g/", 3, {0, 1, 2});
  held[1]->connection->forget("g/", 3, {});
  held[1]->connection->forget("g/", 3, {});  // twice is once
  EXPECT_EQ(held[1]->store->getNumKeys(), before + 5);
  held[2]->connection->forget("g/", 3, {});
  EXPECT_EQ(held[2]->store->getNumKeys(), before + 3);
  EXPECT_FALSE(store.check({"g/a"}));
  EXPECT_TRUE(store.check({"g", "ga", "h/a"}));
  // Who has ended needs them no more.
  held[0]->connection->forget("h/", 3, {0, 1, 2});
  held[1]->connection->forget("h/", 3, {});
  EXPECT_TRUE(store.check({"h/a"}));
  held[2]->connection->leave();
  const auto end = Clock::now() + 10s;
  while (store.check({"h/a"}) && Clock::now() < end) std::this_thread::sleep_for(1ms);
  EXPECT_FALSE(store.check({"h/a"}));
  for (int rank = 2; rank >= 0; --rank) held[rank].reset();
}

}  // namespace
}  // namespace tessera::strangers_test
