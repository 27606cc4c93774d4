#include "order.h"

#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "tessera/base/hash.h"
#include "tessera/base/text.h"

namespace winds {

tessera::OrderBatch RunsOrder::next(tessera::OrderCursor& cursor) const {
  const auto steps = static_cast<std::uint64_t>(steps_per_epoch());
  tessera::OrderBatch batch;
  batch.step = cursor.step++;
  batch.epoch = batch.step / steps;
  batch.size = static_cast<std::uint64_t>(runs_);
  const auto place = static_cast<std::int64_t>(batch.step % steps);
  std::int64_t begin = 0;
  for (std::int64_t run = 0; run < runs_; ++run) {
    const std::int64_t count = samples_ / runs_ + (run < samples_ % runs_);
    std::mt19937_64 random(tessera::Hash()
                               .number(seed_)
                               .number(batch.epoch)
                               .number(static_cast<std::uint64_t>(run))
                               .value());
    std::vector<std::int64_t> order(static_cast<std::size_t>(count));
    std::iota(order.begin(), order.end(), begin);
    // Fisher-Yates by hand: std::shuffle differs between standard libraries.
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
    batch.rows.push_back({0, static_cast<std::uint64_t>(
                                 order[static_cast<std::size_t>(std::min(place, count - 1))])});
    batch.real += place < count;
    begin += count;
  }
  return batch;
}

std::string RunsOrder::describe() const {
  return tessera::concat("winds: ", samples_, " samples in ", runs_, " runs, seed ", seed_);
}

std::int64_t OwnSamples::row(std::uint64_t index) const {
  const std::int64_t row = static_cast<std::int64_t>(index) - first_;
  if (row < 0 || row >= input_.size(0))
    throw tessera::RangeError(tessera::concat("sample ", index, " is not one of this rank's, ",
                                              first_, " to ", first_ + input_.size(0) - 1));
  return row;
}

tessera::Sample OwnSamples::get(std::uint64_t index) const {
  return {input_[row(index)], target_[row(index)]};
}

std::vector<at::Tensor> OwnSamples::get_batch(std::span<const std::uint64_t> indices) const {
  std::vector<std::int64_t> rows;
  for (const std::uint64_t index : indices) rows.push_back(row(index));
  const at::Tensor at = at::tensor(rows, at::kLong);
  return {input_.index_select(0, at), target_.index_select(0, at)};
}

}  // namespace winds
