// How ranks meet: strangers at the door, ordinary users, and what the system refuses.

#include <grp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cstddef>
#include <cstring>

#include "ranks.h"

namespace tessera::shm::testing {
namespace {

constexpr uid_t kNobody = 65534;

void become_nobody() {
  if (::setgroups(0, nullptr) != 0 || ::setresgid(kNobody, kNobody, kNobody) != 0 ||
      ::setresuid(kNobody, kNobody, kNobody) != 0)
    throw Error("setresuid");
}

// ---- strangers ----

/// A connection to the socket whose name rank 0 has left in the directory, or -1.
int visit(const std::string& address) {
  const int visitor = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  // After the name comes the secret of 16 bytes.
  const std::size_t length = address.size() - 16;
  std::memcpy(at.sun_path + 1, address.data(), length);
  if (::connect(visitor, reinterpret_cast<const sockaddr*>(&at),
                static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length)) == 0)
    return visitor;
  ::close(visitor);
  return -1;
}

/// Two ranks meet, and `stranger` visits rank 0 before rank 1 does.
std::vector<RankEnd> meet_beside(const std::function<std::string(const std::string&)>& stranger) {
  return quickest([&] {
    return fork_ranks(3, [&](int rank, const Directory& directory) -> std::string {
      constexpr milliseconds kLimit(10000);
      if (rank == 2) {
        const std::string report = stranger(directory.get("shm/strangers/address", kLimit));
        directory.put("visited", "");
        directory.get("met", kLimit);
        return report;
      }
      if (rank == 1) directory.get("visited", kLimit);
      const auto begin = Clock::now();
      std::string end = outcome([&] {
        Group group = Group::meet(rank, 2, directory, brief("strangers"));
        group.barrier();
      });
      if (rank == 1) directory.put("met", "");
      return rank == 0 || Clock::now() - begin < milliseconds(1000) ? end : "too late: " + end;
    });
  });
}

TEST(Meeting, StrangersWhoSayNothingDoNotDelayIt) {
  for (const bool other_user : {false, true}) {
    if (other_user && ::geteuid() != 0) GTEST_SKIP() << "only root may become another user";
    SCOPED_TRACE(other_user);
    const auto ends = meet_beside([&](const std::string& address) -> std::string {
      if (other_user) become_nobody();
      int in = 0;
      for (int i = 0; i < 40; ++i) in += visit(address) >= 0 ? 1 : 0;
      return in > 0 ? "visited" : "not let in";
    });
    EXPECT_EQ(ends[0].report, "good");
    EXPECT_EQ(ends[1].report, "good");
    EXPECT_EQ(ends[2].report, "visited");
  }
}

TEST(Meeting, StrangersWhoEndAtOnceDoNotHarmIt) {
  const auto ends = meet_beside([&](const std::string& address) -> std::string {
    for (int i = 0; i < 8; ++i) {
      Child child = fork_child([&] {
        visit(address);
        return std::string();
      });
      child.reap(false);
      ::close(child.pipe);
    }
    return "visited";
  });
  EXPECT_EQ(ends[0].report, "good");
  EXPECT_EQ(ends[1].report, "good");
}

// What is offered by somebody who does not know the secret never gets into rank 0's table.
TEST(Meeting, StrangersCannotLeaveDescriptors) {
  const auto ends = meet_beside([&](const std::string& address) -> std::string {
    const int visitor = visit(address);
    int ends_of_pipe[2];
    if (visitor < 0 || ::pipe2(ends_of_pipe, O_CLOEXEC) != 0) return "no visit";
    std::array<std::uint32_t, 2> head{64, 1};
    iovec part{head.data(), sizeof head};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(c), &ends_of_pipe[1], sizeof(int));
    if (::sendmsg(visitor, &message, MSG_NOSIGNAL) < 0) return "not sent";
    ::close(ends_of_pipe[1]);
    // Hangs up when nobody has the other end any more.
    pollfd hang_up{ends_of_pipe[0], POLLIN, 0};
    return ::poll(&hang_up, 1, 8000) == 1 ? "dropped" : "kept";
  });
  EXPECT_EQ(ends[0].report, "good");
  EXPECT_EQ(ends[2].report, "dropped");
}

TEST(Meeting, LateRanksHearWhyRankZeroGaveUp) {
  const auto ends = fork_ranks(2, [&](int rank, const Directory& directory) -> std::string {
    if (rank == 1) directory.get("over", milliseconds(10000));
    std::string end =
        outcome([&] { Group::meet(rank, 2, directory, brief("late", rank == 0 ? 300 : 10000)); });
    if (rank == 0) directory.put("over", "");
    return end;
  });
  for (const auto& end : ends) {
    expect_begins(end.report, "setup absent");
    expect_has(end.report, "rank 1 did not come");
  }
}

// ---- many ranks ----

/// As ranks of an ordinary user, who may open `descriptors` in each.
std::vector<RankEnd> meet_as_nobody(int ranks, rlim_t descriptors) {
  return fork_ranks(
      ranks,
      [&](int rank, const Directory& directory) -> std::string {
        const rlimit limit{descriptors, descriptors};
        ::setrlimit(RLIMIT_NOFILE, &limit);
        become_nobody();
        Options options = brief("many", 60000);
        options.slot_bytes = options.frame_bytes = 64;
        return outcome([&] {
          Group group = Group::meet(rank, ranks, directory, options);
          int sum = 1;
          group.all_reduce(&sum, &sum, 1, Element::int32, {});
          if (sum != ranks) throw Error("wrong sum");
        });
      },
      milliseconds(90000));
}

// Linux lets an ordinary user have as many descriptors on the way as a process may open.
TEST(Meeting, DescriptorsOnTheWayAreLimited) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root may become an ordinary user";
  for (const auto& end : meet_as_nobody(40, 110)) EXPECT_EQ(end.report, "good");
}

TEST(Meeting, AsManyRanksAsALargeHostHasCores) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root may become an ordinary user";
  for (const auto& end : meet_as_nobody(256, 1024)) EXPECT_EQ(end.report, "good");
}

// ---- what fails on one rank ----

TEST(Meeting, WhatFailsFirstIsToldAtOnce) {
  for (const int failing : {0, 1}) {
    SCOPED_TRACE(failing);
    const auto ends = quickest([&] {
      return fork_ranks(3, [&](int rank, const Directory& directory) -> std::string {
        const auto begin = Clock::now();
        Options options = brief("first");
        if (rank == failing) options.arena_bytes = std::size_t{1} << 41;
        std::string end = outcome([&] { Group::meet(rank, 3, directory, options); });
        return Clock::now() - begin < milliseconds(2000) ? end : "too late: " + end;
      });
    });
    for (int r = 0; r < 3; ++r) {
      const std::string& report = ends[static_cast<std::size_t>(r)].report;
      expect_begins(report, r == failing ? "argument" : "setup disagreement");
      expect_has(report, "are at most");
    }
  }
}

/// A control group of this much memory, for this process; its folder, or nothing if there is none.
std::string enter_group_of(std::size_t bytes) {
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const bool old = line.find(":memory:") != std::string::npos;
    if (!old && line.rfind("0::", 0) != 0) continue;
    const std::string folder =
        concat("/sys/fs/cgroup", old ? "/memory" : "", line.substr(line.rfind(':') + 1),
               "/tessera-test-", ::getpid());
    const std::string limit = folder + (old ? "/memory.limit_in_bytes" : "/memory.max");
    if (::mkdir(folder.c_str(), 0755) != 0) continue;
    std::ofstream(limit) << bytes << std::flush;
    std::ofstream(folder + "/cgroup.procs") << ::getpid() << std::flush;
    std::size_t set = 0;
    std::ifstream(limit) >> set;
    std::string own;
    std::ifstream(folder + "/cgroup.procs") >> own;
    if (set == bytes && !own.empty()) return folder;
    ::rmdir(folder.c_str());
  }
  return "";
}

TEST(Meeting, TooLittleMemoryOfOneRankIsAnError) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root may make a control group";
  const auto ends = fork_ranks(2, [&](int rank, const Directory& directory) -> std::string {
    if (rank == 1) {
      const std::string own = enter_group_of(std::size_t{64} << 20);
      directory.put("folder", own);
      if (own.empty()) return "no group";
    } else if (directory.get("folder", milliseconds(10000)).empty()) {
      return "no group";
    }
    Options options = brief("memory");
    options.arena_bytes = std::size_t{100} << 20;
    return directory.get("folder", milliseconds(10000)) + ' ' +
           outcome([&] { Group::meet(rank, 2, directory, options); });
  });
  const std::string& told = ends[0].report;
  if (told == "no group") GTEST_SKIP() << "no control group can be made here";
  ::rmdir(told.substr(0, told.find(' ')).c_str());
  EXPECT_EQ(ends[1].signal, 0);
  for (const auto& end : ends) {
    expect_begins(end.report.substr(end.report.find(' ') + 1), "setup no memory");
    expect_has(end.report, "to this control group");
  }
}

TEST(Meeting, KilledBeforeTheGroupIsMade) {
  const auto ends = fork_ranks(2, [&](int rank, const Directory& directory) -> std::string {
    if (rank == 1) ::kill(::getpid(), SIGKILL);
    return outcome([&] { Group::meet(rank, 2, directory, brief("early", 300)); });
  });
  expect_begins(ends[0].report, "setup absent");
  expect_has(ends[0].report, "rank 1 did not come");
}

// ---- what the system refuses ----

std::vector<RankEnd> meet_after(const std::function<void(int)>& before, const char* name) {
  return fork_ranks(2, [&](int rank, const Directory& directory) -> std::string {
    before(rank);
    return outcome([&] {
      Group group = Group::meet(rank, 2, directory, brief(name));
      double value = rank;
      group.all_reduce(&value, &value, 1, Element::float64, {});
      if (value != 1) throw Error("wrong sum");
      group.barrier();
    });
  });
}

TEST(Meeting, NoMemoryForIt) {
  for (const auto& end : meet_after(
           [](int rank) {
             const rlimit small{65536, 65536};
             if (rank == 0) ::setrlimit(RLIMIT_FSIZE, &small);
           },
           "files")) {
    expect_begins(end.report, "setup no memory");
    expect_has(end.report, "ulimit -f");
  }
  for (const auto& end : meet_after(
           [](int rank) {
             // Room for the heap to grow, and not for the group's memory.
             std::size_t pages = 0;
             std::ifstream("/proc/self/statm") >> pages;
             const rlim_t bytes = pages * 4096 + (1 << 20);
             const rlimit small{bytes, bytes};
             if (rank == 1) ::setrlimit(RLIMIT_AS, &small);
           },
           "space")) {
    expect_begins(end.report, "setup no memory");
    expect_has(end.report, "ulimit -v");
  }
  for (const auto& end : fork_ranks(2, [&](int rank, const Directory& directory) {
         // The second guard: what is tested here must not claim all memory if it fails.
         const rlimit small{1 << 30, 1 << 30};
         ::setrlimit(RLIMIT_FSIZE, &small);
         Options options = brief("large");
         options.arena_bytes = std::size_t{1} << 39;
         return outcome([&] { Group::meet(rank, 2, directory, options); });
       })) {
    expect_begins(end.report, "setup no memory");
    expect_has(end.report, "are available on this host");
  }
}

TEST(Meeting, OptionsDiffer) {
  const auto ends = fork_ranks(2, [&](int rank, const Directory& directory) {
    Options options = brief("options");
    options.arena_bytes = rank == 0 ? 4096 : 8192;
    return outcome([&] { Group::meet(rank, 2, directory, options); });
  });
  for (const auto& end : ends) expect_begins(end.report, "setup disagreement");
}

TEST(Meeting, OtherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root may become another user";
  for (const auto& end : meet_after(
           [](int rank) {
             if (rank == 1) become_nobody();
           },
           "user")) {
    expect_begins(end.report, "setup other user");
    expect_has(end.report, "rank 1 runs as user 65534, rank 0 as user 0");
  }
}

TEST(Meeting, OtherHost) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root may make a network namespace";
  for (const auto& end : meet_after(
           [](int rank) {
             if (rank == 1 && ::unshare(CLONE_NEWNET) != 0) throw Error("unshare");
           },
           "host"))
    expect_begins(end.report, "setup other host");
}

TEST(Meeting, DevShmDoesNotMatter) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root may mount";
  for (const char* how : {"size=1m", "size=1m,ro"}) {
    const auto ends = meet_after(
        [how](int) {
          const bool read_only = std::string(how).find("ro") != std::string::npos;
          if (!own_dev_shm(read_only ? MS_RDONLY : 0)) throw Error("mount");
        },
        "dev");
    for (const auto& end : ends) {
      if (end.report == "uncaught: mount") GTEST_SKIP() << "mounting is forbidden here";
      EXPECT_EQ(end.report, "good") << how;
    }
  }
}

}  // namespace
}  // namespace tessera::shm::testing
