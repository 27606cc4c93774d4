// Which process is a rank: numbers that come round, rights that are given up, forked children.

#include <gtest/gtest.h>
#include <linux/sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <set>

#include "ranks.h"

namespace tessera::shm::testing {
namespace {

// The number of a process may come round before its data are copied: they are of nobody then.
TEST(Processes, AnotherProcessOfItsNumberIsNotRead) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root may choose a process number";
  constexpr std::size_t kBytes = std::size_t{16} << 20;
  // Where both have the memory that is read.
  const auto map = []() -> void* {
    return ::mmap(reinterpret_cast<void*>(std::uintptr_t{1} << 45), kBytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  };
  for (const bool message : {true, false}) {
    SCOPED_TRACE(message);
    const Files files;
    const Directory directory = files.directory();
    const auto body = [&](int rank) -> std::string {
      Group group = Group::meet(rank, 2, directory, brief("number"));
      if (!group.describe().single_copy) return "copied twice";
      if (rank == 0) {
        directory.get("replaced", milliseconds(10000));
        std::vector<std::byte> data(kBytes);
        return outcome([&] {
          message ? group.receive(data.data(), kBytes, 1) : group.broadcast(data.data(), kBytes, 1);
        });
      }
      void* data = map();
      Request request = message ? group.started().send(data, kBytes, 0)
                                : group.started().broadcast(data, kBytes, 1);
      ::kill(::getpid(), SIGKILL);
      return "";
    };
    Child reader = fork_child([&] { return body(0); }), owner = fork_child([&] { return body(1); });
    owner.reap(false);
    clone_args arguments{};
    arguments.exit_signal = SIGCHLD;
    arguments.set_tid = reinterpret_cast<std::uintptr_t>(&owner.process);
    arguments.set_tid_size = 1;
    const auto other = ::syscall(SYS_clone3, &arguments, sizeof arguments);
    if (other == 0) {
      std::memset(map(), 7, kBytes);
      directory.put("replaced", "");
      for (;;) ::pause();
    }
    const int error = errno;
    if (other < 0) directory.put("replaced", "");
    reader.reap(false);
    reader.drain();
    if (other > 0) {
      ::kill(owner.process, SIGKILL);
      ::waitpid(owner.process, nullptr, 0);
    }
    if (other < 0) GTEST_SKIP() << "no process number can be chosen here: " << std::strerror(error);
    if (reader.end.report == "copied twice") GTEST_SKIP() << "process_vm_readv is forbidden here";
    expect_begins(reader.end.report, "lost [1]");
  }
}

TEST(Processes, ARankThatForbidsItsMemoryIsNamed) {
  if (::geteuid() != 0) GTEST_SKIP() << "root may read all memory; only root may become another";
  const auto ends = fork_ranks(2, [&](int rank, const Directory& directory) -> std::string {
    if (::setresuid(65534, 65534, 65534) != 0) return "no other user";
    ::prctl(PR_SET_DUMPABLE, 1);
    Group group = Group::meet(rank, 2, directory, brief("forbidden"));
    if (!group.describe().single_copy) return "copied twice";
    if (rank == 1) ::prctl(PR_SET_DUMPABLE, 0);
    group.barrier();
    std::vector<std::byte> data(std::size_t{1} << 20);
    return outcome([&] {
      rank == 1 ? group.send(data.data(), data.size(), 0)
                : group.receive(data.data(), data.size(), 1);
    });
  });
  if (ends[0].report == "copied twice") GTEST_SKIP() << "process_vm_readv is forbidden here";
  expect_begins(ends[0].report, "lost [1]");
  expect_has(ends[0].report, "do so before the group is made");
}

TEST(Processes, DeadThoughItsChildHoldsAll) {
  const auto body = [&](int rank, const Directory& directory) -> std::string {
    Group group = Group::meet(rank, 2, directory, brief("child"));
    group.barrier();
    const auto begin = Clock::now();
    if (rank == 1) {
      if (::fork() == 0) {
        // Outlives its parent, with the memory and all descriptors.
        ::alarm(3);
        std::this_thread::sleep_for(milliseconds(1500));
        std::_Exit(0);
      }
      ::kill(::getpid(), SIGKILL);
    }
    const std::string end = outcome([&] { group.barrier(); });
    return Clock::now() - begin < milliseconds(1000) ? end : "too late: " + end;
  };
  const auto ends = quickest([&] { return fork_ranks(2, body); });
  expect_begins(ends[0].report, "lost [1]");
  expect_has(ends[0].report, "died");
}

TEST(Processes, AForkedChildIsNoRank) {
  const auto ends = fork_ranks(2, [&](int rank, const Directory& directory) -> std::string {
    auto group = std::make_unique<Group>(Group::meet(rank, 2, directory, brief("forked")));
    Child child = fork_child([&] {
      std::string end = outcome([&] { group->barrier(); });
      group.reset();  // Nor does it leave for its parent.
      return end;
    });
    while (!child.reaped) {
      child.drain();
      child.reap(true);
    }
    child.drain();
    const std::string own = outcome([&] { group->barrier(); });
    // Nobody leaves before all have looked.
    group->barrier();
    return own + " | " + child.end.report;
  });
  for (const auto& end : ends) {
    expect_begins(end.report, "good | lost");
    expect_has(end.report, "was forked from rank");
  }
}

TEST(Processes, AForkedChildCannotEndItsParentsGroup) {
  for (int kind = 0; kind < 3; ++kind) {
    SCOPED_TRACE(kind);
    const auto ends = fork_ranks(2, [&](int rank, const Directory& directory) -> std::string {
      auto group = std::make_unique<Group>(Group::meet(rank, 2, directory, brief("forked")));
      std::optional<Request> request;
      if (rank == 1) {
        request = group->started().barrier();
        Child child = fork_child([&] {
          if (kind == 0) group->abort("child");
          if (kind == 1) group->interrupt("child");
          request.reset();
          group.reset();
          return std::string();
        });
        child.reap(false);
        ::close(child.pipe);
        directory.put("forked", "");
      }
      directory.get("forked", milliseconds(15000));
      const std::string end = outcome([&] {
        if (request)
          request->wait();
        else
          group->barrier();
        int value = 1;
        group->all_reduce(&value, &value, 1, Element::int32, {});
      });
      outcome([&] { group->barrier(); });
      return end;
    });
    for (const auto& end : ends) EXPECT_EQ(end.report, "good");
  }
}

TEST(Processes, NothingIsLeft) {
  // Other programs, other tests among them, make and remove files in /dev/shm: it is an own one
  // where this process may mount it, and elsewhere only names that could be ours are compared.
  Child child = fork_child([] {
    const bool own = own_dev_shm(0);
    const auto listing = [own] {
      std::set<std::string> names;
      std::error_code none;
      for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", none)) {
        const std::string name = entry.path().filename().string();
        const bool ours = name.find("tessera") != std::string::npos;
        if (own || (ours && !name.starts_with("tessera_test_"))) names.insert(name);
      }
      return names;
    };
    const auto before = listing();
    const auto ends = fork_ranks(3, [&](int rank, const Directory& directory) -> std::string {
      Group group = Group::meet(rank, 3, directory, brief("left over"));
      group.barrier();
      ::kill(::getpid(), SIGKILL);
      return "";
    });
    std::string report;
    for (const auto& end : ends) report += concat("signal ", end.signal, "; ");
    for (const auto& name : listing())
      if (!before.contains(name)) report += name + " is left; ";
    return report;
  });
  while (!child.reaped) {
    child.drain();
    child.reap(true);
    std::this_thread::sleep_for(milliseconds(1));
  }
  child.drain();
  ::close(child.pipe);
  EXPECT_EQ(child.end.report, "signal 9; signal 9; signal 9; ");
}

}  // namespace
}  // namespace tessera::shm::testing
