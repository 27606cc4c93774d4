#pragma once
// What one run leaves for the report: a small text file, one a number of ranks.

#include <cstdint>
#include <string>
#include <vector>

namespace relief {

struct Record {
  /// Of each rank.
  std::vector<std::int64_t> rows;
  /// By each rank.
  std::vector<std::int64_t> values_read;
  /// Peaks.
  std::vector<std::int64_t> tensor_bytes;
  /// Peaks.
  std::vector<std::int64_t> resident_bytes;
  /// m^2, one a step.
  std::vector<double> losses;
  /// RMS errors, m.
  double interpolation = 0, network = 0;
  double seconds_a_step = 0;
  int ranks() const { return static_cast<int>(rows.size()); }
};

/// Writes FOLDER/ranks-N.txt. Throws tessera::FileError.
void write_record(const Record& record, const std::string& folder);
/// All records of a folder, fewest ranks first. Throws tessera::FileError for a file that is none.
std::vector<Record> read_records(const std::string& folder);

/// How far the losses of a run are from those of another, relative, at the step where they differ
/// most; -1 if they differ in number.
double distance(const Record& a, const Record& b);

}  // namespace relief
