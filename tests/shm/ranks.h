#pragma once
// Ranks for tests of shared memory: processes that are forked, or threads. The parent of forked
// ranks only reads and waits, and kills what has not ended within the limit.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/shm/group.h"

namespace tessera::shm::testing {

using std::chrono::milliseconds;

/// A directory of files: what a key-value store does, for processes of one machine.
class Files {
 public:
  Files() {
    std::string name = (std::filesystem::temp_directory_path() / "tessera-shm-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    // Ranks of another user write here too.
    ::chmod(name.c_str(), 0777);
    path_ = name;
  }
  ~Files() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;

  Directory directory() const {
    const auto at = [path = path_](std::string key) {
      for (char& c : key)
        if (c == '/') c = '.';
      return path + "/" + key;
    };
    Directory directory;
    directory.put = [at](const std::string& key, const std::string& bytes) {
      const std::string file = at(key), draft = file + ".draft";
      std::ofstream(draft, std::ios::binary) << bytes;
      std::filesystem::rename(draft, file);
    };
    directory.get = [at](const std::string& key, milliseconds limit) {
      const Deadline deadline = deadline_after(limit);
      while (!std::filesystem::exists(at(key))) {
        if (time_left(deadline).count() == 0) throw Error("no " + key);
        std::this_thread::sleep_for(milliseconds(1));
      }
      std::ostringstream text;
      text << std::ifstream(at(key), std::ios::binary).rdbuf();
      return text.str();
    };
    return directory;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline Options brief(const char* name, int timeout_ms = 15000) {
  Options options;
  options.name = name;
  options.timeout = milliseconds(timeout_ms);
  return options;
}

struct RankEnd {
  /// By itself, within the limit.
  bool ended = false;
  /// -1: ended by a signal.
  int exit_code = -1;
  int signal = 0;
  /// What the body returned, or "uncaught: ...".
  std::string report;
};

/// A forked process that runs `body`; its text comes back through the pipe.
struct Child {
  pid_t process = 0;
  int pipe = -1;
  bool reaped = false;
  RankEnd end;

  void drain() {
    char text[4096];
    for (ssize_t n; (n = ::read(pipe, text, sizeof text)) > 0;)
      end.report.append(text, static_cast<std::size_t>(n));
  }
  void reap(bool by_itself) {
    int status = 0;
    if (reaped || ::waitpid(process, &status, by_itself ? WNOHANG : 0) != process) return;
    reaped = true;
    end.ended = by_itself;
    if (WIFEXITED(status)) end.exit_code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  }
};

inline Child fork_child(const std::function<std::string()>& body) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
  std::fflush(nullptr);
  Child child;
  child.process = ::fork();
  if (child.process == 0) {
    ::close(ends[0]);
    std::string report;
    int code = 0;
    try {
      report = body();
    } catch (const std::exception& error) {
      report = std::string("uncaught: ") + error.what();
      code = 9;
    }
    [[maybe_unused]] const auto written = ::write(ends[1], report.data(), report.size());
    std::_Exit(code);
  }
  ::close(ends[1]);
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  child.pipe = ends[0];
  return child;
}

/// Runs `body(rank, directory)` in `size` processes, at most for `limit`. `endless`: a rank that
/// does not end by itself, and is killed when the others have ended.
inline std::vector<RankEnd> fork_ranks(
    int size, const std::function<std::string(int, const Directory&)>& body,
    milliseconds limit = milliseconds(20000), int endless = -1) {
  const Files files;
  const Directory directory = files.directory();
  std::vector<Child> children;
  for (int rank = 0; rank < size; ++rank)
    children.push_back(fork_child([&] { return body(rank, directory); }));
  const Deadline deadline = deadline_after(limit);
  for (bool pending = true; pending && !time_left(deadline).count() == 0;) {
    pending = false;
    for (int rank = 0; rank < size; ++rank) {
      Child& child = children[static_cast<std::size_t>(rank)];
      child.drain();
      child.reap(true);
      pending = pending || (!child.reaped && rank != endless);
    }
    if (pending) std::this_thread::sleep_for(milliseconds(1));
  }
  std::vector<RankEnd> ends;
  for (auto& child : children) {
    if (!child.reaped) {
      ::kill(child.process, SIGKILL);
      child.reap(false);
    }
    child.drain();
    ::close(child.pipe);
    ends.push_back(child.end);
  }
  return ends;
}

/// The same with threads; what a rank throws becomes its report.
inline std::vector<RankEnd> thread_ranks(int size, const Options& options,
                                         const std::function<std::string(Group&)>& body) {
  std::vector<RankEnd> ends(static_cast<std::size_t>(size));
  std::vector<Group> groups = Group::threads(size, options);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      RankEnd& end = ends[static_cast<std::size_t>(rank)];
      end.ended = true;
      end.exit_code = 0;
      try {
        end.report = body(groups[static_cast<std::size_t>(rank)]);
      } catch (const std::exception& error) {
        end.report = std::string("uncaught: ") + error.what();
        end.exit_code = 9;
      }
    });
  for (auto& thread : threads) thread.join();
  return ends;
}

using Clock = std::chrono::steady_clock;

/// "lost [1]: ..." and the like: how `call` ended.
inline std::string outcome(const std::function<void()>& call) {
  try {
    call();
  } catch (const PeerLostError& error) {
    return concat("lost ", list(error.ranks()), ": ", error.what());
  } catch (const TimeoutError& error) {
    return concat("late ", list(error.missing()), ": ", error.what());
  } catch (const MismatchError& error) {
    return concat("mismatch: ", error.what());
  } catch (const SetupError& error) {
    return concat("setup ", to_string(error.cause()), ": ", error.what());
  } catch (const InvalidArgument& error) {
    return concat("argument: ", error.what());
  }
  return "good";
}

inline void expect_begins(const std::string& text, const std::string& beginning) {
  EXPECT_EQ(text.substr(0, beginning.size()), beginning) << text;
}
inline void expect_has(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

/// The bounds of time are the library's. A machine that is busy with other programs may exceed one
/// by itself, and not three times one after the other: what is judged is the first run of three in
/// which no rank says that it took too long, or the last.
template <class Run>
std::vector<RankEnd> quickest(const Run& run) {
  for (int attempt = 1;; ++attempt) {
    const std::vector<RankEnd> ends = run();
    const bool slow = std::ranges::any_of(
        ends, [](const RankEnd& end) { return end.report.starts_with("too late: "); });
    if (!slow || attempt == 3) return ends;
  }
}

/// Gives this process, and those that it forks, a /dev/shm of 1 MiB that no other process sees.
inline bool own_dev_shm(unsigned long flags) {
  return ::unshare(CLONE_NEWNS) == 0 &&
         ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("tmpfs", "/dev/shm", "tmpfs", flags, "size=1m") == 0;
}

}  // namespace tessera::shm::testing
