#pragma once
// What the ranks of a run write: read from their pipes, kept in log files, brought into the order
// that was asked for, and passed on to the launcher's own two streams.

#include <poll.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "tessera/launch/detail/output.h"
#include "tessera/launch/local_run.h"

namespace tessera::detail {

class RankOutputs {
 public:
  /// `run` must outlive this object.
  explicit RankOutputs(const LocalRun& run);
  ~RankOutputs();
  RankOutputs(const RankOutputs&) = delete;
  RankOutputs& operator=(const RankOutputs&) = delete;

  /// The next rank, whose pipes follow by attach(). Opens its log files; throws Error where that
  /// cannot be done.
  void add_rank();
  /// Of the rank that was added last: the reading ends of its pipes, which are closed here.
  void attach(int out, int err);
  /// Every descriptor that a new process must not keep.
  void append_descriptors(std::vector<int>& fds) const;

  /// What poll() should wait for.
  void watch(std::vector<pollfd>& fds) const;
  /// Reads what a rank has written. `gone`: it and all its descendants have ended, so that nothing
  /// more will come than the pipe holds now.
  void read(int rank, bool gone);
  /// Passes on what has its turn, as far as the readers take it. True where they took something.
  bool pass_on();
  /// Lines wait that could go out without any of the events that watch() names.
  bool ready_to_pass_on() const;
  /// Reads nothing more of a rank.
  void close_rank(int rank);
  /// Forgets everything that waits for a reader, and reads nothing more.
  void give_up();

  bool drained(int rank) const;
  /// Everything has been read and is with the two streams.
  bool all_read() const;
  bool pending() const { return out_.pending() || err_.pending(); }
  /// The reader of the standard output has gone.
  bool reader_gone() const { return out_.broken(); }
  /// Bytes of both streams that could not be written, and why.
  std::uint64_t lost() const;
  int failure() const { return out_.lost() > 0 ? out_.failure() : err_.failure(); }

  /// A line of the launcher's own, on the standard error.
  void say(const std::string& text) { sink(1).put("tessera: ", text); }
  /// The last lines of a rank, at most `count` of each stream, as lines of the launcher's own.
  void say_last_lines(int rank, std::size_t count);
  bool error_is_terminal() const { return err_.is_terminal(); }

  /// So many last lines of a rank's stream are kept.
  static constexpr std::size_t last_lines_kept = 12;

 private:
  struct Stream {
    int fd = -1;
    int log = -1;
    LineSplitter splitter;
    std::deque<std::string> last;
  };
  struct Rank {
    // Output, error.
    Stream streams[2];
    std::string prefix;
    LineSpool spool;
  };

  OutputStream& sink(int channel) { return channel == 1 && !shared_sink_ ? err_ : out_; }
  const OutputStream& sink(int channel) const {
    return channel == 1 && !shared_sink_ ? err_ : out_;
  }
  bool full() const;
  int open_log(int rank, const char* ending) const;
  void write_log(int rank, Stream& s, const char* data, std::size_t size);
  void emit(int rank, int channel, std::vector<LineSplitter::Line> lines);
  bool keep(Rank& rank, int channel, const std::string& text);
  void stop_ordering(const std::string& why);
  void release();
  static void close_stream(Stream& s);

  const LocalRun& run_;
  OutputStream out_;
  OutputStream err_;
  bool shared_sink_ = false;
  // Output::by_rank, as long as the order can be kept.
  bool ordered_ = false;
  std::deque<Rank> ranks_;
  // The rank whose lines go out at once, where the order is kept.
  int turn_ = 0;
  // Kept lines wait for the reader of the output.
  bool spools_stopped_ = false;
};

}  // namespace tessera::detail
