#pragma once
// Output of ranks: bytes are split into lines, and lines are written to the launcher's own streams
// without ever blocking on a slow reader or a full disk.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::detail {

/// Splits a stream of bytes into lines. A line of more than `limit` bytes is split there; the rest
/// follows as lines of its own. With `carriage_returns`, "\r" ends a line as well (a progress bar
/// on a terminal); "\r\n" is one line end.
class LineSplitter {
 public:
  static constexpr std::size_t default_limit = 1 << 20;
  explicit LineSplitter(bool carriage_returns = false, std::size_t limit = default_limit)
      : carriage_returns_(carriage_returns), limit_(limit) {}

  struct Line {
    /// The line without its end.
    std::string text;
    /// '\n', or '\r' for a line that the next one overwrites.
    char end = '\n';
  };

  /// Adds bytes and returns the lines that they complete, in order.
  std::vector<Line> add(std::string_view bytes);
  /// Returns what is left without a line end once the stream has ended: at most one line.
  std::vector<Line> finish();

 private:
  bool carriage_returns_;
  std::size_t limit_;
  std::string partial_;
};

/// One of the launcher's own streams. Text is queued, and written as fast as the reader takes it.
/// Text that cannot be written (a full disk) is counted as lost, which a line reports; later text
/// is tried again.
class OutputStream {
 public:
  /// The caller keeps ownership of `fd`.
  explicit OutputStream(int fd);

  int fd() const { return fd_; }
  bool is_terminal() const { return terminal_; }
  bool same_file(const OutputStream& other) const;
  /// Queues one line of a LineSplitter, after its prefix.
  void put(std::string_view prefix, std::string_view text, char end = '\n');
  /// Writes what can be written without blocking; returns true if anything was written.
  bool flush();
  bool pending() const { return !broken_ && sent_ < queue_.size(); }
  std::size_t backlog() const { return queue_.size() - sent_; }
  /// Memory of the queue, in bytes.
  std::size_t held() const { return queue_.capacity(); }
  /// True if the reader is gone (EPIPE) or the descriptor is closed; text is dropped from then on.
  bool broken() const { return broken_; }
  /// Number of bytes that could not be written.
  std::uint64_t lost() const { return lost_; }
  int failure() const { return failure_; }
  /// Discards what is queued.
  void drop();

 private:
  int fd_;
  bool terminal_;
  // The terminal's current line holds a line that ended with '\r'.
  bool overwrite_ = false;
  bool broken_ = false;
  std::string queue_;
  std::size_t sent_ = 0;
  std::uint64_t lost_ = 0;
  // How many of the lost bytes a line has reported.
  std::uint64_t told_ = 0;
  int failure_ = 0;
  // No write is tried before this time; 0: at once.
  std::int64_t retry_ns_ = 0;
};

/// Lines kept in an unnamed temporary file until it is their rank's turn.
class LineSpool {
 public:
  /// Appends a line. `channel` is any small number, returned with the line. Returns false, with
  /// earlier lines unharmed, if the temporary file cannot be written (errno says why).
  bool put(int channel, std::string_view text);
  struct Item {
    int channel;
    std::string text;
  };
  /// Takes the oldest line; false if none is left.
  bool get(Item* item);
  bool empty() const { return read_at_ == write_at_; }
  /// Size of the file in bytes.
  std::int64_t size() const { return write_at_; }

 private:
  struct Close {
    void operator()(std::FILE* f) const { std::fclose(f); }
  };
  std::unique_ptr<std::FILE, Close> file_;
  long read_at_ = 0;
  long write_at_ = 0;
};

}  // namespace tessera::detail
