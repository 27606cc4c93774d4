#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <stdexcept>

extern char** environ;

namespace tessera::test {
namespace {

using Clock = std::chrono::steady_clock;

int ms_until(Clock::time_point end) {
  return static_cast<int>(std::max<long long>(
      0, std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count()));
}

bool of_a_launcher(const std::string& variable) {
  for (const char* prefix : {"TESSERA_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_", "JSM_", "RANK=",
                             "WORLD_SIZE=", "LOCAL_RANK=", "MASTER_", "OMP_NUM_THREADS="}) {
    if (variable.rfind(prefix, 0) == 0) return true;
  }
  return false;
}

}  // namespace

Process::Process(const std::vector<std::string>& command,
                 const std::map<std::string, std::string>& variables, bool read_output) {
  std::vector<std::string> environment;
  for (char** v = environ; *v; ++v) {
    if (!of_a_launcher(*v)) environment.emplace_back(*v);
  }
  for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
  std::vector<char*> arguments, values;
  for (const auto& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  for (const auto& word : environment) values.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  values.push_back(nullptr);
  int out[2], err[2], alive[2];
  if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0 || pipe2(alive, O_CLOEXEC) != 0)
    throw std::runtime_error(std::strerror(errno));
  pid_ = fork();
  if (pid_ == 0) {
    dup2(out[1], 1);
    dup2(err[1], 2);
    fcntl(alive[1], F_SETFD, 0);
    execvpe(arguments[0], arguments.data(), values.data());
    _exit(97);
  }
  for (int fd : {out[1], err[1], alive[1]}) close(fd);
  fds_[0] = out[0];
  fds_[1] = err[0];
  alive_ = alive[0];
  if (!read_output) close_output();
}

Process::~Process() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  close_output();
  close(alive_);
}

void Process::signal(int number) const { kill(pid_, number); }

int Process::unread() const {
  int bytes = 0;
  return ioctl(fds_[0], FIONREAD, &bytes) == 0 ? bytes : -1;
}

void Process::close_output() {
  for (int& fd : fds_) {
    if (fd >= 0) close(fd);
    fd = -1;
  }
}

bool Process::read_some(int wait_ms) {
  pollfd fds[2] = {{fds_[0], POLLIN, 0}, {fds_[1], POLLIN, 0}};
  if ((fds_[0] < 0 && fds_[1] < 0) || poll(fds, 2, wait_ms) <= 0) return false;
  for (int i = 0; i < 2; ++i) {
    if (!fds[i].revents) continue;
    char buffer[65536];
    const ssize_t size = read(fds_[i], buffer, sizeof buffer);
    if (size > 0) {
      text_[i].append(buffer, static_cast<std::size_t>(size));
    } else {
      close(fds_[i]);
      fds_[i] = -1;
    }
  }
  return true;
}

bool Process::await(const std::vector<std::string>& texts, std::chrono::seconds limit) {
  const auto end = Clock::now() + limit;
  for (;;) {
    if (std::ranges::all_of(texts, [&](const std::string& t) { return holds(t); })) return true;
    if (!read_some(ms_until(end))) return false;
  }
}

int Process::finish(std::chrono::seconds limit) {
  const auto end = Clock::now() + limit;
  while (fds_[0] >= 0 || fds_[1] >= 0) {
    if (!read_some(ms_until(end))) return -1;
  }
  for (;;) {
    int status = 0;
    const pid_t done = waitpid(pid_, &status, WNOHANG);
    if (done == pid_) {
      pid_ = -1;
      return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    }
    if (ms_until(end) == 0) return -1;
    poll(nullptr, 0, 1);
  }
}

int Process::end_unread(std::chrono::seconds limit) {
  for (const auto end = Clock::now() + limit; ms_until(end) > 0; poll(nullptr, 0, 10)) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) != pid_) continue;
    pid_ = -1;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  return -1;
}

bool Process::all_gone(std::chrono::seconds limit) {
  pollfd fd{alive_, POLLIN, 0};
  char c;
  return poll(&fd, 1, static_cast<int>(limit.count() * 1000)) == 1 && read(alive_, &c, 1) == 0;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

}  // namespace tessera::test
