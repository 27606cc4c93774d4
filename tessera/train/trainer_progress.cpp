// What a trainer says of a run while it runs.

#include <algorithm>
#include <cstring>
#include <utility>

#include "tessera/base/internal/vector.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/train/detail/run_meter.h"
#include "tessera/train/trainer.h"

namespace tessera {

void Trainer::begin_progress() {
  ProgressOptions options = options_.progress;
  options.show = options.show && first_rank();
  meter_ = std::make_unique<detail::RunMeter>(strategy().root_device(), options.clock);
  progress_ = std::make_unique<Progress>(options);
  saving_.clear();
  progress_->start(step_, -1);
  said_how_many_ = false;
  if (!resumed_.empty()) progress_->say(concat("resumed from ", resumed_));
  const TrainerCheckpoints& saves = options_.checkpoint;
  if (first_rank() && !saves.configuration.empty() && saves.given())
    saves.place()->put("config.yaml", saves.configuration, /*if_absent=*/false);
}

void Trainer::expect_steps() {
  const std::int64_t steps = expected_steps();
  progress_->expect(steps);
  if (std::exchange(said_how_many_, true)) return;
  const int ranks = strategy().size();
  progress_->say(concat("training from step ", step_,
                        steps >= 0 ? concat(" to ", steps) : std::string(), " on ", ranks,
                        ranks == 1 ? " rank (" : " ranks (", strategy().name(), ")"));
}

std::int64_t Trainer::expected_steps() const {
  const std::int64_t most = options_.max_steps < 0 ? -1 : std::max(options_.max_steps, step_);
  const auto batches = training_->source().remaining();
  if (!in_epoch_ || !batches || options_.max_epochs < 0 || !task_->automatic()) return most;
  const auto steps_of = [&](std::uint64_t n) {
    const auto each = static_cast<std::uint64_t>(options_.accumulate);
    return static_cast<std::int64_t>((n + each - 1) / each);
  };
  const std::int64_t all =
      step_ + steps_of(*batches) +
      (options_.max_epochs - epoch_ - 1) * steps_of(*batches + training_->index());
  return most < 0 ? all : std::min(most, all);
}

std::string Trainer::shown_metrics() const {
  std::string text;
  const std::int64_t most = options_.max_epochs;
  if (most > 1) text = concat("epoch ", std::min(epoch_ + 1, most), " of ", most);
  if (most < 0 && epoch_ > 0) text = concat("epoch ", epoch_ + 1);
  for (const std::string& name : options_.progress.metrics) {
    const auto it = metrics_.find(name);
    if (it != metrics_.end())
      text += concat(text.empty() ? "" : ", ", name, " ", significant(it->second, 4));
  }
  return text;
}

void Trainer::show_step(const StepResult& result) {
  for (std::int64_t s = previous_step_ + 1; s <= step_; ++s)
    progress_->step(s == step_ ? result.weight : 0, [&] { return shown_metrics(); });
  show_saved();
}

std::vector<detail::Pace> Trainer::gather_pace(std::vector<Metrics>* besides) {
  using detail::Pace;
  const Pace mine = besides ? meter_->take() : (meter_->take(), meter_->total());
  std::string bytes(reinterpret_cast<const char*>(&mine), sizeof mine);
  if (besides) bytes += window_metrics_.state();
  const auto all = strategy().size() == 1 ? std::vector{bytes} : strategy().all_gather(bytes);
  std::vector<Pace> ranks;
  for (const std::string& one : all) {
    std::memcpy(&ranks.emplace_back(), one.data(), sizeof(Pace));
    if (besides) besides->emplace_back().restore(one.substr(sizeof(Pace)));
  }
  return ranks;
}

void Trainer::log_window() {
  std::vector<Metrics> windows;
  const auto ranks = gather_pace(&windows);
  window_metrics_.clear();
  std::string not_a_number;
  const auto values = Metrics::reduce(windows, strategy().sharing(), &not_a_number);
  log(named(values, not_a_number, "train/", ""));
  // Not among metrics(), which are saved: a run that goes on bit by bit takes another time.
  if (options_.progress.log) log_here(detail::pace_values(ranks, options_.progress.peak_flop));
}

void Trainer::end_progress() {
  progress_->finish([&] { return shown_metrics(); });
  show_saved();
  if (stop_ != Stop::none)
    progress_->say(concat("stopped ", stop_ == Stop::requested ? "as " : "by ", to_string(stop_),
                          reason_.empty() ? "" : ": ", reason_));
  const auto ranks = gather_pace(nullptr);
  for (const std::string& line : detail::pace_lines(ranks, options_.progress.peak_flop,
                                                    progress_->seconds(), options_.progress.unit))
    progress_->say(line);
  const ProgressOptions common;
  for (const std::string& name : options_.progress.metrics) {
    if (metrics_.empty() || metrics_.contains(name)) continue;
    if (std::ranges::count(common.metrics, name) > 0) continue;
    warn(concat("ProgressOptions::metrics has '", name, "', which was not logged; known are ",
                list(keys_of(metrics_)), ". Give one of these, or log it"));
  }
}

void Trainer::show_saved() {
  while (!saving_.empty() && checkpointer_ && checkpointer_->saves() > saving_.front().before) {
    const Saving& one = saving_.front();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - one.began;
    progress_->say(concat(
        "saved ", one.name, " (", count_text(static_cast<double>(checkpointer_->bytes_written())),
        "B", strategy().size() > 1 ? " on rank 0, " : ", ", duration_text(took.count()), ")"));
    saving_.erase(saving_.begin());
  }
}

}  // namespace tessera
