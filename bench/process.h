#pragma once
// A process that a benchmark talks with in lines, over pipes: what is compared runs in a process of
// its own and is started once.

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::bench {

class Process {
 public:
  Process(const std::vector<std::string>& command, const std::vector<std::string>& environment) {
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) throw Error("pipe failed");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    const auto pointers = [](const std::vector<std::string>& list) {
      std::vector<char*> result;
      for (const auto& text : list) result.push_back(const_cast<char*>(text.c_str()));
      result.push_back(nullptr);
      return result;
    };
    const int code = posix_spawnp(&pid_, command.front().c_str(), &actions, nullptr,
                                  pointers(command).data(), pointers(environment).data());
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    to_ = fdopen(in[1], "w");
    from_ = fdopen(out[0], "r");
    if (code != 0) throw Error("cannot start ", command.front());
    what_ = command.back();
  }
  ~Process() {
    std::fclose(to_);  // The end of its input: it leaves.
    std::fclose(from_);
    for (int i = 0; i < 100; ++i) {
      if (waitpid(pid_, nullptr, WNOHANG) != 0) return;
      usleep(50000);  // it leaves by itself in a moment; nothing is timed here any more
    }
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void tell(int number) { tell(concat(number)); }
  void tell(const std::string& text) {
    std::fprintf(to_, "%s\n", text.c_str());
    std::fflush(to_);
  }
  std::string line() {
    char text[256];
    if (!std::fgets(text, sizeof text, from_))
      throw Error("a process of ", what_, " ended; see above");
    return text;
  }

 private:
  pid_t pid_ = -1;
  std::FILE *to_ = nullptr, *from_ = nullptr;
  std::string what_;
};

}  // namespace tessera::bench
