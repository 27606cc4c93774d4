#pragma once
// What all benchmarks share: two ways of doing one thing timed in turn within one run, and records
// of what came out.
//
//   Report report("comm", output);
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

/// What every benchmark can be asked, by --out and --only.
struct Output {
  /// The path of the JSON file; empty: none is written.
  std::string file = {};
  /// A long benchmark in pieces: the cases whose name this regular expression (ECMAScript) finds;
  /// empty: all. The file keeps its records of other cases.
  std::string only = {};
  /// The file is made by several programs: each keeps its records of other cases.
  bool shared = false;
};

/// --out and --only of a CLI::App.
template <class App>
void add_output(App& app, Output& output) {
  app.add_option("--out", output.file, "JSON file");
  app.add_option("--only", output.only,
                 "Only cases that this regular expression finds, as '4 B.*gloo'; the file keeps "
                 "its other records")
      ->check([](const std::string& pattern) -> std::string {
        try {
          const std::regex checked(pattern);
          return "";
        } catch (const std::regex_error& e) {
          return "'" + pattern + "' is no regular expression: " + e.what();
        }
      });
}

class Report {
 public:
  /// Meta data (machine, cores) is collected here, more by meta(). Only rank 0 writes the file.
  Report(std::string name, Output output, int rank = 0);
  void meta(const std::string& key, const std::string& value);
  void meta(const std::string& key, std::int64_t value);
  /// Whether the case is one of those asked for. Records of others are dropped.
  bool wants(const std::string& name) const;

  /// A time in microseconds beside the reference's; `limit` as ratio.
  void time(const std::string& name, const Pairs& pairs, const std::string& reference,
            double limit);
  /// The same, shown as GB/s of `bytes` a call.
  void bandwidth(const std::string& name, const Pairs& pairs, double bytes,
                 const std::string& reference, double limit);
  /// A value that must not exceed the limit, if there is one.
  void value(const std::string& name, const std::string& metric, double value,
             const std::string& unit, std::optional<double> limit);
  /// A value beside a reference's; `limit` as ratio.
  void beside(const std::string& name, const std::string& metric, double value,
              const std::string& unit, const std::string& reference, double reference_value,
              double limit);
  /// Any other.
  void add(Record record);

  /// Prints the table and writes the file. Exit status: 0 if every limit holds, else 1; 3, and no
  /// file, if the pattern found no case.
  int finish() const;

 private:
  std::string name_;
  Output output_;
  std::optional<std::regex> only_;
  std::vector<std::pair<std::string, std::string>> meta_;  // values as JSON
  std::vector<Record> records_;
};

}  // namespace tessera::bench
