#include "tessera/train/detail/run_meter.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <utility>

#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/train/progress.h"

namespace tessera::detail {
namespace {

// Shapes are those of the step before in most steps, and counting costs time with each operator.
constexpr std::int64_t kCountEvery = 64;

double seconds_of(RunMeter::Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

double peak_memory(c10::Device device) {
  if (!device.is_cpu()) {
    const auto stats =
        c10::getDeviceAllocator(device.type())->getDeviceStats(std::max<int>(device.index(), 0));
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return static_cast<double>(stats.allocated_bytes[kAll].peak);
  }
  const std::string key = "VmHWM:";
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with(key)) continue;
    double kib = 0;
    TextReader(line.substr(key.size())) >> kib;
    return 1024 * kib;
  }
  return 0;
}

struct Totals {
  double bytes = 0, flop = 0, waited = 0, waited_share = 0;
  std::size_t slowest = 0, largest = 0;
};

Totals totals_of(const std::vector<Pace>& ranks) {
  Totals all;
  const auto n = static_cast<double>(ranks.size());
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const Pace& p = ranks[r];
    all.bytes += p.bytes;
    all.flop += p.flop;
    all.waited += p.waited / std::max(p.steps, 1.0) / n;
    all.waited_share += p.seconds > 0 ? p.waited / p.seconds / n : 0;
    if (p.busy() > ranks[all.slowest].busy()) all.slowest = r;
    if (p.memory > ranks[all.largest].memory) all.largest = r;
  }
  return all;
}

std::string percent(double share) { return concat(std::llround(100 * share), "%"); }

}  // namespace

void Pace::add(const Pace& other) {
  steps += other.steps;
  seconds += other.seconds;
  waited += other.waited;
  weight += other.weight;
  bytes += other.bytes;
  flop += other.flop;
  memory = std::max(memory, other.memory);
}

RunMeter::RunMeter(c10::Device device, std::function<Clock::time_point()> clock)
    : device_(device), clock_(std::move(clock)) {}

void RunMeter::begin_step() {
  began_ = now();
  waited_ = waiting_.total();
  own_weight_ = 0;
  flop_.reset();
  if (steps_++ % kCountEvery == 0) flop_.emplace();
}

void RunMeter::batch(const MicroBatch& batch, double weight) {
  for (const at::Tensor& t : batch.tensors) now_.bytes += static_cast<double>(t.nbytes());
  own_weight_ += weight;
}

void RunMeter::end_step(double weight, std::int64_t count) {
  now_.steps += static_cast<double>(count);
  now_.seconds += seconds_of(now() - began_);
  now_.waited += seconds_of(waiting_.total() - waited_);
  now_.weight += weight;
  if (flop_ && own_weight_ > 0) flop_of_weight_ = flop_->total() / own_weight_;
  flop_.reset();
  now_.flop += flop_of_weight_ * own_weight_;
}

Pace RunMeter::take() {
  now_.memory = peak_memory(device_);
  all_.add(now_);
  return std::exchange(now_, Pace());
}

Pace RunMeter::total() const { return all_; }

std::map<std::string, double> pace_values(const std::vector<Pace>& ranks, double peak_flop) {
  const Pace& first = ranks.front();
  if (!(first.steps > 0) || !(first.seconds > 0)) return {};
  const Totals all = totals_of(ranks);
  std::map<std::string, double> values{
      {"throughput/steps", first.steps / first.seconds},
      {"throughput/samples", first.weight / first.seconds},
      {"throughput/bytes", all.bytes / first.seconds},
      {"memory/peak", ranks[all.largest].memory},
      {"memory/peak_rank", static_cast<double>(all.largest)},
      {"time/step", first.seconds / first.steps},
  };
  if (all.flop > 0) {
    values["throughput/flop"] = all.flop / first.seconds;
    if (peak_flop > 0)
      values["throughput/mfu"] =
          all.flop / first.seconds / (peak_flop * static_cast<double>(ranks.size()));
  }
  if (ranks.size() > 1) {
    values["time/waited"] = all.waited;
    values["time/slowest_rank"] = static_cast<double>(all.slowest);
  }
  return values;
}

std::vector<std::string> pace_lines(const std::vector<Pace>& ranks, double peak_flop,
                                    double seconds, const std::string& unit) {
  const Pace& first = ranks.front();
  const Totals all = totals_of(ranks);
  const auto values = pace_values(ranks, peak_flop);
  const bool several = ranks.size() > 1;
  const auto steps = static_cast<std::int64_t>(first.steps);
  std::string line =
      concat("trained ", steps, steps == 1 ? " step in " : " steps in ", duration_text(seconds));
  if (!values.empty()) {
    line += concat(": ", count_text(values.at("throughput/steps")), " steps/s, ",
                   count_text(values.at("throughput/samples")), " ", unit, "/s");
    if (values.contains("throughput/flop"))
      line += concat(", ", count_text(values.at("throughput/flop")), "FLOP/s");
    if (values.contains("throughput/mfu"))
      line += concat(" (", percent(values.at("throughput/mfu")), " of the peak)");
  }
  std::vector<std::string> lines{line};
  lines.push_back(concat("  peak memory ", count_text(ranks[all.largest].memory), "B",
                         several ? concat(", on rank ", all.largest) : std::string()));
  if (several && !values.empty())
    lines.push_back(concat("  a step took ", duration_text(values.at("time/step")), ", of which ",
                           duration_text(all.waited), " (", percent(all.waited_share),
                           ") waiting for others; rank ", all.slowest, " waited least"));
  return lines;
}

}  // namespace tessera::detail
