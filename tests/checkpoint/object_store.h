#pragma once
// An object store: a process of its own that keeps objects in memory and speaks HTTP over loopback,
// with puts that are refused where there is one already; and its CheckpointIO, which fails, is slow
// or ends its process at a call of its choice.

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/deadline.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/checkpoint_io.h"
#include "tessera/comm/store/detail/socket.h"

namespace tessera::testing {

/// What happens at one call. error: refused. slow: done after three later calls, and never
/// answered. lost: done, and the connection ends without an answer. The process is
/// killed with half of the call sent, or once the store has done it.
enum class Fault : unsigned char { none, error, slow, lost, dies_within, dies_after };

struct HttpMessage {
  std::string first;
  std::map<std::string, std::string> headers;
  std::string body;
};

/// Nothing where the other end is gone or too slow.
inline std::optional<HttpMessage> receive_http(const detail::Socket& socket, Deadline deadline) {
  HttpMessage message;
  std::string got;
  std::size_t head = std::string::npos, bytes = 0;
  while (head == std::string::npos || got.size() < head + 4 + bytes) {
    pollfd ready{socket.fd(), POLLIN, 0};
    char part[65536];
    if (::poll(&ready, 1, poll_milliseconds(deadline)) != 1) return {};
    const ssize_t n = ::recv(socket.fd(), part, sizeof part, 0);
    if (n <= 0) return {};
    got.append(part, static_cast<std::size_t>(n));
    if (head != std::string::npos || (head = got.find("\r\n\r\n")) == std::string::npos) continue;
    for (std::size_t begin = 0, end = 0; begin < head; begin = end + 2) {
      end = got.find("\r\n", begin);
      const std::string line = got.substr(begin, end - begin);
      if (const auto colon = line.find(": "); begin > 0 && colon != std::string::npos)
        message.headers[line.substr(0, colon)] = line.substr(colon + 2);
      else
        message.first = line;
    }
    bytes = std::stoul(message.headers["Content-Length"]);
  }
  message.body = got.substr(head + 4);
  return message;
}

/// The process of the store; ends with this object.
class ObjectStore {
 public:
  ObjectStore() {
    detail::Socket listener = detail::listen_on("127.0.0.1", 0);
    port_ = detail::local_port(listener);
    const int copy = ::dup(listener.fd());
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      serve(copy);
    }
    ::close(copy);
  }
  ~ObjectStore() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  ObjectStore(const ObjectStore&) = delete;
  ObjectStore& operator=(const ObjectStore&) = delete;
  int port() const { return port_; }
  /// It takes connections from then on, and answers nothing.
  void stop() const { ::kill(pid_, SIGSTOP); }

 private:
  using Objects = std::map<std::string, std::string>;

  // Status and body.
  static std::pair<int, std::string> answer(Objects& objects, HttpMessage& asked) {
    const auto space = asked.first.find(' ');
    const std::string method = asked.first.substr(0, space),
                      target = asked.first.substr(space + 2, asked.first.rfind(' ') - space - 2);
    if (method == "LIST") {
      std::set<std::string> names;
      const std::string folder = target.empty() ? "" : target + '/';
      for (const auto& [name, bytes] : objects)
        if (name.starts_with(folder))
          names.insert(name.substr(folder.size(), name.find('/', folder.size()) - folder.size()));
      std::string text;
      for (const std::string& name : names) text += name + '\n';
      return {200, text};
    }
    const auto found = objects.find(target);
    if (method == "PUT") {
      if (asked.headers.contains("If-None-Match") && found != objects.end()) return {412, ""};
      objects[target] = asked.body;
      return {201, ""};
    }
    if (found == objects.end()) return {404, ""};
    if (method == "DELETE") {
      objects.erase(found);
      return {204, ""};
    }
    if (method == "HEAD") return {200, std::to_string(found->second.size())};
    std::size_t first = 0, last = 0;
    if (std::sscanf(asked.headers["Range"].c_str(), "bytes=%zu-%zu", &first, &last) != 2 ||
        last >= found->second.size())
      return {416, ""};
    return {206, found->second.substr(first, last - first + 1)};
  }

  [[noreturn]] static void serve(int listener) {
    Objects objects;
    std::vector<std::pair<int, std::function<void()>>> later;
    for (;;) {
      const int accepted = ::accept(listener, nullptr, nullptr);
      if (accepted < 0) continue;
      const auto socket = std::make_shared<detail::Socket>(accepted);
      auto asked = receive_http(*socket, deadline_after(std::chrono::seconds(5)));
      for (auto& [left, what] : later)
        if (--left == 0) what();
      // Half a put is none.
      if (!asked) continue;
      const std::string fault = asked->headers["Fault"];
      if (fault == "slow") {
        later.emplace_back(3, [&objects, socket, message = std::move(*asked)]() mutable {
          answer(objects, message);
        });
        continue;
      }
      const auto [status, body] =
          fault == "error" ? std::pair(503, std::string()) : answer(objects, *asked);
      if (fault == "lost") continue;
      const std::string text =
          concat("HTTP/1.1 ", status, " .\r\nContent-Length: ", body.size(), "\r\n\r\n", body);
      detail::send_all(*socket, text.data(), text.size(), deadline_after(std::chrono::seconds(5)));
    }
  }

  int port_ = 0;
  pid_t pid_ = 0;
};

/// Checkpoints in an ObjectStore. Each rank has its own.
class HttpIO : public CheckpointIO {
 public:
  explicit HttpIO(int port) : port_(port) {}

  /// Of each call from now on.
  void set_limit(std::chrono::milliseconds limit) { limit_ = limit; }

  /// The n-th call from now on, counted from 0, goes wrong.
  void fail_at(int n, Fault fault) {
    fault_ = fault;
    left_ = n;
  }
  bool failed() const { return left_ < 0 && fault_ != Fault::none; }
  /// Called before a put of this name, once.
  void before_put(std::string end_of_name, std::function<void()> call) {
    end_of_name_ = std::move(end_of_name);
    before_ = std::move(call);
  }

  std::string where(const std::string& name) const override {
    return concat("http://127.0.0.1:", port_, '/', name);
  }
  std::vector<std::string> list(const std::string& folder) override {
    std::vector<std::string> names;
    const std::string text = ask("LIST", folder, {}, {}, {200}).second;
    for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
      end = text.find('\n', begin);
      names.push_back(text.substr(begin, end - begin));
    }
    return names;
  }
  std::optional<std::uint64_t> size(const std::string& name) override {
    const auto [status, text] = ask("HEAD", name, {}, {}, {200, 404});
    return status == 404 ? std::nullopt : std::optional<std::uint64_t>(std::stoull(text));
  }
  std::shared_ptr<const ReadFile> open(const std::string& name) override {
    const auto bytes = size(name);
    if (!bytes) throw FileError("'", where(name), "' is not there");
    return std::make_shared<const ReadFile>(
        where(name), *bytes, [this, name](std::uint64_t offset, void* out, std::size_t n) {
          if (n == 0) return;
          const std::string range = concat("Range: bytes=", offset, '-', offset + n - 1, "\r\n");
          const std::string got = ask("GET", name, range, {}, {206}).second;
          if (got.size() != n) throw FileError("'", where(name), "' is too short");
          std::memcpy(out, got.data(), n);
        });
  }
  std::unique_ptr<CheckpointFile> create(const std::string& name) override {
    return std::make_unique<Upload>(*this, name);
  }
  bool put(const std::string& name, std::string_view bytes, bool if_absent) override {
    return ask("PUT", name, if_absent ? "If-None-Match: *\r\n" : "", std::string(bytes), {201, 412})
               .first == 201;
  }
  bool remove(const std::string& name) override {
    return ask("DELETE", name, {}, {}, {204, 404}).first == 204;
  }

 private:
  class Upload : public CheckpointFile {
   public:
    Upload(HttpIO& io, std::string name) : io_(io), name_(std::move(name)) {}
    void write(const void* data, std::size_t bytes) override {
      bytes_.append(static_cast<const char*>(data), bytes);
    }
    void commit() override { io_.put(name_, bytes_, false); }

   private:
    HttpIO& io_;
    std::string name_, bytes_;
  };

  // Status and body; FileError for any status but those.
  std::pair<int, std::string> ask(const std::string& method, const std::string& name,
                                  const std::string& headers, const std::string& body,
                                  const std::set<int>& good) {
    if (method == "PUT" && before_ && name.ends_with(end_of_name_)) std::exchange(before_, {})();
    const Fault fault = left_-- == 0 ? fault_.load() : Fault::none;
    static constexpr const char* kAsked[] = {"", "error", "slow", "lost"};
    std::string text = concat(method, " /", name, " HTTP/1.1\r\n", headers);
    if (fault != Fault::none && fault <= Fault::lost)
      text += concat("Fault: ", kAsked[static_cast<int>(fault)], "\r\n");
    text += concat("Content-Length: ", body.size(), "\r\n\r\n", body);
    const auto refuse = [&](const std::string& why) {
      throw FileError("'", where(name), "': ", method, ": ", why);
    };
    // Who is never answered need not wait for long.
    const auto limit = fault == Fault::slow ? std::chrono::milliseconds(60) : limit_;
    const std::string late = concat("no answer within ", limit.count(), " ms");
    const Deadline deadline = deadline_after(limit);
    try {
      const detail::Socket socket = detail::connect_to("127.0.0.1", port_, false, deadline);
      const std::size_t sent = fault == Fault::dies_within ? text.size() / 2 : text.size();
      const auto transfer = detail::send_all(socket, text.data(), sent, deadline);
      if (transfer != detail::Transfer::done)
        refuse(transfer == detail::Transfer::late ? late : "the store takes nothing");
      if (fault == Fault::dies_within) ::kill(::getpid(), SIGKILL);
      const auto got = receive_http(socket, deadline);
      if (fault == Fault::dies_after) ::kill(::getpid(), SIGKILL);
      if (!got) refuse(late);
      const int status = std::stoi(got->first.substr(got->first.find(' ')));
      if (!good.contains(status)) refuse(concat("status ", status));
      return {status, got->body};
    } catch (const FileError&) {
      throw;
    } catch (const Error& e) {
      const bool over = time_left(deadline).count() == 0;
      throw FileError("'", where(name), "': ", over ? late : e.what());
    }
  }

  int port_;
  std::chrono::milliseconds limit_ = std::chrono::seconds(20);
  std::atomic<int> left_{-1};
  std::atomic<Fault> fault_{Fault::none};
  std::string end_of_name_;
  std::function<void()> before_;
};

}  // namespace tessera::testing
