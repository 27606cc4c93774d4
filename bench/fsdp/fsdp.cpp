// Fully sharded training: fully_shard() in C++ and from Python beside Python's
// torch.distributed.fsdp.fully_shard; same wheel, model, data, ranks and threads (sides.h). Time of
// a step, the most bytes of tensors that a rank holds, and what a unit costs the thread it is on.

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "harness.h"
#include "sides.h"

namespace {

using namespace tessera::bench;
using tessera::concat;

constexpr double kLimit = 0.9, kBackendLimit = 1.03;
// The fewest pairs, since a step of Python's takes up to 0.2 s.
constexpr int kFewPairs = 31;
constexpr int kUnits = 32, kUnitSteps = 3;
constexpr double kUnitMicroseconds = 50;
// From Python, whose own part of a step is in both.
constexpr double kFromPythonLimit = 0.7, kFromPythonMicroseconds = 150;
const char* const kTheirs = "Python's fully_shard";

/// What starts a rank of each side, without the model.
struct Commands {
  std::vector<std::string> ours, theirs;
};

// Python's own, over our backend beside Gloo.
void compare_backends(Report& report, const std::string& name, const std::vector<std::string>& over,
                      const std::vector<std::string>& gloo, const std::string& model) {
  try {
    Side ours(over, model), theirs(gloo, model);
    check_equal_training(name, ours, theirs);
    compare(report, name, ours, theirs, concat(kTheirs, ", gloo"), kBackendLimit, kFewPairs);
  } catch (const tessera::NotAvailable& e) {
    std::printf("%s: skipped: %s\n", name.c_str(), e.what());
  }
}

// The same bytes in every step but the first ones, so that there is nothing to sample.
void compare_memory(Report& report, const std::string& name, const Commands& commands,
                    const std::string& model) {
  Side ours(commands.ours, model), theirs(commands.theirs, model);
  check_same_training(name, ours, theirs);
  const double bytes = ours.run(3).peak_bytes, their_bytes = theirs.run(3).peak_bytes;
  if (!(bytes > 0) || !(their_bytes > 0)) throw tessera::Error(name, ": no bytes were counted");
  report.beside(name, "peak bytes", bytes, "B", kTheirs, their_bytes, kLimit);
}

// Seconds of the training thread for each unit and step, above those of the same module unsharded.
double added(Side& sharded, Side& plain) {
  return (sharded.run(kUnitSteps).cpu_seconds - plain.run(kUnitSteps).cpu_seconds) /
         (kUnitSteps * kUnits);
}

// `model`: of ours, "units" over Gloo as Python's or "units shm". `limit`: microseconds.
void compare_units(Report& report, const std::string& name, const Commands& commands,
                   const std::string& model, double limit) {
  Side ours(commands.ours, model), ours_plain(commands.ours, "units plain"),
      theirs(commands.theirs, "units"), theirs_plain(commands.theirs, "units plain");
  check_same_training(name, ours, theirs);
  check_same_training(name + ", unsharded", ours_plain, theirs_plain);
  std::vector<double> values, references;
  for (const auto& [a, b] : alternate(
           kFewPairs, [&] { return added(ours, ours_plain); },
           [&] { return added(theirs, theirs_plain); })) {
    values.push_back(a * 1e6);
    references.push_back(b * 1e6);
  }
  Record record;
  record.name = name;
  record.metric = "added to a step";
  record.value = median(values);
  record.unit = "us";
  record.reference = kTheirs;
  record.reference_value = median(references);
  record.limit = limit;
  record.holds = record.value <= limit;
  report.add(record);
}

}  // namespace

int main(int argc, char** argv) {
  std::string counter;
  return drive(
      argc, argv, "fsdp",
      "Time, memory and host cost of fully sharded training beside Python's fully_shard",
      [&](Report& report, const Programs& programs) {
        const std::vector<std::string> script = {programs.python, programs.script, counter};
        const auto with = [](std::vector<std::string> command, const char* backend) {
          command.emplace_back(backend);
          return command;
        };
        const Commands commands{{programs.rank, "gloo"}, with(script, "gloo")};
        const Commands from_python{with(script, "ours"), with(script, "gloo")};
        for (const std::string model : {"small", "wide"}) {
          const std::string time = model + " beside Python", memory = model + " memory";
          if (report.wants(time)) {
            Side ours(commands.ours, model), theirs(commands.theirs, model);
            compare(report, time, ours, theirs, kTheirs, kLimit, kFewPairs);
          }
          const std::string by_default = model + " by default beside Python over Gloo";
          if (report.wants(by_default)) {
            Side ours({programs.rank, "auto"}, model), theirs(commands.theirs, model);
            compare(report, by_default, ours, theirs, kTheirs, kLimit, kFewPairs);
          }
          const std::string python = model + ", Python's over tessera beside Gloo";
          if (report.wants(python))
            compare_backends(report, python, with(script, "tessera"), commands.theirs, model);
          if (report.wants(memory)) compare_memory(report, memory, commands, memory);
          const std::string ours_too = model + " from Python beside Python";
          if (report.wants(ours_too)) {
            Side ours(from_python.ours, model), theirs(from_python.theirs, model);
            compare(report, ours_too, ours, theirs, kTheirs, kFromPythonLimit, kFewPairs);
          }
          const std::string held = memory + " from Python";
          if (report.wants(held)) compare_memory(report, held, from_python, memory);
        }
        // A model that is made on no rank whole.
        const std::string made = "construction", held = made + " memory";
        if (report.wants(made)) {
          Side ours(commands.ours, made), theirs(commands.theirs, made);
          compare(report, made, ours, theirs, "Python's meta device", kBackendLimit, kFewPairs);
        }
        if (report.wants(held)) compare_memory(report, held, commands, held);
        const std::string unit = "a unit of four small layers";
        if (report.wants(unit)) compare_units(report, unit, commands, "units", kUnitMicroseconds);
        if (report.wants(unit + " from Python"))
          compare_units(report, unit + " from Python", from_python, "units",
                        kFromPythonMicroseconds);
        // What users get on one host; to wait for the other rank costs processor time there.
        const std::string shared = unit + ", shared memory";
        if (report.wants(shared))
          compare_units(report, shared, commands, "units shm", kUnitMicroseconds);
      },
      [&](CLI::App& app) {
        app.add_option("--counter", counter, "libbench_counter.so")->required();
      },
      kFewPairs);
}
