#include "winds_data.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/ops/halo/halo.h"
#include "tessera/tensor/shard_tensor.h"

namespace winds {

namespace {

constexpr std::int64_t harmonics_used = 2;  // Of the year: one and two waves.

// [12, 12]: projects a year of monthly means onto its mean and `waves` waves.
at::Tensor year_projection(std::int64_t waves) {
  const at::Tensor month = at::arange(months_a_year, at::kDouble);
  const at::Tensor difference = month.unsqueeze(1) - month.unsqueeze(0);
  at::Tensor projection = at::ones({months_a_year, months_a_year}, at::kDouble);
  for (std::int64_t k = 1; k <= waves; ++k)
    projection +=
        2 * at::cos(difference * (2 * std::numbers::pi * static_cast<double>(k) / months_a_year));
  return projection / months_a_year;
}

// The twelve months around a sample, one of each calendar month, inside the training period.
Months window_of(std::int64_t month, std::int64_t train_months) {
  const std::int64_t begin =
      std::clamp<std::int64_t>(month - months_a_year / 2, 0, train_months - months_a_year);
  return {begin, begin + months_a_year};
}

}  // namespace

std::string month_name(std::int64_t month) {
  static const char* const names[] = {"January",   "February", "March",    "April",
                                      "May",       "June",     "July",     "August",
                                      "September", "October",  "November", "December"};
  return tessera::concat(names[month % months_a_year], " ", 1982 + month / months_a_year);
}

Months part_of(Months whole, std::int64_t rank, std::int64_t parts) {
  const std::int64_t each = whole.count() / parts, longer = whole.count() % parts;
  const auto begin = [&](std::int64_t r) { return whole.begin + r * each + std::min(r, longer); };
  return {begin(rank), begin(rank + 1)};
}

WindsData::WindsData(const tessera::Source& source, const tessera::DeviceMesh& mesh,
                     std::int64_t train_months, std::int64_t strata, at::ScalarType dtype)
    : source_(source),
      mesh_(mesh),
      train_months_(train_months),
      strata_(strata),
      dtype_(dtype),
      rows_({0}),
      data_(mesh.coordinate()[mesh.mesh().index("data")]) {
  const auto& shape = source.info(variable_names[0]).shape;
  if (train_months % months_a_year != 0 || train_months < 2 * months_a_year || shape.size() != 3 ||
      shape[0] < train_months)
    throw tessera::InvalidArgument(
        tessera::concat("training on ", train_months,
                        " months needs whole years, two or more, and a file that holds them; ",
                        source.name(), " holds ", tessera::list(shape)));
  if (strata < 1 || strata > train_months - 1)
    throw tessera::InvalidArgument(tessera::concat("a batch of ", strata, " samples: there are ",
                                                   train_months - 1, " to train on"));
  latitude_ = source.read(source.info(variable_names[0]).dims[1], {}, {.dtype = at::kDouble});
  longitude_ = source.read(source.info(variable_names[0]).dims[2], {}, {.dtype = at::kDouble});
  rows_ = tessera::Partition::even(shape[1], mesh.mesh().size("domain"));
  const Owned mine = owned();
  own_rows_ = mine.rows;

  const at::Tensor north = latitude_.slice(0, own_rows_.begin, own_rows_.end) *
                           (std::numbers::pi / 180),
                   east = longitude_ * (std::numbers::pi / 180);
  const at::Tensor rows = at::ones_like(north).unsqueeze(1),
                   columns = at::ones_like(east).unsqueeze(0);
  place_ = at::stack({north.sin().unsqueeze(1) * columns, north.cos().unsqueeze(1) * columns,
                      rows * east.sin().unsqueeze(0), rows * east.cos().unsqueeze(0)});

  // This rank's months: those it forecasts, the month before the first, and the years around, which
  // its samples must not see in their climatology.
  Months needed = mine.samples;
  if (needed.count())
    needed = {window_of(needed.begin, train_months_).begin,
              window_of(needed.end - 1, train_months_).end};
  const at::Tensor winds = read(needed);

  // Sums over months meet along `data`; each of a row's ranks then has the row's statistics.
  const std::int64_t lat = own_rows_.size(), lon = longitude_.size(0);
  const tessera::Group over_months = mesh.group("data");
  at::Tensor sum = at::zeros({months_a_year, variables, lat, lon}, at::kDouble);
  // Month 0 is nobody's sample.
  const std::int64_t first =
      mine.samples.begin == 1 && mine.samples.count() ? 0 : mine.samples.begin;
  for (std::int64_t t = first; t < mine.samples.end; ++t)
    sum[t % months_a_year] += winds[t - needed.begin];
  over_months.all_reduce(sum, tessera::ReduceOp::sum, {.name = "climatology"});
  statistics_.climatology = sum / static_cast<double>(train_months_ / months_a_year);

  // Lag-one regression of the anomalies: sums over samples, each at the rank that owns it.
  at::Tensor sums = at::zeros({3, variables, lat, lon}, at::kDouble);
  for (std::int64_t t = mine.samples.begin; t < mine.samples.end; ++t) {
    const at::Tensor before =
        winds[t - 1 - needed.begin] - statistics_.climatology[(t - 1) % months_a_year];
    const at::Tensor now = winds[t - needed.begin] - statistics_.climatology[t % months_a_year];
    sums += at::stack({before * now, before * before, now * now});
  }
  over_months.all_reduce(sums, tessera::ReduceOp::sum, {.name = "lag-one sums"});
  const at::Tensor over_points = sums.sum({2, 3}, /*keepdim=*/true);
  mesh.group("domain").all_reduce(over_points, tessera::ReduceOp::sum,
                                  {.name = "sums over points"});
  statistics_.damping = over_points[0] / over_points[1];
  statistics_.point_damping = sums[0] / sums[1];
  statistics_.sigma =
      (over_points[2] / static_cast<double>((train_months_ - 1) * latitude_.size(0) * lon)).sqrt();
  smooth_damping_ = smoothed(sums[0], 5) / smoothed(sums[1], 5);
  harmonics_ = at::stack({year_projection(1), year_projection(harmonics_used)});

  // Samples as a test month would look: the climatology that a sample sees leaves the year around
  // it out, as the test's climatology leaves out the test.
  const auto years = static_cast<double>(train_months_ / months_a_year);
  std::vector<at::Tensor> inputs, targets;
  for (std::int64_t t = mine.samples.begin; t < mine.samples.end; ++t) {
    const Months around = window_of(t, train_months_);
    const at::Tensor year = winds.slice(0, around.begin - needed.begin, around.end - needed.begin)
                                .roll(around.begin % months_a_year, 0);
    const at::Tensor climatology = (years * statistics_.climatology - year) / (years - 1);
    inputs.push_back(sample_input(winds[t - 1 - needed.begin], t, climatology).to(dtype_));
    targets.push_back(
        ((winds[t - needed.begin] - climatology[t % months_a_year]) / statistics_.sigma)
            .to(dtype_));
  }
  // Sample 0 forecasts month 1.
  own_ = std::make_shared<OwnSamples>(
      train_months_ - 1, mine.samples.begin - 1,
      inputs.empty() ? at::empty({0, channels(), lat, lon}, dtype_) : at::stack(inputs),
      targets.empty() ? at::empty({0, variables, lat, lon}, dtype_) : at::stack(targets));
}

Owned WindsData::owned_by(int rank) const {
  const tessera::Mesh& layout = mesh_.mesh();
  const auto at = layout.coordinate(rank);
  // as the loader cuts the rows of a batch
  const Months strata = part_of({0, strata_}, at[layout.index("data")], layout.size("data"));
  return {rank,
          strata.count() ? Months{stratum(strata.begin).begin, stratum(strata.end - 1).end}
                         : Months{1, 1},
          rows_.interval(at[layout.index("domain")])};
}

// A 1-2-1 mean in both directions, `times` over: circular in longitude, the pole rows repeated.
// Each time over, rows of neighbours are needed.
at::Tensor WindsData::smoothed(const at::Tensor& own, int times) const {
  std::vector<tessera::Placement> placements(mesh_.mesh().dims(), tessera::Replicate());
  placements[mesh_.mesh().index("domain")] = tessera::Shard(1);
  const tessera::ShardSpec spec(mesh_, {own.size(0), latitude_.size(0), own.size(2)}, placements,
                                {{1, rows_.sizes()}});
  const auto mean = [](const at::Tensor& t, int dim) {
    const std::int64_t n = t.size(dim) - 2;
    return (t.narrow(dim, 0, n) + 2 * t.narrow(dim, 1, n) + t.narrow(dim, 2, n)) / 4;
  };
  at::Tensor field = own;
  for (int i = 0; i < times; ++i) {
    const at::Tensor wide = tessera::halo_exchange(
        tessera::from_local(field, spec),
        {{1, {1, 1, tessera::Edge::replicate}}, {2, {1, 1, tessera::Edge::circular}}});
    field = mean(mean(wide, 2), 1);
  }
  return field;
}

// Own samples and latitudes as parts of a whole: `rows` samples are cut over `data`, of which those
// from `real` on are left out.
at::Tensor WindsData::sharded(const at::Tensor& own, std::int64_t rows, std::int64_t real) const {
  const tessera::Mesh& layout = mesh_.mesh();
  tessera::Sizes samples;
  for (int d = 0; d < layout.size("data"); ++d) {
    const Months part = part_of({0, rows}, d, layout.size("data"));
    samples.push_back(std::clamp<std::int64_t>(real - part.begin, 0, part.count()));
  }
  std::vector<tessera::Placement> placements(layout.dims());
  placements[layout.index("data")] = tessera::Shard(0);
  placements[layout.index("domain")] = tessera::Shard(2);
  const std::vector<std::int64_t> shape{real, own.size(1), latitude_.size(0), own.size(3)};
  return tessera::from_local(
      own, tessera::ShardSpec(mesh_, shape, placements, {{0, samples}, {2, rows_.sizes()}}));
}

at::Tensor WindsData::whole(const at::Tensor& own, Months months) const {
  return tessera::full_tensor(sharded(own, months.count(), months.count()));
}

std::int64_t WindsData::channels() const {
  return 2 * variables + 2 * variables + place_.size(0) + 2;
}

at::Tensor WindsData::sample_input(const at::Tensor& before, std::int64_t month,
                                   const at::Tensor& climatology) const {
  const at::Tensor anomaly =
      (before - climatology[(month - 1) % months_a_year]) / statistics_.sigma;
  // How a smoother climatology differs from the monthly one at this month: [2 smoothings, 2 winds]
  // as channels.
  const at::Tensor weights = harmonics_.select(1, month % months_a_year);
  const at::Tensor smoother =
      at::tensordot(weights, climatology, {1}, {0}) - climatology[month % months_a_year];
  const double phase =
      2 * std::numbers::pi * static_cast<double>(month % months_a_year) / months_a_year;
  const at::Tensor season = at::tensor({std::sin(phase), std::cos(phase)}, at::kDouble)
                                .view({2, 1, 1})
                                .expand({2, place_.size(1), place_.size(2)});
  return at::cat({smooth_damping_ * anomaly, (smoother / statistics_.sigma).flatten(0, 1), anomaly,
                  place_, season});
}

Months WindsData::stratum(std::int64_t s) const { return part_of({1, train_months_}, s, strata_); }

std::unique_ptr<tessera::Loader> WindsData::loader(std::uint64_t seed) const {
  auto order = std::make_shared<RunsOrder>(train_months_ - 1, strata_, seed);
  return std::make_unique<tessera::Loader>(
      std::vector<std::shared_ptr<const tessera::Dataset>>{own_}, order,
      tessera::batch_mapping(mesh_.mesh(), {"data"}), mesh_.manager().rank(),
      tessera::LoaderOptions{.workers = 1});
}

Samples WindsData::samples_of(const tessera::LoadedBatch& batch) const {
  // Padding is in the last rows of the whole batch, so that everybody knows how many are whose.
  const auto part = [&](const at::Tensor& own) {
    return sharded(own.narrow(0, 0, batch.real), strata_, batch.global_real);
  };
  return {part(batch.tensors[0]), part(batch.tensors[1])};
}

Samples WindsData::forecast_input(Months months) const {
  const Months mine = own(months);
  std::vector<at::Tensor> inputs, targets;
  const at::Tensor winds = mine.count() ? read({mine.begin - 1, mine.end}) : at::Tensor();
  for (std::int64_t t = mine.begin; t < mine.end; ++t) {
    inputs.push_back(sample_input(winds[t - mine.begin], t, statistics_.climatology).to(dtype_));
    targets.push_back(((winds[t - mine.begin + 1] - statistics_.climatology[t % months_a_year]) /
                       statistics_.sigma)
                          .to(dtype_));
  }
  const auto none = own_->get_batch({});
  const auto part = [&](const std::vector<at::Tensor>& own, const at::Tensor& empty) {
    return sharded(own.empty() ? empty : at::stack(own), months.count(), months.count());
  };
  return {part(inputs, none[0]), part(targets, none[1])};
}

at::Tensor WindsData::to_winds(const at::Tensor& anomalies, Months months) const {
  std::vector<at::Tensor> climatology;
  for (std::int64_t t = months.begin; t < months.end; ++t)
    climatology.push_back(statistics_.climatology[t % months_a_year]);
  if (climatology.empty()) return anomalies.to(at::kDouble);
  return anomalies.to(at::kDouble) * statistics_.sigma + at::stack(climatology);
}

at::Tensor WindsData::read(Months months) const {
  std::vector<at::Tensor> winds;
  const tessera::Hyperslab slab{.start = {months.begin, own_rows_.begin},
                                .count = {months.count(), own_rows_.size()}};
  for (const char* name : variable_names)
    winds.push_back(source_.read(name, slab, {.dtype = at::kDouble}));
  values_read_ += variables * winds[0].numel();
  return at::stack(winds, 1);
}

}  // namespace winds
