// winds: forecasts next month's winds with a small convolutional network, trained on samples and
// latitudes that are cut over the ranks.
//
//   tessera run -n 2 -- winds --report winds.html
//   tessera run -n 4 -- winds --mesh data=2,domain=2

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "report.h"
#include "skill.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/data/sources/netcdf_source.h"
#include "training.h"

namespace {

using namespace winds;

struct Settings {
  std::string data = WINDS_DATA;
  std::string report, backend = "auto";
  bool float64 = false;
  std::int64_t batch = 16;
  std::int64_t validation_years = 0;
  std::vector<std::string> mesh;
  TrainingOptions training;
};

Settings read_settings(int argc, char** argv) {
  Settings settings;
  CLI::App app{
      "Forecasts next month's winds with a small network, trained on 1982-1989 and judged on "
      "1990-1992"};
  app.add_option("--data", settings.data,
                 "netCDF file with UWND and VWND(TIME, lat, lon), months from January 1982")
      ->capture_default_str();
  app.add_option("--mesh", settings.mesh,
                 "Ranks along each axis, as data=2,domain=2: samples are cut over data, latitudes "
                 "over domain. Default: domain is the largest of 3, 2 "
                 "and 1 that divides the number of ranks")
      ->delimiter(',');
  app.add_option("--report", settings.report, "Write a report in HTML to this file");
  app.add_option(
      "--checkpoint", settings.training.checkpoint,
      "Save in this folder after every epoch, and go on from what is there, on any mesh");
  app.add_option("--epochs", settings.training.epochs, "Passes over the training samples")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch", settings.batch, "Samples of a step, over all ranks")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--learning-rate", settings.training.learning_rate, "Of AdamW, at its highest")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--weight-decay", settings.training.weight_decay, "Of AdamW")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--hidden", settings.training.network.hidden, "Channels of the hidden layers")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--layers", settings.training.network.layers,
                 "Convolutions; 0: the linear way around them alone")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--backend", settings.backend,
                 "What ranks speak over: auto (memory inside a host), gloo, shm, mpi")
      ->capture_default_str();
  app.add_option("--seed", settings.training.seed, "Of the weights and of the order of samples")
      ->capture_default_str();
  app.add_option("--validate", settings.validation_years,
                 "Hold the last N years of 1982-1989 out of the training and judge on them instead "
                 "of 1990-1992: for choosing settings")
      ->check(CLI::Range(1, 5))
      ->excludes("--report");
  app.add_flag(
      "--double", settings.float64,
      "Train in float64: the loss curve is then the same, to round-off, for every number of ranks");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return settings;
}

// "data=2", "domain=2" as a mesh of both axes over all ranks.
std::vector<tessera::Axis> mesh_axes(const std::vector<std::string>& wanted, int ranks) {
  int domain = ranks % 3 == 0 ? 3 : ranks % 2 == 0 ? 2 : 1;
  if (wanted.empty()) return {{"data", ranks / domain}, {"domain", domain}};
  std::vector<tessera::Axis> axes{{"data", 1}, {"domain", 1}};
  for (const std::string& item : wanted) {
    const auto equals = item.find('=');
    const auto axis = std::ranges::find_if(
        axes, [&](const tessera::Axis& a) { return a.name == item.substr(0, equals); });
    const std::string digits = equals == std::string::npos ? "" : item.substr(equals + 1);
    int size = 0;
    const auto [end, fault] = std::from_chars(digits.data(), digits.data() + digits.size(), size);
    if (axis == axes.end() || fault != std::errc() || end != digits.data() + digits.size() ||
        size < 1)
      throw tessera::InvalidArgument(tessera::concat(
          "--mesh: '", item, "' is not data=N or domain=N with a number from 1 on"));
    axis->size = size;
  }
  if (axes[0].size * axes[1].size != ranks)
    throw tessera::InvalidArgument(tessera::concat("--mesh: ", axes[0].size, " x ", axes[1].size,
                                                   " is not the number of ranks, ", ranks));
  return axes;
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
  tessera::ManagerOptions how;
  how.backend = settings.backend;
  auto manager = tessera::DistributedManager::initialize(how);
  const tessera::Group world = manager.world();
  const bool first = world.rank() == 0;

  const tessera::DeviceMesh mesh = manager.mesh(mesh_axes(settings.mesh, world.size()));

  const tessera::NetcdfSource source(settings.data);
  const std::int64_t train_months = (8 - settings.validation_years) * months_a_year;
  const Months test{
      train_months,
      train_months + (settings.validation_years ? settings.validation_years : 3) * months_a_year};
  const WindsData data(source, mesh, train_months, settings.batch,
                       settings.float64 ? at::kDouble : at::kFloat);
  const std::int64_t values_read = data.values_read();
  const double read_time = seconds_since(start);

  std::vector<double> losses;
  const auto training_start = std::chrono::steady_clock::now();
  WindNet network =
      train(data, settings.training, [&](const Step& step) { losses.push_back(step.loss); });
  const double training_time = seconds_since(training_start);

  // Each rank forecasts its own months and latitudes of the test.
  const auto test_start = std::chrono::steady_clock::now();
  std::vector<Forecast> forecasts = baselines(data, data.own(test));
  forecasts.push_back({"network", forecast(network, data, test)});
  for (Forecast& f : forecasts) f.winds = data.whole(f.winds, test);
  const at::Tensor truth = data.whole(data.read(data.own(test)), test);
  const auto read = world.gather_bytes(std::to_string(values_read), 0);
  if (!first) return;

  std::vector<Skill> skills;
  for (const Forecast& f : forecasts) skills.push_back(skill_of(f, truth, data.latitude()));
  const double test_time = seconds_since(test_start);
  std::cout << "Winds of " << month_name(test.begin) << " to " << month_name(test.end - 1)
            << ", each month forecast from the one before\n"
            << skill_table(skills) << "trained in " << seconds(training_time) << " on "
            << world.size() << (world.size() == 1 ? " rank" : " ranks") << '\n';
  if (settings.report.empty()) return;

  std::int64_t weights = 0;
  for (const auto& p : network->parameters()) weights += p.numel();
  std::vector<Owned> owned;
  std::string parts;
  const double all_values = static_cast<double>(variables * train_months * data.latitude().size(0) *
                                                data.longitude().size(0));
  for (int r = 0; r < world.size(); ++r) {
    owned.push_back(data.owned_by(r));
    const Owned& o = owned.back();
    parts += tessera::concat(
        r ? "<br>" : "", "rank ", r, ": ", o.samples.count(), " samples, ", o.rows.size(),
        " latitudes; ",
        std::lround(100 * std::stod(read[static_cast<std::size_t>(r)]) / all_values),
        " % of the training’s winds");
  }
  const TrainingOptions& t = settings.training;
  write_report(
      {.facts = {{"ranks", tessera::concat(world.size(), ", started by ", manager.launch().launcher,
                                           ", ", at::get_num_threads(), " thread(s) each")},
                 {"mesh", tessera::concat("data ", mesh.mesh().size("data"), " × domain ",
                                          mesh.mesh().size("domain"))},
                 {"backend", tessera::concat(world.backend(), " on ", manager.device().str())},
                 {"libtorch", TORCH_VERSION},
                 {"network", tessera::concat(t.network.layers, " convolutions of 3 × 3, ",
                                             t.network.hidden, " channels, ", weights, " weights, ",
                                             settings.float64 ? "float64" : "float32")},
                 {"training",
                  tessera::concat(t.epochs, " epochs, ", losses.size(), " steps of ",
                                  settings.batch, " samples or fewer over all ranks, AdamW, seed ",
                                  t.seed)},
                 {"who has read what", parts},
                 {"start, reading, statistics", seconds(read_time)},
                 {"training time", seconds(training_time)},
                 {"forecasts and scores", seconds(test_time)},
                 {"data",
                  "US Navy monthly winds 1982–1992 (Debian’s ferret-datasets, NOAA PMEL), public "
                  "domain"}},
       .losses = losses,
       .steps_per_epoch = data.steps_per_epoch(),
       .test = test,
       .skills = skills,
       .forecast = forecasts.back().winds,
       .truth = truth,
       .owned = owned,
       .train_months = train_months,
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
