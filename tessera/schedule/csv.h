#pragma once
// Schedules as CSV: a header of three lines, then a line of actions for each rank.
//
//   schedule,1,1F1B            the format's version, and the name
//   micro_batches,2
//   placement,0,1              the rank of each stage
//   0F0,0F1,0B0,0B1
//   1F0,1B0,1F1,1B1
//
// The reader is strict: it takes what the writer makes (line ends may be CR LF) and names line,
// column and what was expected for all else. It reads; whether the schedule is right is what
// validate() says.

#include <string>
#include <string_view>

#include "tessera/schedule/schedule.h"

namespace tessera {

/// Limits of what is read, for text that comes from others.
struct CsvLimits {
  std::size_t bytes = std::size_t{64} << 20;
  std::size_t actions = std::size_t{1} << 24;
};

/// Throws InvalidArgument where the name has a comma, a quote or a control character.
std::string to_csv(const PipelineSchedule& schedule);
/// Throws ScheduleSyntaxError, and InvalidArgument for a placement that ranks_of() refuses.
PipelineSchedule schedule_from_csv(std::string_view text, const CsvLimits& limits = {});
/// A table without the header, as other programs write it: a line of actions for each rank, where
/// empty cells are bubbles. Throws as schedule_from_csv().
PipelineSchedule schedule_from_table(std::string_view text, std::vector<int> placement,
                                     int micro_batches, const CsvLimits& limits = {});

}  // namespace tessera
