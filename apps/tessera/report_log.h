#pragma once
// What a run has logged, from any of the files that runs write.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera::app {

/// One number over the steps of a run.
struct Series {
  std::vector<double> steps, seconds, values;
};

struct SavedStep {
  std::string name;
  double step = 0;
  std::uint64_t bytes = 0;
  /// Its manifest is there: the save was complete.
  bool complete = false;
};

struct RunLog {
  std::string name;
  /// The files that were read.
  std::vector<std::string> files;
  std::map<std::string, Series> series;
  std::vector<SavedStep> checkpoints;
  /// What could not be read, and why; the rest was.
  std::vector<std::string> problems;
};

/// Reads a run: a folder (its *.csv and *.jsonl, and checkpoints in folders below it), or one file.
/// Lines of the CSV logger (step,epoch,seconds,name,value), tables with a column `step`, and lines
/// of JSON are understood; what else there is is passed over, and a last line without its end is
/// left to its writer. Throws FileError if there is no such file or folder.
RunLog read_run(const std::string& path);

}  // namespace tessera::app
