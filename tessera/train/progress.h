#pragma once
// Progress: what a run says of itself while it runs. A trainer has one (TrainerOptions::progress);
// a loop of one's own makes one:
//
//   Progress progress({.show = rank == 0});
//   progress.start(0, 1000);
//   for (int step = 0; step < 1000; ++step) {
//     ...
//     progress.step(samples, [&] { return concat("loss ", loss); });
//   }
//   progress.finish();
//
// On a terminal it is a bar, elsewhere a line a minute:
//
//   ━━━━━━━───────────  34%  340/1000  12.3 steps/s  394 samples/s  loss 0.25  53 s left
//   step 340 of 1000 (34%), 12.3 steps/s, 394 samples/s, loss 0.25, 53 s left

#include <chrono>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/pinned.h"

namespace tessera {

struct ProgressOptions {
  /// False: nothing is written. A trainer writes on its first rank alone.
  bool show = true;
  /// Where it is written, and must stay as long as the run; nullptr: standard error.
  std::ostream* out = nullptr;
  /// Columns of the terminal that it is written to; 0: it is none. Absent: terminal_columns(), and
  /// 0 for an `out` that was given.
  std::optional<int> columns = {};
  /// Times between two lines where there is no terminal, and between two states of the bar.
  std::chrono::milliseconds line_interval = std::chrono::minutes(1);
  std::chrono::milliseconds bar_interval = std::chrono::milliseconds(100);
  /// What the weights of steps count: "samples", "tokens".
  std::string unit = "samples";
  /// A monotonic clock; empty: std::chrono::steady_clock.
  std::function<std::chrono::steady_clock::time_point()> clock = {};

  // ---- of a trainer alone ----

  /// The metrics beside the pace, where they were logged.
  std::vector<std::string> metrics = {"train/loss", "val/loss"};
  /// Logs pace, memory and waiting beside the training's metrics (docs/trainer.md has the names).
  bool log = true;
  /// FLOP a second that the device of one rank can do at most, as its maker states it or
  /// measure_peak_flop() finds; 0: not known, and no utilisation is told.
  double peak_flop = 0;
};

/// Columns of the terminal that standard error goes to: what `tessera run` says of it
/// (TESSERA_TERMINAL_COLUMNS), else what the system says; 0: it goes to none.
int terminal_columns();

/// "35 us", "1.2 ms", "2.5 s", "53 s", "1 min 12 s", "2 h 5 min", "3 d 4 h".
std::string duration_text(double seconds);
/// Three digits and a letter for thousands, millions ...: "12.3", "394", "1.23k", "57M".
std::string count_text(double value);

class Progress : Pinned {
 public:
  explicit Progress(ProgressOptions options = {});
  /// Ends the line that the bar is on.
  ~Progress();

  /// A run begins behind step number `step`. `steps`: the number of its last one; below 0: not
  /// known, and neither bar nor time left are shown.
  void start(std::int64_t step, std::int64_t steps);
  /// The number of the last step has become known, or is another one now.
  void expect(std::int64_t steps) { steps_ = steps; }
  /// A step has ended, with `weight` samples (tokens, cells) of all ranks. `note` is called where
  /// the line is written, and gives what else stands on it.
  void step(double weight = 0, const std::function<std::string()>& note = {});
  /// Writes a line of its own, where the bar was.
  void say(const std::string& line);
  /// Shows the last step, and ends the line of the bar.
  void finish(const std::function<std::string()>& note = {});

  /// Since start(), by the clock.
  double seconds() const;

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Mark {
    Time time;
    std::int64_t step = 0;
    double weight = 0;
  };
  Time now() const;
  void show(const std::function<std::string()>& note, Time at, char end);
  std::string text(const std::function<std::string()>& note, Time at) const;
  void write(const std::string& line, char end);

  ProgressOptions options_;
  std::ostream& out_;
  int columns_;
  std::int64_t steps_ = -1;
  /// The beginning; now; and two marks of a while ago, the older of which the pace is taken from.
  Mark start_, now_, recent_, older_;
  Time shown_at_;
  std::int64_t shown_step_ = 0;
  /// Columns of the bar's line that is open; 0: none is.
  std::size_t open_ = 0;
};

}  // namespace tessera
