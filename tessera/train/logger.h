#pragma once
// Loggers: where numbers go. The trainer calls them on the first rank alone.
//
//   csv          metrics.csv    step,epoch,seconds,name,value - one number a line
//   JSON lines   metrics.jsonl  {"step": 10, "epoch": 0, "seconds": 1.5, "train/loss": 0.7}
//   TensorBoard  events.out.tfevents....   scalars
//
// A run that goes on from a checkpoint appends: what an earlier one has logged of later steps is
// removed (TensorBoard is told to pass it over). A run that begins anew moves a log of an earlier
// one aside, to metrics.csv.1 or the first number that is free. What only evaluates appends.
// Nothing is replaced under a job that is writing: its lines stay in the file that it has open.
//
// flush() writes complete lines, as 64 KiB of them do and the end of a run: a process that is
// killed loses what it has not written, and leaves at most its last line truncated, which is
// removed when the run goes on.

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "tessera/base/pinned.h"

namespace tessera {

class Logger : Pinned {
 public:
  virtual ~Logger();
  /// A training that begins at this step, 0 or a checkpoint's, calls it before its first log().
  /// Makes the folder. Throws FileError.
  virtual void start(std::int64_t step) = 0;
  /// The same for a run that evaluates after this step: what is in the log stays. The default calls
  /// start().
  virtual void append(std::int64_t step) { start(step); }
  virtual void log(const std::map<std::string, double>& values, std::int64_t step,
                   std::int64_t epoch) = 0;
  /// Throws FileError if something could not be written.
  virtual void flush() = 0;
};

/// `file`: its path.
std::shared_ptr<Logger> csv_logger(const std::string& file);
/// Numbers that JSON does not have (NaN, infinities) are null.
std::shared_ptr<Logger> json_logger(const std::string& file);
/// A new event file in `folder` for each start().
std::shared_ptr<Logger> tensorboard_logger(const std::string& folder);

}  // namespace tessera
