#pragma once
// Forecasts to compare with, and how good a forecast was.

#include <torch/torch.h>

#include <string>
#include <vector>

#include "winds_data.h"

namespace winds {

struct Forecast {
  std::string name;
  /// [months, 2, lat, lon], m/s; of baselines() a rank's own latitudes.
  at::Tensor winds;
};

/// Persistence (the month before), the monthly climatology, and the climatology plus a damped
/// anomaly of the month before: with one coefficient a wind, and with one at every point, both
/// fitted by least squares over the training period.
std::vector<Forecast> baselines(const WindsData& data, Months months);

/// RMS errors in m/s.
struct Skill {
  std::string name;
  /// Every grid point alike, the poles' many points included.
  double all_points[variables] = {};
  /// Weighted by the cosine of the latitude.
  double area[variables] = {};
  /// All points alike, a number a month.
  std::vector<double> by_month[variables];
  /// [2, lat, lon], over the months.
  at::Tensor by_point;
};

Skill skill_of(const Forecast& forecast, const at::Tensor& truth, const at::Tensor& latitude);

/// The table for people.
std::string skill_table(const std::vector<Skill>& skills);

}  // namespace winds
