#pragma once
// Metrics: named numbers that ranks collect by themselves and bring together when somebody asks.
//
//   Metrics metrics;
//   metrics.add("loss", 0.7, rows);                  // a mean over samples
//   metrics.add("samples", rows, Metrics::Kind::sum);
//   const auto all = metrics.reduce(strategy);       // the same on every rank

#include <map>
#include <string>
#include <vector>

#include "tessera/train/strategy.h"

namespace tessera {

class Metrics {
 public:
  enum class Kind : unsigned char {
    /// Weighted.
    mean,
    /// Ranks with other samples add up: those that share them (Strategy::sharing) count once.
    sum,
    min,
    max
  };
  /// A value of weight 0 does not count, even if it is NaN. Throws InvalidArgument for a weight
  /// that is negative or not finite, and for a name that has another kind already.
  void add(const std::string& name, double value, double weight = 1, Kind kind = Kind::mean);
  void add(const std::string& name, double value, Kind kind) { add(name, value, 1, kind); }
  /// All that another one has.
  void add(const Metrics& other);
  /// Reduces over all ranks, which may have other names: one that no rank has given a weight is
  /// left out. The same bits on every rank. Collective: one all-gather. Throws MismatchError on
  /// every rank if a name has two kinds. `not_a_number` gets the first name that is NaN, and by
  /// which ranks, or stays empty.
  std::map<std::string, double> reduce(Strategy& strategy,
                                       std::string* not_a_number = nullptr) const;
  /// The same of what all ranks have, by rank, without a message. `sharing`: Strategy::sharing().
  static std::map<std::string, double> reduce(const std::vector<Metrics>& ranks, int sharing,
                                              std::string* not_a_number = nullptr);
  void clear() { all_.clear(); }
  bool has(const std::string& name) const { return all_.contains(name); }
  bool empty() const { return all_.empty(); }

  /// This rank's share as bytes, exact.
  std::string state() const;
  /// Throws ConfigurationError for other bytes.
  void restore(const std::string& state);

 private:
  struct Sum {
    Kind kind = Kind::mean;
    double value = 0, weight = 0;
    void add(double other, double other_weight);
  };
  std::map<std::string, Sum> all_;
};

}  // namespace tessera
