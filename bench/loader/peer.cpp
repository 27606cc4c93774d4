#include "peer.h"

#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>

namespace tessera::bench {

Peer::Peer(const std::vector<std::string>& command) {
  int in[2], out[2];
  if (pipe(in) != 0 || pipe(out) != 0) throw std::runtime_error("no pipe");
  std::vector<char*> words;
  for (const auto& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  pid_ = fork();
  if (pid_ == 0) {
    dup2(in[0], 0);
    dup2(out[1], 1);
    for (int fd : {in[0], in[1], out[0], out[1]}) close(fd);
    execvp(words[0], words.data());
    _exit(127);
  }
  close(in[0]);
  close(out[1]);
  to_ = fdopen(in[1], "w");
  from_ = fdopen(out[0], "r");
}

Peer::~Peer() {
  if (to_) std::fclose(to_);  // the child ends with its input
  if (from_) std::fclose(from_);
  if (pid_ > 0) waitpid(pid_, nullptr, 0);
}

std::string Peer::ask(const std::string& line) {
  std::fprintf(to_, "%s\n", line.c_str());
  std::fflush(to_);
  char answer[256];
  if (!std::fgets(answer, sizeof answer, from_))
    throw std::runtime_error("the Python reference has ended");
  return answer;
}

}  // namespace tessera::bench
