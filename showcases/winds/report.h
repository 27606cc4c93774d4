#pragma once
// The report: one HTML file that needs nothing beside it.

#include <string>
#include <utility>
#include <vector>

#include "skill.h"

namespace winds {

struct Report {
  /// What ran, where, how long.
  std::vector<std::pair<std::string, std::string>> facts = {};
  /// (m/s)^2, one a step.
  std::vector<double> losses;
  std::int64_t steps_per_epoch = 1;
  Months test;
  /// The network's is the last, the damped anomaly with one coefficient per point before it.
  std::vector<Skill> skills;
  /// [months, 2, lat, lon], m/s.
  at::Tensor forecast, truth;
  /// Of the training, by rank.
  std::vector<Owned> owned = {};
  std::int64_t train_months = 0;
  at::Tensor latitude, longitude;
};

/// Throws tessera::FileError if the file cannot be written. Folders that are missing are made.
void write_report(const Report& report, const std::string& path);

}  // namespace winds
