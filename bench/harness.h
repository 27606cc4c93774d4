#pragma once
// What all benchmarks share: two ways of doing one thing timed in turn within one run, and records
// of what came out.
//
//   Report report("comm", options.out);
//   auto pairs = alternate(31, ours, reference);                          // A B B A A B B A ...
//   // holds if the upper 95 % bound of the median ratio is at most 1.03
//   report.time("all_reduce 4 B mpi", pairs, "MPI_Allreduce", 1.03);
//   return report.finish();  // table, file; 1 if a limit does not hold
//
// A ratio is ours / reference, pair by pair, so that what slows the machine down slows both. The
// bound is the order statistic x_(k) of the n sorted ratios with the smallest k for which
// Binomial(n, 1/2) stays below k with probability 0.95: the median lies below it with that
// confidence, whatever the distribution (n = 31: k = 21). Median of times: of the values alone.

#include <atomic>
#include <functional>
#include <optional>
#include <regex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tessera::bench {

struct Record {
  /// "case" in the file.
  std::string name;
  /// "time", "bandwidth", "bytes", ...
  std::string metric;
  /// Ours, median.
  double value = 0;
  std::string unit;
  /// What it is compared with; empty: nothing.
  std::string reference;
  /// Median.
  std::optional<double> reference_value = {};
  /// Upper 95 % bound of the median of ours / reference, of times also where the metric is a
  /// bandwidth.
  std::optional<double> ratio = {};
  std::optional<double> median_ratio = {};
  /// Of `ratio`, or of `value` where there is no ratio.
  std::optional<double> limit = {};
  bool holds = true;
};

/// Seconds, one pair a row: ours, reference.
using Pairs = std::vector<std::pair<double, double>>;

/// Calls `ours` and `reference` in the order A B B A A B ..., `count` (at least 31) times each;
/// each returns the seconds of its own sample.
Pairs alternate(int count, const std::function<double()>& ours,
                const std::function<double()>& reference);

/// Keeps the cores from sleeping while it lives: a thread for each CPU of this process that runs
/// only where nothing else does (SCHED_IDLE). Waking a sleeping core costs up to milliseconds on a
/// virtual machine, at random, and hides everything else in calls that wait for other threads;
/// where a model computes, cores are awake.
class AwakeCores {
 public:
  AwakeCores();
  ~AwakeCores();
  AwakeCores(const AwakeCores&) = delete;
  AwakeCores& operator=(const AwakeCores&) = delete;

 private:
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

/// Seconds of the processor that this process has used, all its threads together.
double processor_seconds();

double median(std::vector<double> values);
/// The upper bound of the median with confidence 0.95; see above.
double upper_bound_of_median(std::vector<double> values);

class Report {
 public:
  /// `out`: path of the JSON file; empty writes none. Meta data (machine, cores) is collected here,
  /// more by meta().
  Report(std::string name, std::string out);
  void meta(const std::string& key, const std::string& value);
  void meta(const std::string& key, std::int64_t value);
  /// A long benchmark in pieces: wants() is true of the cases whose name this regular expression
  /// (ECMAScript) finds, empty: of all. With a pattern, or where the file is made by several
  /// programs (`shared`), finish() keeps the file's records of other cases.
  void only(const std::string& pattern, bool shared = false);
  bool wants(const std::string& name) const;

  /// A time in microseconds beside the reference's; `limit` as ratio.
  void time(const std::string& name, const Pairs& pairs, const std::string& reference,
            double limit);
  /// The same, shown as GB/s of `bytes` a call.
  void bandwidth(const std::string& name, const Pairs& pairs, double bytes,
                 const std::string& reference, double limit);
  /// Any other.
  void add(Record record);

  /// Prints the table and writes the file. Exit status: 0 if every limit holds, else 1; 3, and no
  /// file, if the pattern found no case.
  int finish() const;

 private:
  std::string name_, out_;
  std::optional<std::regex> only_;
  bool keep_ = false;
  std::vector<std::pair<std::string, std::string>> meta_;  // values as JSON
  std::vector<Record> records_;
};

}  // namespace tessera::bench
