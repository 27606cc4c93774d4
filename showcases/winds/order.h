#pragma once
// The order of the training samples, and the samples of one rank as a dataset for Tessera's loader.

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/data/orders.h"

namespace winds {

/// The samples 0, 1, ... are cut into `runs` runs of neighbouring ones, the first ones longer by
/// one where that does not divide. Step j of an epoch takes the j-th of each run after a shuffle
/// within it, by seed and epoch alone. So every batch covers the whole period, and row r of a batch
/// is always of run r: a rank with the same rows of every batch needs only its own runs. The last
/// batch of an epoch lacks the shorter runs, which are padding.
class RunsOrder : public tessera::Order {
 public:
  RunsOrder(std::int64_t samples, std::int64_t runs, std::uint64_t seed)
      : samples_(samples), runs_(runs), seed_(seed) {}
  std::int64_t steps_per_epoch() const { return (samples_ + runs_ - 1) / runs_; }

  tessera::OrderCursor start() const override { return {}; }
  tessera::OrderBatch next(tessera::OrderCursor& cursor) const override;
  std::string describe() const override;
  std::vector<std::uint64_t> samples_needed() const override {
    return {static_cast<std::uint64_t>(samples_)};
  }

 private:
  std::int64_t samples_, runs_;
  std::uint64_t seed_;
};

/// Of `samples` samples those from `first` on, which this rank holds: input and target, one a row.
/// Reading another is an error.
class OwnSamples : public tessera::Dataset {
 public:
  OwnSamples(std::int64_t samples, std::int64_t first, at::Tensor input, at::Tensor target)
      : samples_(samples), first_(first), input_(std::move(input)), target_(std::move(target)) {}
  std::uint64_t size() const override { return static_cast<std::uint64_t>(samples_); }
  tessera::Sample get(std::uint64_t index) const override;
  std::vector<at::Tensor> get_batch(std::span<const std::uint64_t> indices) const override;

 private:
  std::int64_t row(std::uint64_t index) const;

  std::int64_t samples_, first_;
  at::Tensor input_, target_;
};

}  // namespace winds
