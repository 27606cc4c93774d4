// relief: draws the relief of the earth four times finer than it is given, with the field cut over
// the ranks.
//
//   tessera run -n 3 -- relief --data etopo5.cdf --records build/relief --report relief.html
//
// Each run leaves a record; the report compares all records of the folder. showcases/relief/run
// fetches the data and runs on 1 to 4 ranks.

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>

#include "field.h"
#include "memory.h"
#include "record.h"
#include "report.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/data/sources/netcdf_source.h"
#include "training.h"

namespace {

using namespace relief;

struct Settings {
  std::string data, records, report, backend = "auto";
  bool float64 = false;
  TrainingOptions training;
};

Settings read_settings(int argc, char** argv) {
  Settings settings;
  CLI::App app{"Draws the relief of the earth four times finer, with the field cut over the ranks"};
  app.add_option("--data", settings.data,
                 "netCDF file with ROSE(lat, lon) in m: etopo5.cdf of Debian's ferret-datasets")
      ->required();
  app.add_option("--records", settings.records, "Folder of the runs' records");
  app.add_option("--report", settings.report, "Write a report of all records in HTML to this file");
  app.add_option("--steps", settings.training.steps, "Of the optimizer")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--learning-rate", settings.training.learning_rate, "Of Adam, at its highest")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--coarse", settings.training.network.coarse, "Channels on the coarse grid")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--fine", settings.training.network.fine, "Channels on the fine grid")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--backend", settings.backend,
                 "What ranks speak over: auto (memory inside a host), gloo, shm, mpi")
      ->capture_default_str();
  app.add_option("--seed", settings.training.seed, "Of the weights")->capture_default_str();
  app.add_flag(
      "--double", settings.float64,
      "Train in float64: losses are then the same, to round-off, for every number of ranks");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return settings;
}

// One number a rank, on rank 0.
std::vector<std::int64_t> gathered(const tessera::Group& world, std::int64_t mine) {
  std::vector<std::int64_t> all;
  for (const std::string& text : world.gather_bytes(std::to_string(mine), 0))
    all.push_back(std::stoll(text));
  return all;
}

void run(const Settings& settings) {
  tessera::ManagerOptions how;
  how.backend = settings.backend;
  auto manager = tessera::DistributedManager::initialize(how);
  const tessera::Group world = manager.world();
  const bool first = world.rank() == 0;
  const tessera::NetcdfSource source(settings.data);
  const auto mesh = manager.mesh({{"domain", world.size()}});

  Record record;
  std::vector<at::Tensor> window;
  std::int64_t own_rows = 0, read = 0, rows = 0, columns = 0;
  // Everything that a rank needs lives inside the count: its rows, weights, the optimizer's state,
  // activations, halos.
  const std::int64_t tensors = pictures::peak_tensor_bytes([&] {
    const Field field(source, "ROSE", mesh, settings.float64 ? at::kDouble : at::kFloat);
    const auto start = std::chrono::steady_clock::now();
    ReliefNet network = train(field, settings.training, [&](std::int64_t step, double loss) {
      record.losses.push_back(loss);
      if (first && (step % 10 == 9 || step == 0))
        std::fprintf(stderr, "step %lld of %lld: RMS error %.2f m\n",
                     static_cast<long long>(step + 1),
                     static_cast<long long>(settings.training.steps), std::sqrt(loss));
    });
    record.seconds_a_step =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() /
        static_cast<double>(settings.training.steps);
    const Score judged = score(network, field);
    record.interpolation = judged.interpolation;
    record.network = judged.network;
    own_rows = field.cut().size(mesh.coordinate()[0]);
    read = field.values_read();
    rows = field.rows();
    columns = field.columns();
    // 5 to 20 degrees north, 80 to 50 degrees west, on 5 arc minutes.
    if (!settings.report.empty())
      window = look(network, field, 95 * 12, 280 * 12, 15 * 12, 30 * 12);
  });
  record.rows = gathered(world, own_rows);
  record.values_read = gathered(world, read);
  record.tensor_bytes = gathered(world, tensors);
  record.resident_bytes = gathered(world, pictures::peak_resident_bytes());
  if (!first) return;

  std::printf(
      "%d rank(s): RMS error %.2f m by interpolation, %.2f m by the network; last loss %.17g m^2\n",
      world.size(), record.interpolation, record.network, record.losses.back());
  for (std::size_t r = 0; r < record.rows.size(); ++r)
    std::printf("rank %zu: %lld rows, peak of tensors %.0f MiB, of the process %.0f MiB\n", r,
                static_cast<long long>(record.rows[r]),
                static_cast<double>(record.tensor_bytes[r]) / (1 << 20),
                static_cast<double>(record.resident_bytes[r]) / (1 << 20));
  if (!settings.records.empty()) write_record(record, settings.records);
  if (settings.report.empty()) return;
  const NetworkOptions& n = settings.training.network;
  write_report(
      {.records =
           settings.records.empty() ? std::vector<Record>{record} : read_records(settings.records),
       .look = window,
       .place = "the Caribbean",
       .rows = rows,
       .columns = columns,
       .network = tessera::concat(
           "A small network: two convolutions of ", n.coarse,
           " channels on the coarse grid, a transposed one to ", n.fine,
           " channels on the fine grid, and one to draw what is to be added to an interpolation.")},
      settings.report);
  std::cout << "report: " << settings.report << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(read_settings(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << "relief: " << error.what() << '\n';
    return 1;
  }
}
