#pragma once
// The winds as a learning problem: which months belong to whom, the climatology, the baselines' coefficients, and the samples of one rank.
//
// Months are counted from January 1982. A sample is a month to be forecast, t, from the month before it, t - 1: training has t = 1 ... train_months -
// 1, the test has the months after the training. Winds are [2, lat, lon]: UWND, VWND in m/s.

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "order.h"
#include "tessera/comm/group.h"
#include "tessera/data/loader.h"
#include "tessera/data/source.h"

namespace winds {

inline constexpr std::int64_t months_a_year = 12;
inline constexpr std::int64_t variables = 2;
inline const char* const variable_names[variables] = {"UWND", "VWND"};

/// "January 1990" for 96.
std::string month_name(std::int64_t month);

/// Consecutive months [begin, end).
struct Months {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t count() const { return end - begin; }
};

/// Part `rank` of `parts` consecutive parts whose sizes differ by one at most: part_of({1, 96}, 0, 2) is {1, 49}.
Months part_of(Months whole, std::int64_t rank, std::int64_t parts);

/// What the whole training period says, the same on every rank although each reads only its own months.
struct Statistics {
  at::Tensor climatology;    ///< [12, 2, lat, lon]: the mean of each calendar month.
  at::Tensor sigma;          ///< [2, 1, 1]: RMS of the anomalies, a number a wind.
  at::Tensor damping;        ///< [2, 1, 1]: lag-one regression coefficient of the anomalies, a number a wind.
  at::Tensor point_damping;  ///< [2, lat, lon]: the same, at every point.
};

/// A batch: what the network sees, what it is to find, and what it starts from.
struct Samples {
  at::Tensor input;   ///< [n, channels, lat, lon]
  at::Tensor target;  ///< [n, 2, lat, lon]: the month's anomaly / sigma.
};

class WindsData {
 public:
  /// Reads this rank's months of the training period and agrees on the statistics. Collective over `group`. `strata`: samples of a batch; the samples
  /// are cut into as many runs (see order.h), and each rank holds its share of the runs.
  WindsData(const tessera::Source& source, const tessera::Group& group, std::int64_t train_months, std::int64_t strata, at::ScalarType dtype);

  std::int64_t train_months() const { return train_months_; }
  const Statistics& statistics() const { return statistics_; }
  const at::Tensor& latitude() const { return latitude_; }    ///< [lat], degrees north, float64.
  const at::Tensor& longitude() const { return longitude_; }  ///< [lon], degrees east, float64.
  std::int64_t channels() const;
  at::ScalarType dtype() const { return dtype_; }

  std::int64_t steps_per_epoch() const { return stratum(0).count(); }
  /// This rank's part of each batch of the training, in the order of order.h, read ahead by a worker.
  std::unique_ptr<tessera::Loader> loader(std::uint64_t seed) const;
  /// The samples of a batch, its padding left out; maybe none.
  static Samples samples_of(const tessera::LoadedBatch& batch);

  /// Samples to forecast, for months after the training.
  Samples forecast_input(Months months) const;
  /// Anomalies / sigma of `months` as winds in m/s.
  at::Tensor to_winds(const at::Tensor& anomalies, Months months) const;
  at::Tensor read(Months months) const;  ///< [months, 2, lat, lon], m/s.

  Months own_samples() const { return own_samples_; }
  std::int64_t months_read() const { return months_read_; }  ///< By this rank so far, one read twice counted twice.

 private:
  Months stratum(std::int64_t s) const;
  at::Tensor sample_input(const at::Tensor& before, std::int64_t month, const at::Tensor& climatology) const;
  Statistics agree(const at::Tensor& own, Months own_months, const tessera::Group& group) const;

  const tessera::Source& source_;
  std::int64_t train_months_, strata_;
  at::ScalarType dtype_;
  at::Tensor latitude_, longitude_, place_;
  int rank_, ranks_;
  Months own_samples_;
  mutable std::int64_t months_read_ = 0;
  Statistics statistics_;
  at::Tensor harmonics_, smooth_damping_;  // What inputs are made of.
  std::shared_ptr<const OwnSamples> own_;
};

}  // namespace winds
