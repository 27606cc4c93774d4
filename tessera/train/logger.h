#pragma once
// Loggers: where numbers go. The trainer calls them on the first rank alone.
//
//   csv          metrics.csv    step,epoch,seconds,name,value - one number a line
//   JSON lines   metrics.jsonl  {"step": 10, "epoch": 0, "seconds": 1.5, "train/loss": 0.7}
//   TensorBoard  events.out.tfevents....   scalars
//
// A run that goes on from a checkpoint appends: what an earlier one has logged of later steps is
// removed (TensorBoard is told to pass it over). flush() writes complete lines; a process that is
// killed leaves at most its last line truncated, which is removed then.

#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace tessera {

class Logger {
 public:
  Logger() = default;
  virtual ~Logger();
  Logger(const Logger&) = delete;
  Logger& operator=(const Logger&) = delete;
  /// Before the first log(): the run begins at this step, 0 or that of a checkpoint. Makes the
  /// folder. Throws FileError.
  virtual void start(std::int64_t step) = 0;
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
