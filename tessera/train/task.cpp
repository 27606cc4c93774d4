#include "tessera/train/task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <utility>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {

std::function<double(std::int64_t, std::int64_t)> warmup_cosine(std::int64_t warmup,
                                                                std::int64_t total, double floor) {
  if (warmup < 0 || total <= warmup)
    throw InvalidArgument("warmup_cosine: ", warmup, " steps of ", total,
                          " are warm-up: give 0 <= warmup < total");
  return [=](std::int64_t step, std::int64_t) {
    if (step < warmup) return static_cast<double>(step + 1) / static_cast<double>(warmup);
    const double part =
        std::min(1.0, static_cast<double>(step - warmup) / static_cast<double>(total - warmup));
    return floor + (1 - floor) * 0.5 * (1 + std::cos(std::numbers::pi * part));
  };
}

std::function<double(std::int64_t, std::int64_t)> step_decay(std::int64_t every, double gamma) {
  if (every < 1) throw InvalidArgument("step_decay: every ", every, " epochs; give 1 or more");
  return [=](std::int64_t, std::int64_t epoch) {
    return std::pow(gamma, static_cast<double>(epoch / every));
  };
}

void Step::log(const std::string& name, double value, Metrics::Kind kind) {
  metrics_.add(name, value, kind == Metrics::Kind::mean ? weight_ : 1.0, kind);
}

void Step::log(const std::string& name, const at::Tensor& value, Metrics::Kind kind) {
  double number = value.item<double>();
  // All ranks have the value of a sharded tensor: one share each.
  if (kind == Metrics::Kind::sum && is_sharded(value))
    number *= static_cast<double>(strategy().sharing()) / strategy().size();
  log(name, number, kind);
}

Task::~Task() = default;

void Task::validation_step(const MicroBatch&, Step&) {
  throw NotAvailable("this task has no validation_step()");
}

std::vector<at::Tensor> Task::predict_step(const MicroBatch&, Step&) {
  throw NotAvailable("this task has no predict_step()");
}

void Metrics::Sum::add(double other, double other_weight) {
  if (other_weight == 0) return;
  if (kind == Kind::mean || kind == Kind::sum)
    value += other;
  else if (weight == 0)
    value = other;
  else if (std::isnan(value) || std::isnan(other))
    value = std::nan("");
  else
    value = kind == Kind::min ? std::min(value, other) : std::max(value, other);
  weight += other_weight;
}

void Metrics::add(const std::string& name, double value, double weight, Kind kind) {
  if (!(weight >= 0) || !std::isfinite(weight))
    throw InvalidArgument("metric '", name, "' was given the weight ", weight,
                          ", but it must be finite and not negative");
  auto [it, is_new] = all_.try_emplace(name, Sum{kind});
  if (it->second.kind != kind)
    throw InvalidArgument("metric '", name, "' was given as two kinds (mean, sum, min, max)");
  if (weight > 0) it->second.add(kind == Kind::mean ? value * weight : value, weight);
}

void Metrics::add(const Metrics& other) {
  for (const auto& [name, sum] : other.all_) {
    auto [it, is_new] = all_.try_emplace(name, Sum{sum.kind});
    if (it->second.kind != sum.kind)
      throw InvalidArgument("metric '", name, "' was given as two kinds (mean, sum, min, max)");
    it->second.add(sum.value, sum.weight);
  }
}

std::map<std::string, double> Metrics::reduce(Strategy& strategy, std::string* not_a_number) const {
  std::vector<Metrics> ranks;
  if (strategy.size() == 1) {
    ranks.push_back(*this);
  } else {
    for (const std::string& bytes : strategy.all_gather(state()))
      ranks.emplace_back().restore(bytes);
  }
  return reduce(ranks, strategy.sharing(), not_a_number);
}

// In the order of the ranks: the same sum on all.
std::map<std::string, double> Metrics::reduce(const std::vector<Metrics>& ranks, int sharing,
                                              std::string* not_a_number) {
  std::map<std::string, Sum> sums;
  std::map<std::string, std::vector<int>> nans;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    for (const auto& [name, sum] : ranks[r].all_) {
      auto [it, is_new] = sums.try_emplace(name, Sum{sum.kind});
      if (it->second.kind != sum.kind)
        throw MismatchError("metric '", name, "' has another kind on another rank");
      it->second.add(sum.value, sum.weight);
      if (sum.weight > 0 && std::isnan(sum.value)) nans[name].push_back(static_cast<int>(r));
    }
  }
  if (not_a_number && !nans.empty())
    *not_a_number =
        concat("'", nans.begin()->first, "' is nan, by ranks ", list(nans.begin()->second));
  std::map<std::string, double> result;
  for (const auto& [name, sum] : sums) {
    if (sum.weight == 0) continue;
    result[name] = sum.kind == Kind::mean  ? sum.value / sum.weight
                   : sum.kind == Kind::sum ? sum.value / sharing
                                           : sum.value;
  }
  return result;
}

std::string Metrics::state() const {
  std::string bytes;
  for (const auto& [name, sum] : all_) {
    const std::uint64_t length = name.size();
    bytes.append(reinterpret_cast<const char*>(&length), 8);
    bytes += name;
    bytes += static_cast<char>(sum.kind);
    bytes.append(reinterpret_cast<const char*>(&sum.value), 8);
    bytes.append(reinterpret_cast<const char*>(&sum.weight), 8);
  }
  return bytes;
}

void Metrics::restore(const std::string& state) {
  std::map<std::string, Sum> all;
  std::size_t at = 0;
  const auto take = [&](void* into, std::size_t bytes) {
    if (state.size() - at < bytes) throw ConfigurationError("a state of metrics is cut short");
    std::memcpy(into, state.data() + at, bytes);
    at += bytes;
  };
  while (at < state.size()) {
    std::uint64_t length = 0;
    take(&length, 8);
    if (state.size() - at < length) throw ConfigurationError("a state of metrics is cut short");
    const std::string name = state.substr(at, length);
    at += length;
    Sum sum;
    unsigned char kind = 0;
    take(&kind, 1);
    if (kind > static_cast<unsigned char>(Kind::max))
      throw ConfigurationError("a state of metrics has an unknown kind");
    sum.kind = static_cast<Kind>(kind);
    take(&sum.value, 8);
    take(&sum.weight, 8);
    all[name] = sum;
  }
  all_ = std::move(all);
}

}  // namespace tessera
