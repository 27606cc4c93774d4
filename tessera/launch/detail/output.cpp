#include "tessera/launch/detail/output.h"

#include <errno.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/launch/detail/supervisor.h"

namespace tessera::detail {

std::vector<LineSplitter::Line> LineSplitter::add(std::string_view bytes) {
  std::vector<Line> lines;
  while (!bytes.empty()) {
    const std::size_t end = bytes.find_first_of(carriage_returns_ ? "\r\n" : "\n");
    const std::size_t room = limit_ - partial_.size();
    if (std::min(end, bytes.size()) > room) {
      partial_.append(bytes.substr(0, room));
      bytes.remove_prefix(room);
      lines.push_back({std::exchange(partial_, {}), '\n'});
      continue;
    }
    if (end == std::string_view::npos) {
      partial_.append(bytes);
      break;
    }
    partial_.append(bytes.substr(0, end));
    const char mark = bytes[end];
    bytes.remove_prefix(end + 1);
    // An empty line is the "\n" of "\r\n", or a progress bar that starts with "\r".
    if (carriage_returns_ && partial_.empty() && mark == '\r') continue;
    lines.push_back({std::exchange(partial_, {}), mark});
  }
  if (!carriage_returns_) {
    for (Line& line : lines)
      if (!line.text.empty() && line.text.back() == '\r') line.text.pop_back();
  }
  return lines;
}

std::vector<LineSplitter::Line> LineSplitter::finish() {
  if (partial_.empty()) return {};
  return {{std::exchange(partial_, {}), '\n'}};
}

OutputStream::OutputStream(int fd) : fd_(fd), terminal_(isatty(fd) == 1) {}

bool OutputStream::same_file(const OutputStream& other) const {
  struct stat a, b;
  return fstat(fd_, &a) == 0 && fstat(other.fd_, &b) == 0 && a.st_dev == b.st_dev &&
         a.st_ino == b.st_ino;
}

void OutputStream::put(std::string_view prefix, std::string_view text, char end) {
  if (broken_) return;
  const std::size_t size = prefix.size() + text.size() + 1;
  if (lost_ > told_) {
    if (monotonic_ns() < retry_ns_) {
      lost_ += size;
      return;
    }
    // On a line of its own: what was written last may end anywhere.
    queue_ += concat("\ntessera: ", lost_ - told_,
                     " bytes of output are missing here: ", std::strerror(failure_), "\n");
    told_ = lost_;
  }
  if (overwrite_) queue_ += "\x1b[2K";  // Erases the bar; the cursor is at its start.
  overwrite_ = end == '\r';
  queue_.append(prefix).append(text).push_back(end);
}

bool OutputStream::flush() {
  // A pipe that polls writable takes this much without blocking.
  constexpr std::size_t safe_size = 4096;
  // What was sent is removed in pieces of this size: a queue that is never empty stays small.
  constexpr std::size_t forget_at = 1 << 20;
  constexpr std::int64_t retry_after_ns = 1'000'000'000;
  bool progress = false;
  while (pending()) {
    pollfd ready{fd_, POLLOUT, 0};
    if (poll(&ready, 1, 0) <= 0) return progress;
    const ssize_t size = write(fd_, queue_.data() + sent_, std::min(safe_size, backlog()));
    if (size < 0 && (errno == EINTR || errno == EAGAIN)) return progress;
    if (size < 0 && (errno == EPIPE || errno == EBADF)) {
      broken_ = true;
      drop();
      return progress;
    }
    if (size <= 0) {
      failure_ = size < 0 ? errno : EIO;
      lost_ += backlog();
      retry_ns_ = monotonic_ns() + retry_after_ns;
      drop();
      return progress;
    }
    progress = true;
    sent_ += static_cast<std::size_t>(size);
    if (sent_ >= forget_at) {
      queue_.erase(0, sent_);
      sent_ = 0;
    }
  }
  drop();
  return progress;
}

void OutputStream::drop() {
  queue_.clear();
  sent_ = 0;
}

bool LineSpool::put(int channel, std::string_view text) {
  if (!file_) file_.reset(std::tmpfile());
  const std::size_t header[2] = {static_cast<std::size_t>(channel), text.size()};
  if (!file_ || std::fseek(file_.get(), write_at_, SEEK_SET) != 0 ||
      std::fwrite(header, sizeof header, 1, file_.get()) != 1 ||
      std::fwrite(text.data(), 1, text.size(), file_.get()) != text.size() ||
      std::fflush(file_.get()) != 0) {
    if (file_) std::clearerr(file_.get());
    return false;
  }
  write_at_ += static_cast<long>(sizeof header + text.size());
  return true;
}

bool LineSpool::get(Item* item) {
  if (read_at_ == write_at_) return false;
  std::size_t header[2];
  if (std::fseek(file_.get(), read_at_, SEEK_SET) != 0 ||
      std::fread(header, sizeof header, 1, file_.get()) != 1) {
    throw Error("cannot read back a rank's output: ", std::strerror(errno));
  }
  item->channel = static_cast<int>(header[0]);
  item->text.resize(header[1]);
  if (std::fread(item->text.data(), 1, header[1], file_.get()) != header[1])
    throw Error("cannot read back a rank's output: ", std::strerror(errno));
  read_at_ += static_cast<long>(sizeof header + header[1]);
  if (empty()) {
    read_at_ = write_at_ = 0;
    if (ftruncate(fileno(file_.get()), 0) != 0) return true;  // At least its space is used again.
  }
  return true;
}

}  // namespace tessera::detail
