// winds: forecasts next month's winds with a small convolutional network, trained data-parallel.
//
//   tessera run -n 2 -- winds --report winds.html

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "progress.h"
#include "report.h"
#include "skill.h"
#include "tessera/base/text.h"
#include "tessera/comm/manager.h"
#include "tessera/data/netcdf_source.h"
#include "training.h"

namespace {

using namespace winds;

struct Settings {
  std::string data = WINDS_DATA;
  std::string report;
  bool float64 = false;
  std::int64_t batch = 16;
  std::int64_t validation_years = 0;
  TrainingOptions training;
};

Settings read_settings(int argc, char** argv) {
  Settings settings;
  CLI::App app{"Forecasts next month's winds with a small network, trained on 1982-1989 and judged on 1990-1992"};
  app.add_option("--data", settings.data, "netCDF file with UWND and VWND(TIME, lat, lon), months from January 1982")->capture_default_str();
  app.add_option("--report", settings.report, "Write a report in HTML to this file");
  app.add_option("--epochs", settings.training.epochs, "Passes over the training samples")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--batch", settings.batch, "Samples of a step, over all ranks")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--learning-rate", settings.training.learning_rate, "Of AdamW, at its highest")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--weight-decay", settings.training.weight_decay, "Of AdamW")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--hidden", settings.training.network.hidden, "Channels of the hidden layers")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--layers", settings.training.network.layers, "Convolutions; 0: the linear way around them alone")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--seed", settings.training.seed, "Of the weights and of the order of samples")->capture_default_str();
  app.add_option("--validate", settings.validation_years,
                 "Hold the last N years of 1982-1989 out of the training and judge on them instead of 1990-1992: for choosing settings")
      ->check(CLI::Range(1, 5))
      ->excludes("--report");
  app.add_flag("--double", settings.float64, "Train in float64: the loss curve is then the same, to round-off, for every number of ranks");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return settings;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", value);
  return text;
}

void run(const Settings& settings) {
  const auto start = std::chrono::steady_clock::now();
  auto manager = tessera::DistributedManager::initialize();
  const tessera::Group world = manager.world();
  const bool first = world.rank() == 0;

  const tessera::NetcdfSource source(settings.data);
  const std::int64_t train_months = (8 - settings.validation_years) * months_a_year;
  const Months test{train_months, train_months + (settings.validation_years ? settings.validation_years : 3) * months_a_year};
  const WindsData data(source, world, train_months, settings.batch, settings.float64 ? at::kDouble : at::kFloat);
  const std::int64_t months_read = data.months_read();
  const double read_time = seconds_since(start);

  std::vector<double> losses;
  Progress progress(first ? terminal_columns() : 0);
  const auto training_start = std::chrono::steady_clock::now();
  WindNet network = train(data, world, settings.training, [&](const Step& step, WindNet&) {
    losses.push_back(step.loss);
    char note[64];
    std::snprintf(note, sizeof note, "epoch %lld of %lld, RMS error %.3f m/s", static_cast<long long>(step.epoch + 1),
                  static_cast<long long>(settings.training.epochs), std::sqrt(step.loss));
    progress.show(step.number + 1, step.of, note);
  });
  const double training_time = seconds_since(training_start);

  // Each rank forecasts its own months of the test.
  const auto test_start = std::chrono::steady_clock::now();
  const Months mine = part_of(test, world.rank(), world.size());
  std::vector<Forecast> forecasts = baselines(data, mine);
  forecasts.push_back({"network", mine.count() ? forecast(network, data, mine) : forecasts[0].winds});
  for (Forecast& f : forecasts) f.winds = gather_months(f.winds, test, world);
  const at::Tensor truth = gather_months(mine.count() ? data.read(mine) : forecasts[0].winds.slice(0, 0, 0), test, world);
  const auto ranges = world.gather_bytes(tessera::concat(data.own_samples().count(), " training samples, from ", months_read, " of ", train_months,
                                                         " months; ", mine.count(), " forecasts"),
                                         0);
  if (!first) return;

  std::vector<Skill> skills;
  for (const Forecast& f : forecasts) skills.push_back(skill_of(f, truth, data.latitude()));
  const double test_time = seconds_since(test_start);
  std::cout << "Winds of " << month_name(test.begin) << " to " << month_name(test.end - 1) << ", each month forecast from the one before\n"
            << skill_table(skills) << "trained in " << seconds(training_time) << " on " << world.size() << (world.size() == 1 ? " rank" : " ranks")
            << '\n';
  if (settings.report.empty()) return;

  std::int64_t weights = 0;
  for (const auto& p : network->parameters()) weights += p.numel();
  std::string parts;
  for (std::size_t r = 0; r < ranges.size(); ++r) parts += tessera::concat(r ? "<br>" : "", "rank ", r, ": ", ranges[r]);
  const TrainingOptions& t = settings.training;
  write_report(
      {.facts = {{"ranks", tessera::concat(world.size(), ", started by ", manager.launch().launcher, ", ", at::get_num_threads(), " thread(s) each")},
                 {"backend", tessera::concat(world.backend(), " on ", manager.device().str())},
                 {"libtorch", TORCH_VERSION},
                 {"network", tessera::concat(t.network.layers, " convolutions of 3 × 3, ", t.network.hidden, " channels, ", weights, " weights, ",
                                             settings.float64 ? "float64" : "float32")},
                 {"training", tessera::concat(t.epochs, " epochs, ", losses.size(), " steps of ", settings.batch,
                                              " samples or fewer over all ranks, AdamW, seed ", t.seed)},
                 {"who read what", parts},
                 {"start, reading, statistics", seconds(read_time)},
                 {"training time", seconds(training_time)},
                 {"forecasts and scores", seconds(test_time)},
                 {"data", "US Navy monthly winds 1982–1992 (Debian’s ferret-datasets, NOAA PMEL), public domain"}},
       .losses = losses,
       .steps_per_epoch = data.steps_per_epoch(),
       .test = test,
       .skills = skills,
       .forecast = forecasts.back().winds,
       .truth = truth,
       .latitude = data.latitude(),
       .longitude = data.longitude()},
      settings.report);
  std::cout << "report: " << settings.report << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(read_settings(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << "winds: " << error.what() << '\n';
    return 1;
  }
}
