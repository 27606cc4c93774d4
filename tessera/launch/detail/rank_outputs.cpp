#include "tessera/launch/detail/rank_outputs.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::detail {
namespace {

// With a longer queue the ranks wait for the launcher's reader.
constexpr std::size_t max_backlog = 1 << 20;
constexpr std::size_t last_line_width = 400;

}  // namespace

RankOutputs::RankOutputs(const LocalRun& run)
    : run_(run),
      out_(run.out),
      err_(run.err),
      shared_sink_(out_.same_file(err_)),
      ordered_(run.output == LocalRun::Output::by_rank) {
  if (run.log_folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(run.log_folder, error);
  if (error) throw Error("cannot make the log folder '", run.log_folder, "': ", error.message());
}

void RankOutputs::add_rank() {
  const int r = static_cast<int>(ranks_.size());
  Rank& rank = ranks_.emplace_back();
  if (!run_.log_folder.empty()) {
    rank.streams[0].log = open_log(r, ".out");
    rank.streams[1].log = open_log(r, ".err");
  }
  const std::size_t width = std::to_string(run_.ranks - 1).size();
  const std::string number = std::to_string(r);
  rank.prefix = concat("[", std::string(width - number.size(), ' '), number, "] ");
  for (int channel = 0; channel < 2; ++channel)
    rank.streams[channel].splitter = LineSplitter(sink(channel).is_terminal());
}

void RankOutputs::attach(int out, int err) {
  ranks_.back().streams[0].fd = Descriptor(out);
  ranks_.back().streams[1].fd = Descriptor(err);
}

Descriptor RankOutputs::open_log(int rank, const char* ending) const {
  const std::string path = concat(run_.log_folder, "/rank-", rank, ending);
  // Non-blocking: a named pipe of that name without a reader would block the launcher.
  Descriptor log(
      open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0666));
  if (!log) throw Error("cannot write the log file '", path, "': ", std::strerror(errno));
  return log;
}

void RankOutputs::append_descriptors(std::vector<int>& fds) const {
  for (const Rank& rank : ranks_) {
    for (const Stream& s : rank.streams) {
      if (s.fd) fds.push_back(s.fd.get());
      if (s.log) fds.push_back(s.log.get());
    }
  }
}

bool RankOutputs::full() const {
  return out_.backlog() >= max_backlog || err_.backlog() >= max_backlog;
}

void RankOutputs::watch(std::vector<pollfd>& fds) const {
  const bool reading = !full();
  for (const Rank& rank : ranks_) {
    // If the order was given up, a rank's kept lines come before its next ones.
    if (!ordered_ && !rank.spool.empty()) continue;
    for (const Stream& s : rank.streams)
      if (s.fd && reading) fds.push_back({s.fd.get(), POLLIN, 0});
  }
  for (const OutputStream* s : {&out_, &err_})
    if (s->pending()) fds.push_back({s->fd(), POLLOUT, 0});
}

void RankOutputs::read(int r, bool gone) {
  Rank& rank = ranks_[r];
  for (int channel = 0; channel < 2; ++channel) {
    Stream& s = rank.streams[channel];
    if (!s.fd || sink(channel).backlog() >= max_backlog) continue;
    if (!ordered_ && !rank.spool.empty()) continue;
    char buffer[65536];
    const ssize_t size = ::read(s.fd.get(), buffer, sizeof buffer);
    if (size > 0) {
      if (s.log) write_log(r, s, buffer, static_cast<std::size_t>(size));
      emit(r, channel, s.splitter.add({buffer, static_cast<std::size_t>(size)}));
    } else if (size == 0 || (errno != EAGAIN && errno != EINTR) || gone) {
      // A process that still holds the pipe after the rank and its descendants are gone does not
      // belong to the run.
      emit(r, channel, s.splitter.finish());
      s.fd = Descriptor();
    }
  }
}

void RankOutputs::write_log(int rank, Stream& s, const char* data, std::size_t size) {
  while (size > 0) {
    const ssize_t written = write(s.log.get(), data, size);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      say(concat("cannot write the log of rank ", rank, " any more: ", std::strerror(errno)));
      s.log = Descriptor();
      return;
    }
    data += written;
    size -= static_cast<std::size_t>(written);
  }
}

void RankOutputs::emit(int r, int channel, std::vector<LineSplitter::Line> lines) {
  Rank& rank = ranks_[r];
  for (LineSplitter::Line& line : lines) {
    const bool waits = !rank.spool.empty() || (ordered_ && r > turn_);
    if (!waits || (line.end == '\n' && !keep(rank, channel, line.text)))
      sink(channel).put(rank.prefix, line.text, line.end);
    if (line.end != '\n' || line.text.empty()) continue;
    auto& last = rank.streams[channel].last;
    last.push_back(line.text.size() > last_line_width
                       ? line.text.substr(0, last_line_width) + " ..."
                       : std::move(line.text));
    if (last.size() > last_lines_kept) last.pop_front();
  }
}

// Keeps a line for later; false if it must be written at once.
bool RankOutputs::keep(Rank& rank, int channel, const std::string& text) {
  if (rank.spool.put(channel, text)) {
    std::int64_t kept = 0;
    for (const Rank& each : ranks_) kept += each.spool.size();
    if (ordered_ && kept > run_.keep_bytes)
      stop_ordering(concat("more than ", run_.keep_bytes, " bytes wait for their rank's turn"));
    return true;
  }
  stop_ordering(
      concat("a rank's lines cannot be kept in a temporary file: ", std::strerror(errno)));
  // Its older lines go first.
  LineSpool::Item item;
  while (rank.spool.get(&item)) sink(item.channel).put(rank.prefix, item.text);
  return false;
}

// Ranks that wait for the output's order would wait for each other: the order is given up instead.
void RankOutputs::stop_ordering(const std::string& why) {
  if (!ordered_) return;
  ordered_ = false;
  say(concat("the output is no longer in the order of ranks: ", why));
}

void RankOutputs::release() {
  LineSpool::Item item;
  for (int r = ordered_ ? turn_ : 0; r < static_cast<int>(ranks_.size()); ++r) {
    Rank& rank = ranks_[r];
    while (!full() && rank.spool.get(&item)) sink(item.channel).put(rank.prefix, item.text);
    if (!ordered_) continue;
    turn_ = r;
    if (full() || !drained(r)) break;
  }
  spools_stopped_ = full();
}

bool RankOutputs::pass_on() {
  if (run_.output == LocalRun::Output::by_rank && !ranks_.empty()) release();
  const bool out = out_.flush(), err = err_.flush();
  return out || err;
}

bool RankOutputs::ready_to_pass_on() const { return spools_stopped_ && !pending(); }

void RankOutputs::close_rank(int rank) {
  for (Stream& s : ranks_[rank].streams) s.fd = Descriptor();
}

void RankOutputs::give_up() {
  for (Rank& rank : ranks_) {
    for (Stream& s : rank.streams) s.fd = Descriptor();
    rank.spool = LineSpool();
  }
  out_.drop();
  err_.drop();
}

bool RankOutputs::drained(int rank) const {
  const Rank& r = ranks_[rank];
  return !r.streams[0].fd && !r.streams[1].fd;
}

bool RankOutputs::all_read() const {
  for (std::size_t r = 0; r < ranks_.size(); ++r)
    if (!drained(static_cast<int>(r)) || !ranks_[r].spool.empty()) return false;
  return true;
}

std::uint64_t RankOutputs::lost() const { return out_.lost() + err_.lost(); }

void RankOutputs::say_last_lines(int rank, std::size_t count) {
  for (int channel : {1, 0}) {
    const auto& lines = ranks_[rank].streams[channel].last;
    if (lines.empty()) continue;
    say(concat("last lines of rank ", rank, " on its standard ", channel ? "error:" : "output:"));
    for (std::size_t i = lines.size() > count ? lines.size() - count : 0; i < lines.size(); ++i)
      sink(1).put("  | ", lines[i]);
  }
}

}  // namespace tessera::detail
