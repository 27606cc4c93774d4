#pragma once
// StreamLoader: batches from iterable datasets, one stream a rank, whose lengths may differ. The ranks agree before every step, so that none waits
// for another that has ended.

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/comm/group.h"
#include "tessera/data/dataset.h"

namespace tessera {

/// What happens at a step for which some ranks have a full batch and others do not.
enum class UnevenData : unsigned char {
  error,        ///< UnevenDataError on every rank, naming the ranks that have ended.
  drop,         ///< The stream ends for all; what some ranks had read for that step is left out.
  pad,          ///< Ranks that lack rows repeat their last ones, marked in the mask, until all ranks have ended.
  weight_zero,  ///< Ranks take part with the rows they have, none at all included (real = 0, the weight of their mean), until all have ended.
};

/// Thrown on every rank of the group.
class UnevenDataError : public Error {
 public:
  using Error::Error;
  ~UnevenDataError() override;
};

struct StreamBatch {
  std::uint64_t step = 0;
  std::vector<at::Tensor> tensors;  ///< [rows, ...]
  std::int64_t rows = 0, real = 0;  ///< Here; rows from `real` on are padding.
  std::int64_t global_real = 0;     ///< Over the group.
  at::Tensor mask;                  ///< Bool [rows]; undefined if all rows are real.
};

class StreamLoader {
 public:
  /// `rows`: of this rank's batch, at least 1. `group`: the ranks that step together.
  /// With pad and weight_zero a rank whose stream is empty from the start needs an `example` sample to know the shapes; without one that is an error
  /// on every rank.
  StreamLoader(std::shared_ptr<IterableDataset> dataset, std::int64_t rows, Group group, UnevenData uneven = UnevenData::error, Sample example = {});

  /// The next batch, or nothing once the ranks have agreed that the data has ended. Collective: one small all-gather.
  std::optional<StreamBatch> next();

  /// Steps and samples so far, as text.
  std::string state() const;
  /// A stream without positions cannot be resumed. `replay` = false: throws NotAvailable. true: reads and throws away as many samples as the state
  /// says, with a warning that names their number; right only for a stream that begins anew and repeats itself.
  void restore(const std::string& state, bool replay);

 private:
  std::shared_ptr<IterableDataset> dataset_;
  std::int64_t rows_;
  Group group_;
  UnevenData uneven_;
  Sample last_;
  std::uint64_t step_ = 0, taken_ = 0;
  bool ended_ = false;
};

}  // namespace tessera
