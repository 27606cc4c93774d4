#pragma once
// A program under test: started with arguments and variables, its output read, its end and the end
// of all it started awaited within a limit.

#include <sys/types.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace tessera::test {

class Process {
 public:
  /// Starts the program (PATH is searched). It and all its descendants inherit a pipe end that
  /// tells when the last of them is gone. `variables` go on top of this process' environment, less
  /// those of launchers.
  explicit Process(const std::vector<std::string>& command,
                   const std::map<std::string, std::string>& variables = {},
                   bool read_output = true);
  /// Kills it if it still runs.
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  /// Reads until every one of `texts` has been in the output (either stream). False after the limit
  /// or at the end of the output.
  bool await(const std::vector<std::string>& texts,
             std::chrono::seconds limit = std::chrono::seconds(30));
  /// Waits for the end of the program and of its output; the exit status as a shell has it (128 +
  /// signal). -1 after the limit.
  int finish(std::chrono::seconds limit = std::chrono::seconds(60));
  /// The same, but nothing of its output is read meanwhile, as by a reader that stands still.
  int end_unread(std::chrono::seconds limit = std::chrono::seconds(60));
  /// Whether the last process that descends from it has ended within the limit.
  bool all_gone(std::chrono::seconds limit = std::chrono::seconds(30));
  /// Bytes of its standard output that wait to be read.
  int unread() const;
  /// Its writes fail from now on.
  void close_output();

  const std::string& out() const { return text_[0]; }
  const std::string& err() const { return text_[1]; }
  bool holds(const std::string& text) const {
    return text_[0].find(text) != std::string::npos || text_[1].find(text) != std::string::npos;
  }

 private:
  bool read_some(int wait_ms);

  pid_t pid_ = -1;
  int fds_[2] = {-1, -1};
  int alive_ = -1;
  std::string text_[2];
};

std::vector<std::string> lines_of(const std::string& text);

}  // namespace tessera::test
