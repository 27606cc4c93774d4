#include "tessera/sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

// Streams of one seed that must not overlap: draws, and each dataset's epochs.
constexpr std::uint64_t kDraws = 0x77656967'68746564ull;
constexpr std::uint64_t kDatasets = 0x6d697874'75726573ull;

double checked_sum(const std::vector<double>& weights) {
  double sum = 0;
  for (double w : weights) {
    if (!(w >= 0) || !std::isfinite(w))
      throw InvalidArgument("weight ", w, "; weights are finite and at least 0");
    sum += w;
  }
  if (!(sum > 0) || !std::isfinite(sum))
    throw InvalidArgument("the weights add up to ", sum, "; give a finite sum above 0");
  return sum;
}

}  // namespace

WeightedDraws::WeightedDraws(const std::vector<double>& weights, std::uint64_t seed)
    : random_(seed, kDraws), threshold_(weights.size()), alias_(weights.size()) {
  const double scale = static_cast<double>(weights.size()) / checked_sum(weights);
  std::vector<std::uint64_t> small, large;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    threshold_[i] = weights[i] * scale;
    alias_[i] = i;
    (threshold_[i] < 1 ? small : large).push_back(i);
  }
  while (!small.empty() && !large.empty()) {
    const auto s = small.back(), l = large.back();
    small.pop_back();
    alias_[s] = l;
    threshold_[l] -= 1 - threshold_[s];
    if (threshold_[l] < 1) {
      large.pop_back();
      small.push_back(l);
    }
  }
  // Buckets that rounding leaves over are full, except that an index of weight zero must never be
  // drawn.
  const auto heaviest =
      static_cast<std::uint64_t>(std::ranges::max_element(weights) - weights.begin());
  for (auto i : large) threshold_[i] = 1;
  for (auto i : small) {
    threshold_[i] = weights[i] > 0 ? 1 : 0;
    alias_[i] = heaviest;
  }
}

std::uint64_t WeightedDraws::operator()(std::uint64_t draw) const {
  const auto n = static_cast<double>(size());
  const auto column =
      std::min(static_cast<std::uint64_t>(random_.uniform(2 * draw) * n), size() - 1);
  return random_.uniform(2 * draw + 1) < threshold_[column] ? column : alias_[column];
}

std::vector<double> class_balanced_weights(const std::vector<std::int64_t>& classes) {
  std::map<std::int64_t, double> count;
  for (auto c : classes) ++count[c];
  std::vector<double> weights(classes.size());
  for (std::size_t i = 0; i < classes.size(); ++i) weights[i] = 1.0 / count[classes[i]];
  return weights;
}

Mixture::Mixture(std::vector<Dataset> datasets, std::vector<Stage> stages, std::uint64_t seed,
                 bool shuffle)
    : datasets_(std::move(datasets)), stages_(std::move(stages)), seed_(seed), shuffle_(shuffle) {
  if (datasets_.empty()) throw InvalidArgument("a mixture needs at least one dataset");
  if (stages_.empty() || stages_.front().from != 0)
    throw InvalidArgument("a mixture needs a first stage, from draw 0");
  for (std::size_t s = 0; s < stages_.size(); ++s) {
    Stage& stage = stages_[s];
    if (s > 0 && stage.from <= stages_[s - 1].from)
      throw InvalidArgument("stages must ascend: draw ", stage.from, " follows draw ",
                            stages_[s - 1].from);
    if (stage.weights.size() != datasets_.size())
      throw InvalidArgument("the stage from draw ", stage.from, " has ", stage.weights.size(),
                            " weights for ", datasets_.size(), " datasets");
    const double sum = checked_sum(stage.weights);
    for (std::size_t d = 0; d < datasets_.size(); ++d) {
      if (stage.weights[d] > 0 && (datasets_[d].samples == 0 || datasets_[d].samples > 1ull << 63))
        throw InvalidArgument("dataset '", datasets_[d].name, "' has ", datasets_[d].samples,
                              " samples but weight ", stage.weights[d], "; 1 to 2^63 are possible");
      stage.weights[d] /= sum;
    }
  }
}

Mixture::Cursor Mixture::start() const {
  return {0, std::vector<std::uint64_t>(datasets_.size(), 0),
          std::vector<double>(datasets_.size(), 0)};
}

// Chooses the dataset that gives the next sample.
int Mixture::choose(Cursor& cursor, const std::vector<double>& weights) const {
  // The dataset that is furthest behind its weight; ties go to the first.
  int chosen = -1;
  for (std::size_t d = 0; d < datasets_.size(); ++d) {
    cursor.credit[d] += weights[d];
    if (weights[d] > 0 && (chosen < 0 || cursor.credit[d] > cursor.credit[chosen]))
      chosen = static_cast<int>(d);
  }
  cursor.credit[chosen] -= 1;
  ++cursor.drawn;
  return chosen;
}

std::uint64_t Mixture::stream(int dataset, std::uint64_t epoch) const {
  return keyed_random(kDatasets, static_cast<std::uint64_t>(dataset), epoch);
}

Mixture::Draw Mixture::next(Cursor& cursor) const {
  Draw draw{};
  next(cursor, {&draw, 1});
  return draw;
}

void Mixture::next(Cursor& cursor, std::span<Draw> out) const {
  if (cursor.taken.size() != datasets_.size() || cursor.credit.size() != datasets_.size())
    throw InvalidArgument("a cursor of ", cursor.taken.size(), " datasets for a mixture of ",
                          datasets_.size());
  std::vector<std::vector<std::size_t>> places(datasets_.size());
  auto after = std::ranges::upper_bound(stages_, cursor.drawn, {}, &Stage::from);
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (after != stages_.end() && after->from == cursor.drawn) ++after;
    out[i].dataset = choose(cursor, std::prev(after)->weights);
    places[out[i].dataset].push_back(i);
  }
  // For each dataset consecutive positions of its order, epoch by epoch.
  std::vector<std::uint64_t> samples;
  for (std::size_t d = 0; d < datasets_.size(); ++d)
    for (std::size_t i = 0; i < places[d].size(); i += samples.size()) {
      const std::uint64_t n = cursor.taken[d], size = datasets_[d].samples, position = n % size;
      samples.resize(std::min<std::uint64_t>(size - position, places[d].size() - i));
      if (shuffle_)
        KeyedPermutation(size, seed_, stream(static_cast<int>(d), n / size))
            .fill(position, samples);
      else
        std::iota(samples.begin(), samples.end(), position);
      for (std::size_t k = 0; k < samples.size(); ++k) out[places[d][i + k]].sample = samples[k];
      cursor.taken[d] += samples.size();
    }
}

std::string Mixture::describe() const {
  TextStream text;
  text << std::hexfloat << "seed " << seed_ << (shuffle_ ? ", shuffled" : ", in order");
  for (const Dataset& d : datasets_) text << ", " << d.name << ':' << d.samples;
  for (const Stage& stage : stages_) {
    text << ", from " << stage.from << ':';
    for (double w : stage.weights) text << ' ' << w;
  }
  return std::move(text).str();
}

std::uint64_t token_budget_batch(const TokenBudget& budget, std::uint64_t offset, std::uint64_t end,
                                 const LengthAt& length) {
  if (budget.tokens == 0)
    throw InvalidArgument("a token budget of 0; give at least the length of the longest sample");
  std::uint64_t count = 0, sum = 0, longest = 0;
  for (; offset + count < end && (budget.max_samples == 0 || count < budget.max_samples); ++count) {
    const std::uint64_t n = length(offset + count);
    if (n > budget.tokens)
      throw InvalidArgument("the sample at position ", offset + count, " has ", n,
                            " tokens, the budget of a batch is ", budget.tokens,
                            "; shorten the sample, leave it out, or raise the budget");
    // By division and difference, so that nothing can overflow.
    longest = std::max(longest, n);
    if (budget.padded ? longest > budget.tokens / (count + 1) : n > budget.tokens - sum) break;
    sum += budget.padded ? 0 : n;
  }
  return count;
}

std::vector<std::vector<Packed>> pack_batch(std::uint64_t rows, std::uint64_t capacity,
                                            std::uint64_t offset, std::uint64_t end,
                                            const LengthAt& length) {
  if (rows == 0 || capacity == 0)
    throw InvalidArgument("a packed batch of ", rows, " rows of ", capacity,
                          " tokens; give at least 1 of each");
  std::vector<std::vector<Packed>> packed(rows);
  std::vector<std::uint64_t> used(rows, 0);
  for (; offset < end; ++offset) {
    const std::uint64_t n = length(offset);
    if (n > capacity)
      throw InvalidArgument("the sample at position ", offset, " has ", n, " tokens, a row holds ",
                            capacity, "; split the sample, leave it out, or use longer rows");
    const auto row = std::ranges::find_if(used, [&](std::uint64_t u) { return n <= capacity - u; });
    if (row == used.end()) break;
    packed[row - used.begin()].push_back({offset, *row, n});
    *row += n;
  }
  return packed;
}

}  // namespace tessera
