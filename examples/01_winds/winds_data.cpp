#include "winds_data.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace winds {

namespace {

constexpr std::int64_t harmonics_used = 2;  // Of the year: one and two waves.

// [12, 12]: projects a year of monthly means onto its mean and `waves` waves.
at::Tensor year_projection(std::int64_t waves) {
  const at::Tensor month = at::arange(months_a_year, at::kDouble);
  const at::Tensor difference = month.unsqueeze(1) - month.unsqueeze(0);
  at::Tensor projection = at::ones({months_a_year, months_a_year}, at::kDouble);
  for (std::int64_t k = 1; k <= waves; ++k) projection += 2 * at::cos(difference * (2 * std::numbers::pi * static_cast<double>(k) / months_a_year));
  return projection / months_a_year;
}

// A 1-2-1 mean in both directions, `times` over: circular in longitude, the pole rows repeated.
at::Tensor smoothed(at::Tensor field, int times) {
  for (int i = 0; i < times; ++i) {
    field = (field.roll(1, -1) + 2 * field + field.roll(-1, -1)) / 4;
    const std::int64_t rows = field.size(-2);
    const at::Tensor north = at::cat({field.slice(-2, 0, 1), field.slice(-2, 0, rows - 1)}, -2);
    const at::Tensor south = at::cat({field.slice(-2, 1, rows), field.slice(-2, rows - 1, rows)}, -2);
    field = (north + 2 * field + south) / 4;
  }
  return field;
}

// The twelve months around a sample, one of each calendar month, inside the training period.
Months window_of(std::int64_t month, std::int64_t train_months) {
  const std::int64_t begin = std::clamp<std::int64_t>(month - months_a_year / 2, 0, train_months - months_a_year);
  return {begin, begin + months_a_year};
}

}  // namespace

std::string month_name(std::int64_t month) {
  static const char* const names[] = {"January", "February", "March",     "April",   "May",      "June",
                                      "July",    "August",   "September", "October", "November", "December"};
  return tessera::concat(names[month % months_a_year], " ", 1982 + month / months_a_year);
}

Months part_of(Months whole, std::int64_t rank, std::int64_t parts) {
  const std::int64_t each = whole.count() / parts, longer = whole.count() % parts;
  const auto begin = [&](std::int64_t r) { return whole.begin + r * each + std::min(r, longer); };
  return {begin(rank), begin(rank + 1)};
}

WindsData::WindsData(const tessera::Source& source, const tessera::Group& group, std::int64_t train_months, std::int64_t strata, at::ScalarType dtype)
    : source_(source), train_months_(train_months), strata_(strata), dtype_(dtype), rank_(group.rank()), ranks_(group.size()) {
  const auto& shape = source.info(variable_names[0]).shape;
  if (train_months % months_a_year != 0 || train_months < 2 * months_a_year || shape.size() != 3 || shape[0] < train_months)
    throw tessera::InvalidArgument(tessera::concat("training on ", train_months,
                                                   " months needs whole years, two or more, and a file that holds them; ", source.name(), " holds ",
                                                   tessera::list(shape)));
  if (strata < 1 || strata > train_months - 1)
    throw tessera::InvalidArgument(tessera::concat("a batch of ", strata, " samples: there are ", train_months - 1, " to train on"));
  latitude_ = source.read(source.info(variable_names[0]).dims[1], {}, {.dtype = at::kDouble});
  longitude_ = source.read(source.info(variable_names[0]).dims[2], {}, {.dtype = at::kDouble});

  const at::Tensor north = latitude_ * (std::numbers::pi / 180), east = longitude_ * (std::numbers::pi / 180);
  const at::Tensor rows = at::ones_like(north).unsqueeze(1), columns = at::ones_like(east).unsqueeze(0);
  place_ = at::stack(
      {north.sin().unsqueeze(1) * columns, north.cos().unsqueeze(1) * columns, rows * east.sin().unsqueeze(0), rows * east.cos().unsqueeze(0)});

  const Months own_strata = part_of({0, strata_}, rank_, ranks_);  // as the loader cuts the rows of a batch
  own_samples_ = own_strata.count() ? Months{stratum(own_strata.begin).begin, stratum(own_strata.end - 1).end} : Months{1, 1};

  // This rank's months: those it forecasts, the month before the first, and the years around, which its samples must not see in their climatology.
  Months needed = own_samples_;
  if (own_samples_.count()) needed = {window_of(own_samples_.begin, train_months_).begin, window_of(own_samples_.end - 1, train_months_).end};
  const at::Tensor winds = read(needed).to(at::kDouble);
  const Months summed{own_samples_.begin == 1 && own_samples_.count() ? 0 : own_samples_.begin, own_samples_.end};  // Month 0 is nobody's sample.
  statistics_ = agree(winds.slice(0, summed.begin - needed.begin, summed.end - needed.begin), summed, group);

  // Lag-one regression of the anomalies: sums over samples, each at the rank that owns it.
  const std::int64_t lat = latitude_.size(0), lon = longitude_.size(0);
  at::Tensor sums = at::zeros({3, variables, lat, lon}, at::kDouble);
  for (std::int64_t t = own_samples_.begin; t < own_samples_.end; ++t) {
    const at::Tensor before = winds[t - 1 - needed.begin] - statistics_.climatology[(t - 1) % months_a_year];
    const at::Tensor now = winds[t - needed.begin] - statistics_.climatology[t % months_a_year];
    sums += at::stack({before * now, before * before, now * now});
  }
  group.all_reduce(sums, tessera::ReduceOp::sum, {.name = "lag-one sums"});
  const at::Tensor over_points = sums.sum({2, 3}, /*keepdim=*/true);
  statistics_.damping = over_points[0] / over_points[1];
  statistics_.point_damping = sums[0] / sums[1];
  statistics_.sigma = (over_points[2] / static_cast<double>((train_months_ - 1) * lat * lon)).sqrt();
  smooth_damping_ = smoothed(sums[0], 5) / smoothed(sums[1], 5);
  harmonics_ = at::stack({year_projection(1), year_projection(harmonics_used)});

  // Samples as a test month would look: the climatology that a sample sees leaves the year around it out, as the test's climatology leaves out the
  // test.
  const auto years = static_cast<double>(train_months_ / months_a_year);
  std::vector<at::Tensor> inputs, targets;
  for (std::int64_t t = own_samples_.begin; t < own_samples_.end; ++t) {
    const Months around = window_of(t, train_months_);
    const at::Tensor year = winds.slice(0, around.begin - needed.begin, around.end - needed.begin).roll(around.begin % months_a_year, 0);
    const at::Tensor climatology = (years * statistics_.climatology - year) / (years - 1);
    inputs.push_back(sample_input(winds[t - 1 - needed.begin], t, climatology).to(dtype_));
    targets.push_back(((winds[t - needed.begin] - climatology[t % months_a_year]) / statistics_.sigma).to(dtype_));
  }
  // Sample 0 forecasts month 1.
  own_ = std::make_shared<OwnSamples>(train_months_ - 1, own_samples_.begin - 1,
                                      inputs.empty() ? at::empty({0, channels(), lat, lon}, dtype_) : at::stack(inputs),
                                      targets.empty() ? at::empty({0, variables, lat, lon}, dtype_) : at::stack(targets));
}

Statistics WindsData::agree(const at::Tensor& own, Months own_months, const tessera::Group& group) const {
  at::Tensor sum = at::zeros({months_a_year, variables, latitude_.size(0), longitude_.size(0)}, at::kDouble);
  for (std::int64_t t = own_months.begin; t < own_months.end; ++t) sum[t % months_a_year] += own[t - own_months.begin];
  group.all_reduce(sum, tessera::ReduceOp::sum, {.name = "climatology"});
  Statistics statistics;
  statistics.climatology = sum / static_cast<double>(train_months_ / months_a_year);
  return statistics;
}

std::int64_t WindsData::channels() const { return 2 * variables + 2 * variables + place_.size(0) + 2; }

at::Tensor WindsData::sample_input(const at::Tensor& before, std::int64_t month, const at::Tensor& climatology) const {
  const at::Tensor anomaly = (before - climatology[(month - 1) % months_a_year]) / statistics_.sigma;
  // How a smoother climatology differs from the monthly one at this month: [2 smoothings, 2 winds] as channels.
  const at::Tensor weights = harmonics_.select(1, month % months_a_year);
  const at::Tensor smoother = at::tensordot(weights, climatology, {1}, {0}) - climatology[month % months_a_year];
  const double phase = 2 * std::numbers::pi * static_cast<double>(month % months_a_year) / months_a_year;
  const at::Tensor season = at::tensor({std::sin(phase), std::cos(phase)}, at::kDouble).view({2, 1, 1}).expand({2, place_.size(1), place_.size(2)});
  return at::cat({smooth_damping_ * anomaly, (smoother / statistics_.sigma).flatten(0, 1), anomaly, place_, season});
}

Months WindsData::stratum(std::int64_t s) const { return part_of({1, train_months_}, s, strata_); }

std::unique_ptr<tessera::Loader> WindsData::loader(std::uint64_t seed) const {
  auto order = std::make_shared<RunsOrder>(train_months_ - 1, strata_, seed);
  const tessera::Mesh mesh({{"data", ranks_}});
  return std::make_unique<tessera::Loader>(std::vector<std::shared_ptr<const tessera::Dataset>>{own_}, order, tessera::batch_mapping(mesh, {"data"}),
                                           rank_, tessera::LoaderOptions{.workers = 1});
}

Samples WindsData::samples_of(const tessera::LoadedBatch& batch) {
  // Padding is in the last rows.
  return {batch.tensors[0].narrow(0, 0, batch.real), batch.tensors[1].narrow(0, 0, batch.real)};
}

Samples WindsData::forecast_input(Months months) const {
  std::vector<at::Tensor> inputs, targets;
  if (months.count() == 0) {
    auto none = own_->get_batch({});
    return {none[0], none[1]};
  }
  const at::Tensor winds = read({months.begin - 1, months.end}).to(at::kDouble);
  for (std::int64_t t = months.begin; t < months.end; ++t) {
    inputs.push_back(sample_input(winds[t - months.begin], t, statistics_.climatology).to(dtype_));
    targets.push_back(((winds[t - months.begin + 1] - statistics_.climatology[t % months_a_year]) / statistics_.sigma).to(dtype_));
  }
  return {at::stack(inputs), at::stack(targets)};
}

at::Tensor WindsData::to_winds(const at::Tensor& anomalies, Months months) const {
  std::vector<at::Tensor> climatology;
  for (std::int64_t t = months.begin; t < months.end; ++t) climatology.push_back(statistics_.climatology[t % months_a_year]);
  if (climatology.empty()) return anomalies.to(at::kDouble);
  return anomalies.to(at::kDouble) * statistics_.sigma + at::stack(climatology);
}

at::Tensor WindsData::read(Months months) const {
  months_read_ += months.count();
  std::vector<at::Tensor> winds;
  for (const char* name : variable_names)
    winds.push_back(source_.read(name, {.start = {months.begin}, .count = {months.count()}}, {.dtype = at::kDouble}));
  return at::stack(winds, 1);
}

}  // namespace winds
