// The rank of the launcher's tests: runs its arguments in order. "@R:word" is for rank R alone.
//
//   print=T error=T part=T   text to standard output, standard error, standard output without a
//                            line end
//   lines=N long=N           N numbered lines; one line of N letters
//   env=NAME                 "NAME=value", or "NAME unset"
//   exit=N kill=N            ends with this code, by this signal
//   ignore=N catch=N         ignores a signal; prints "caught N" on it and exits with code 40
//   note=N                   prints "noted N" on a signal, and goes on
//   pause                    waits until it is killed
//   meet=PATH                rank 0 waits until another rank, and the other way round, meets it at
//                            this named pipe
//   child daemon stopped     leaves a waiting child; a grandchild in a session of its own whose
//                            parent is gone; a child that is stopped
//   descriptors              prints the soft limit of descriptors
//   launch affinity          prints detect_launch() as text; the CPUs that it may run on
//   listen                   listens on TESSERA_PORT with SO_REUSEADDR, as libtorch's store does

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tessera/launch/launch.h"

namespace {

void put(int fd, const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t size = write(fd, text.data() + at, text.size() - at);
    if (size < 0) _exit(99);
    at += static_cast<std::size_t>(size);
  }
}

void say_signal(const char* word, int signal) {
  char text[40];
  const int size = std::snprintf(text, sizeof text, "%s %d\n", word, signal);
  if (write(1, text, static_cast<std::size_t>(size)) != size) _exit(99);
}

void on_catch(int signal) {
  say_signal("caught", signal);
  _exit(40);
}

void on_note(int signal) { say_signal("noted", signal); }

[[noreturn]] void wait_forever() {
  for (;;) pause();
}

// Returns once the grandchild has its own session.
void start_daemon() {
  int ready[2];
  if (pipe(ready) != 0) _exit(99);
  if (fork() == 0) {
    setsid();
    if (fork() != 0) _exit(0);
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    if (write(ready[1], "x", 1) != 1) _exit(99);
    wait_forever();
  }
  char c;
  if (read(ready[0], &c, 1) != 1) _exit(99);
  wait(nullptr);
}

void listen_here() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<unsigned short>(std::atoi(std::getenv("TESSERA_PORT"))));
  inet_pton(AF_INET, std::getenv("TESSERA_ADDRESS"), &address.sin_addr);
  const bool ok =
      bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 && listen(fd, 5) == 0;
  put(1, ok ? "listening\n" : std::string("not listening: ") + std::strerror(errno) + "\n");
}

void run(const std::string& name, const std::string& value) {
  const int number = std::atoi(value.c_str());
  if (name == "print") return put(1, value + "\n");
  if (name == "error") return put(2, value + "\n");
  if (name == "part") return put(1, value);
  if (name == "long") return put(1, std::string(static_cast<std::size_t>(number), 'x') + "\n");
  if (name == "lines") {
    std::string text;
    for (int i = 0; i < number; ++i) {
      text += "line " + std::to_string(i) + "\n";
      if (text.size() < 65536) continue;
      put(1, text);
      text.clear();
    }
    return put(1, text);
  }
  if (name == "env") {
    const char* found = std::getenv(value.c_str());
    return put(1, found ? value + "=" + found + "\n" : value + " unset\n");
  }
  if (name == "exit") _exit(number);
  if (name == "kill") {
    raise(number);
    return;
  }
  if (name == "ignore") {
    signal(number, SIG_IGN);
    return;
  }
  if (name == "catch" || name == "note") {
    struct sigaction action{};
    action.sa_handler = name == "catch" ? on_catch : on_note;
    sigaction(number, &action, nullptr);
    return;
  }
  if (name == "pause") wait_forever();
  if (name == "meet") {
    const int fd =
        open(value.c_str(),
             std::getenv("RANK") && std::atoi(std::getenv("RANK")) == 0 ? O_WRONLY : O_RDONLY);
    if (fd < 0) _exit(99);
    close(fd);
    return;
  }
  if (name == "child") {
    if (fork() == 0) wait_forever();
    return;
  }
  if (name == "daemon") return start_daemon();
  if (name == "stopped") {
    const pid_t child = fork();
    if (child == 0) {
      raise(SIGSTOP);
      wait_forever();
    }
    int status = 0;
    if (waitpid(child, &status, WUNTRACED) != child || !WIFSTOPPED(status)) _exit(99);
    return;
  }
  if (name == "descriptors") {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    return put(1, "descriptors " + std::to_string(limit.rlim_cur) + "\n");
  }
  if (name == "listen") return listen_here();
  if (name == "launch")
    return put(1, tessera::to_text(tessera::detect_launch(tessera::Environment::of_process())));
  if (name == "affinity") {
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    std::string text = "cpus";
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) text += " " + std::to_string(cpu);
    }
    return put(1, text + "\n");
  }
  put(2, "launcher_helper: unknown word " + name + "\n");
  _exit(98);
}

}  // namespace

int main(int argc, char** argv) {
  const char* rank = std::getenv("RANK");
  const std::string mine = std::string("@") + (rank ? rank : "") + ":";
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (word[0] == '@') {
      if (word.rfind(mine, 0) != 0) continue;
      word.erase(0, mine.size());
    }
    const auto equals = word.find('=');
    run(word.substr(0, equals), equals == std::string::npos ? "" : word.substr(equals + 1));
  }
}
