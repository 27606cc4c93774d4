#pragma once
// RankOutputs: what the ranks of a run write: read from their pipes, copied to log files, put into
// the requested order, and passed on to the launcher's own two streams.

#include <poll.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "tessera/base/internal/descriptor.h"
#include "tessera/base/pinned.h"
#include "tessera/launch/detail/output.h"
#include "tessera/launch/local_run.h"

namespace tessera::detail {

class RankOutputs : Pinned {
 public:
  /// `run` must outlive this object.
  explicit RankOutputs(const LocalRun& run);

  /// Adds the next rank, whose pipes follow by attach(). Opens its log files. Throws Error if that
  /// fails.
  void add_rank();
  /// Takes the reading ends of the pipes of the rank that was added last; they are closed here.
  void attach(int out, int err);
  /// Appends every descriptor that a new process must not inherit.
  void append_descriptors(std::vector<int>& fds) const;

  /// Appends what poll() should wait for.
  void watch(std::vector<pollfd>& fds) const;
  /// Reads what a rank has written. `gone`: the rank and all its descendants have ended, so that no
  /// more than the pipe holds now will come.
  void read(int rank, bool gone);
  /// Passes on the lines whose turn it is, as far as the readers take them. Returns true if they
  /// took any.
  bool pass_on();
  /// True if lines are waiting that could be written without any of the events that watch() names.
  bool ready_to_pass_on() const;
  /// Stops reading from a rank.
  void close_rank(int rank);
  /// Discards everything that waits for a reader, and stops reading.
  void give_up();

  bool drained(int rank) const;
  /// True if everything has been read and passed to the two streams.
  bool all_read() const;
  bool pending() const { return out_.pending() || err_.pending(); }
  /// True if the reader of the standard output has gone.
  bool reader_gone() const { return out_.broken(); }
  /// Number of bytes of both streams that could not be written; failure() is the errno of the last
  /// failure.
  std::uint64_t lost() const;
  int failure() const { return out_.lost() > 0 ? out_.failure() : err_.failure(); }

  /// Writes a line of the launcher's own to the standard error.
  void say(const std::string& text) { sink(1).put("tessera: ", text); }
  /// Writes the last lines of a rank, at most `count` of each stream, as lines of the launcher's
  /// own.
  void say_last_lines(int rank, std::size_t count);
  bool error_is_terminal() const { return err_.is_terminal(); }

  /// Number of last lines that are kept of each stream of a rank.
  static constexpr std::size_t last_lines_kept = 12;

 private:
  struct Stream {
    Descriptor fd, log;
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
  bool full() const;
  Descriptor open_log(int rank, const char* ending) const;
  void write_log(int rank, Stream& s, const char* data, std::size_t size);
  void emit(int rank, int channel, std::vector<LineSplitter::Line> lines);
  bool keep(Rank& rank, int channel, const std::string& text);
  void stop_ordering(const std::string& why);
  void release();

  const LocalRun& run_;
  OutputStream out_;
  OutputStream err_;
  bool shared_sink_ = false;
  // Output::by_rank, while the order can be kept.
  bool ordered_ = false;
  std::deque<Rank> ranks_;
  // The rank whose lines are written at once, if the order is kept.
  int turn_ = 0;
  // Kept lines are waiting for the reader of the output.
  bool spools_stopped_ = false;
};

}  // namespace tessera::detail
