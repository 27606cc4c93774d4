#pragma once
// The winds as a learning problem: which months and latitudes belong to whom, the climatology, the
// baselines' coefficients, and the samples.
//
// Months are counted from January 1982. A sample is a month to be forecast, t, from the month
// before it, t - 1: training has t = 1 ... train_months - 1, the test has the months after the
// training. Winds are [2, lat, lon]: UWND, VWND in m/s.
//
// The mesh has the axes `data` and `domain`. The samples are cut over `data`, the 73 latitudes over
// `domain`: a rank reads, keeps and works on its months of its rows. What is said to be a rank's
// own is a plain tensor of those; what goes into the network is sharded, and has no owner.

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "order.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/data/loader.h"
#include "tessera/data/sources/source.h"
#include "tessera/partition/partition.h"

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

/// Part `rank` of `parts` consecutive parts whose sizes differ by one at most: part_of({1, 96}, 0,
/// 2) is {1, 49}.
Months part_of(Months whole, std::int64_t rank, std::int64_t parts);

/// What the whole training period says of this rank's latitudes, although each rank reads only its
/// own months.
struct Statistics {
  /// [12, 2, own lat, lon]: the mean of each calendar month.
  at::Tensor climatology;
  /// [2, 1, 1]: RMS of the anomalies, a number a wind, over all latitudes.
  at::Tensor sigma;
  /// [2, 1, 1]: lag-one regression coefficient of the anomalies, a number a wind, over all
  /// latitudes.
  at::Tensor damping;
  /// [2, own lat, lon]: the same, at every point.
  at::Tensor point_damping;
};

/// A batch, sharded over data (samples) and domain (latitudes): what the network sees, and what it
/// is to find.
struct Samples {
  /// [n, channels, lat, lon]
  at::Tensor input;
  /// [n, 2, lat, lon]: the month's anomaly / sigma.
  at::Tensor target;
};

/// What a rank has of the training.
struct Owned {
  int rank;
  /// The months that it forecasts.
  Months samples;
  /// Latitudes, from the south.
  tessera::Interval rows;
};

class WindsData {
 public:
  /// Reads this rank's months and latitudes of the training period and agrees on the statistics.
  /// Collective over `mesh`, which has the axes "data" and "domain". `strata`: samples of a batch;
  /// the samples are cut into as many runs (see order.h), and each data coordinate holds its share
  /// of the runs.
  WindsData(const tessera::Source& source, const tessera::DeviceMesh& mesh,
            std::int64_t train_months, std::int64_t strata, at::ScalarType dtype);

  const tessera::DeviceMesh& mesh() const { return mesh_; }
  std::int64_t train_months() const { return train_months_; }
  const Statistics& statistics() const { return statistics_; }
  /// [lat], degrees north, float64.
  const at::Tensor& latitude() const { return latitude_; }
  /// [lon], degrees east, float64.
  const at::Tensor& longitude() const { return longitude_; }
  std::int64_t channels() const;
  at::ScalarType dtype() const { return dtype_; }

  std::int64_t steps_per_epoch() const { return stratum(0).count(); }
  /// This rank's part of each batch of the training, in the order of order.h, read ahead by a
  /// worker.
  std::unique_ptr<tessera::Loader> loader(std::uint64_t seed) const;
  /// The samples of a batch of all ranks, its padding left out.
  Samples samples_of(const tessera::LoadedBatch& batch) const;

  /// Samples to forecast, for months after the training.
  Samples forecast_input(Months months) const;
  /// This rank's part of `months`: over `data`, as part_of() cuts.
  Months own(Months months) const { return part_of(months, data_, mesh_.mesh().size("data")); }
  /// The whole of [months, 2, lat, lon], on every rank, from each rank's own months and latitudes.
  /// Collective.
  at::Tensor whole(const at::Tensor& own, Months months) const;
  /// Anomalies / sigma of own latitudes as winds in m/s.
  at::Tensor to_winds(const at::Tensor& anomalies, Months months) const;
  /// [months, 2, own lat, lon], m/s.
  at::Tensor read(Months months) const;

  /// Arithmetic: nothing is asked of that rank.
  Owned owned_by(int rank) const;
  Owned owned() const { return owned_by(mesh_.manager().rank()); }
  /// Winds read by this rank so far, one read twice counted twice.
  std::int64_t values_read() const { return values_read_; }

 private:
  Months stratum(std::int64_t s) const;
  at::Tensor sample_input(const at::Tensor& before, std::int64_t month,
                          const at::Tensor& climatology) const;
  at::Tensor sharded(const at::Tensor& own, std::int64_t rows, std::int64_t real) const;
  at::Tensor smoothed(const at::Tensor& own, int times) const;

  const tessera::Source& source_;
  tessera::DeviceMesh mesh_;
  std::int64_t train_months_, strata_;
  at::ScalarType dtype_;
  at::Tensor latitude_, longitude_, place_;
  tessera::Partition rows_;  // of the latitudes, over `domain`
  int data_;                 // this rank's coordinate
  tessera::Interval own_rows_;
  mutable std::int64_t values_read_ = 0;
  Statistics statistics_;
  at::Tensor harmonics_, smooth_damping_;  // What inputs are made of.
  std::shared_ptr<const OwnSamples> own_;
};

}  // namespace winds
