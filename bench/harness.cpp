#include "harness.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace tessera::bench {

Pairs alternate(int count, const std::function<double()>& ours,
                const std::function<double()>& reference) {
  if (count < 31) throw std::invalid_argument("a benchmark needs at least 31 pairs");
  (void)ours();  // Warm: caches, connections, pages.
  (void)reference();
  Pairs pairs;
  for (int i = 0; i < count; ++i) {
    double a = 0, b = 0;
    if (i % 2 == 0) {
      a = ours();
      b = reference();
    } else {
      b = reference();
      a = ours();
    }
    pairs.emplace_back(a, b);
  }
  return pairs;
}

AwakeCores::AwakeCores() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
    throw std::runtime_error("sched_getaffinity failed");
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    threads_.emplace_back([this, cpu] {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      const sched_param none{};
      if (pthread_setaffinity_np(pthread_self(), sizeof one, &one) != 0 ||
          pthread_setschedparam(pthread_self(), SCHED_IDLE, &none) != 0)
        return;
      while (!stop_.load(std::memory_order_relaxed)) {
      }
    });
  }
}

AwakeCores::~AwakeCores() {
  stop_.store(true);
  for (auto& thread : threads_) thread.join();
}

double processor_seconds() {
  timespec used{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

double median(std::vector<double> values) {
  if (values.empty()) throw std::invalid_argument("median of no values");
  std::ranges::sort(values);
  const std::size_t n = values.size();
  return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

double upper_bound_of_median(std::vector<double> values) {
  if (values.empty()) throw std::invalid_argument("bound of the median of no values");
  std::ranges::sort(values);
  const auto n = static_cast<int>(values.size());
  double below = 0;  // P(Binomial(n, 1/2) <= k - 1)
  for (int k = 1; k <= n; ++k) {
    below += std::exp(std::lgamma(n + 1.0) - std::lgamma(k) - std::lgamma(n - k + 2.0) -
                      n * std::log(2.0));
    if (below >= 0.95) return values[static_cast<std::size_t>(k - 1)];
  }
  return values.back();
}

Report::Report(std::string name, Output output, int rank)
    : name_(std::move(name)), output_(std::move(output)) {
  if (rank != 0) output_.file.clear();
  if (!output_.only.empty()) only_ = std::regex(output_.only);
  meta("benchmark", name_);
  meta("cores", static_cast<std::int64_t>(std::thread::hardware_concurrency()));
#if defined(__VERSION__)
  meta("compiler", __VERSION__);
#endif
#if defined(NDEBUG)
  meta("assertions", "off");
#else
  meta("assertions", "on");
#endif
}

void Report::meta(const std::string& key, const std::string& value) {
  meta_.emplace_back(key, nlohmann::json(value).dump());
}

void Report::meta(const std::string& key, std::int64_t value) {
  meta_.emplace_back(key, std::to_string(value));
}

bool Report::wants(const std::string& name) const {
  return !only_ || std::regex_search(name, *only_);
}

namespace {

Record compare(const std::string& name, const Pairs& pairs, const std::string& reference,
               double limit) {
  std::vector<double> ours, theirs, ratios;
  for (const auto& [a, b] : pairs) {
    ours.push_back(a);
    theirs.push_back(b);
    ratios.push_back(a / b);
  }
  Record record;
  record.name = name;
  record.value = median(ours);
  record.reference = reference;
  record.reference_value = median(theirs);
  record.ratio = upper_bound_of_median(ratios);
  record.median_ratio = median(ratios);
  record.limit = limit;
  record.holds = *record.ratio <= limit;
  return record;
}

}  // namespace

void Report::time(const std::string& name, const Pairs& pairs, const std::string& reference,
                  double limit) {
  Record record = compare(name, pairs, reference, limit);
  record.metric = "time";
  record.unit = "us";
  record.value *= 1e6;
  *record.reference_value *= 1e6;
  add(record);
}

void Report::bandwidth(const std::string& name, const Pairs& pairs, double bytes,
                       const std::string& reference, double limit) {
  Record record = compare(name, pairs, reference, limit);
  record.metric = "bandwidth";
  record.unit = "GB/s";
  record.value = bytes / record.value / 1e9;
  record.reference_value = bytes / *record.reference_value / 1e9;
  add(record);
}

void Report::value(const std::string& name, const std::string& metric, double value,
                   const std::string& unit, std::optional<double> limit) {
  add({name, metric, value, unit, "", {}, {}, {}, limit, !limit || value <= *limit});
}

void Report::beside(const std::string& name, const std::string& metric, double value,
                    const std::string& unit, const std::string& reference, double reference_value,
                    double limit) {
  const double ratio = value / reference_value;
  add({name, metric, value, unit, reference, reference_value, ratio, ratio, limit, ratio <= limit});
}

void Report::add(Record record) {
  if (wants(record.name)) records_.push_back(std::move(record));
}

int Report::finish() const {
  if (records_.empty()) {
    std::fprintf(stderr, "%s: the pattern finds no case\n", name_.c_str());
    return 3;
  }
  std::printf("%-40s %-10s %12s %12s %-6s %-22s %8s %8s %8s\n", "case", "metric", "ours",
              "reference", "unit", "reference is", "ratio", "limit", "holds");
  const auto cell = [](const std::optional<double>& x) {
    char text[32] = "-";
    if (x) std::snprintf(text, sizeof text, "%.4g", *x);
    return std::string(text);
  };
  bool all = true;
  nlohmann::json file = nlohmann::json::array();
  if (only_ || output_.shared) {
    std::ifstream before(output_.file);
    if (before)
      for (auto& record : nlohmann::json::parse(before)) {
        const auto is_new = [&](const Record& r) { return r.name == record["case"]; };
        if (std::ranges::none_of(records_, is_new)) file.push_back(std::move(record));
      }
  }
  nlohmann::json meta;
  for (const auto& [key, value] : meta_) meta[key] = nlohmann::json::parse(value);
  for (const auto& r : records_) {
    std::printf("%-40s %-10s %12.4g %12s %-6s %-22s %8s %8s %8s\n", r.name.c_str(),
                r.metric.c_str(), r.value, cell(r.reference_value).c_str(), r.unit.c_str(),
                r.reference.c_str(), cell(r.ratio).c_str(), cell(r.limit).c_str(),
                r.limit ? (r.holds ? "yes" : "NO") : "-");
    all = all && r.holds;
    const auto number = [](const std::optional<double>& x) {
      return x ? nlohmann::json(*x) : nlohmann::json();
    };
    file.push_back({{"case", r.name},
                    {"metric", r.metric},
                    {"value", r.value},
                    {"unit", r.unit},
                    {"reference", r.reference},
                    {"reference_value", number(r.reference_value)},
                    {"ratio", number(r.ratio)},
                    {"median_ratio", number(r.median_ratio)},
                    {"limit", number(r.limit)},
                    {"holds", r.holds},
                    {"meta", meta}});
  }
  if (!output_.file.empty()) {
    std::ofstream stream(output_.file);
    stream << file.dump(1) << "\n";
    if (!stream) throw std::runtime_error("cannot write " + output_.file);
  }
  return all ? 0 : 1;
}

}  // namespace tessera::bench
