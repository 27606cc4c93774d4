#include "skill.h"

#include <cmath>
#include <iomanip>
#include <numbers>
#include <sstream>

namespace winds {

std::vector<Forecast> baselines(const WindsData& data, Months months) {
  if (months.count() == 0) {
    const at::Tensor none = at::empty_like(data.statistics().climatology.slice(0, 0, 0));
    return {{"persistence", none},
            {"monthly climatology", none},
            {"damped anomaly, one coefficient", none},
            {"damped anomaly, one per point", none}};
  }
  const Statistics& statistics = data.statistics();
  const Months before{months.begin - 1, months.end - 1};
  const at::Tensor persistence = data.read(before);
  const at::Tensor zero = at::zeros_like(persistence);
  const at::Tensor climatology = data.to_winds(zero, months);
  const at::Tensor anomaly = persistence - data.to_winds(zero, before);
  return {{"persistence", persistence},
          {"monthly climatology", climatology},
          {"damped anomaly, one coefficient", climatology + statistics.damping * anomaly},
          {"damped anomaly, one per point", climatology + statistics.point_damping * anomaly}};
}

Skill skill_of(const Forecast& forecast, const at::Tensor& truth, const at::Tensor& latitude) {
  Skill skill;
  skill.name = forecast.name;
  const at::Tensor squares = (forecast.winds - truth).square();
  at::Tensor weight = (latitude * (std::numbers::pi / 180)).cos().unsqueeze(1);
  weight = weight / weight.mean();
  const at::Tensor all = squares.mean({0, 2, 3}).sqrt(),
                   area = (squares * weight).mean({0, 2, 3}).sqrt(),
                   monthly = squares.mean({2, 3}).sqrt();
  for (std::int64_t v = 0; v < variables; ++v) {
    skill.all_points[v] = all[v].item<double>();
    skill.area[v] = area[v].item<double>();
    for (std::int64_t t = 0; t < monthly.size(0); ++t)
      skill.by_month[v].push_back(monthly[t][v].item<double>());
  }
  skill.by_point = squares.mean(0).sqrt();
  return skill;
}

std::string skill_table(const std::vector<Skill>& skills) {
  std::ostringstream out;
  out << std::left << std::setw(34) << "RMS error, m/s" << "UWND: all  area   VWND: all  area\n"
      << std::fixed << std::setprecision(2);
  for (const Skill& skill : skills) {
    out << std::left << std::setw(34) << skill.name << std::right;
    out << std::setw(9) << skill.all_points[0] << std::setw(6) << skill.area[0] << std::setw(12)
        << skill.all_points[1] << std::setw(6) << skill.area[1] << '\n';
  }
  return out.str();
}

}  // namespace winds
