// Time of a training step: our DistributedDataParallel in C++, Python's, and c10d::Reducer called
// from C++; same wheel, model, data, ranks and threads (sides.h). Over Gloo, and ours and Python's
// through memory beside Python's over Gloo.

#include <cstdio>
#include <string>
#include <vector>

#include "harness.h"
#include "sides.h"

namespace {

using namespace tessera::bench;

constexpr double kLimit = 1.03;
// Of the small network, whose step is mostly messages, through memory beside Gloo.
constexpr double kSmallLimit = 0.8;

// Ours, and Python's own DDP, over what groups of one host use by default, beside Python's DDP over
// Gloo.
void measure_default(Report& report, const Programs& programs, const std::string& model) {
  const std::string ours_name = model + " by default beside Python over Gloo",
                    theirs_name = model + ", Python's over tessera beside Gloo";
  const std::vector<std::string> python = {programs.python, programs.script};
  if (report.wants(ours_name)) {
    Side ours({programs.rank, "--backend", "auto"}, model), theirs(python, model);
    compare(report, ours_name, ours, theirs, "Python's DDP",
            model == "small" ? kSmallLimit : kLimit);
  }
  if (report.wants(theirs_name)) {
    try {
      Side over({programs.python, programs.script, "--backend", "tessera"}, model);
      Side theirs(python, model);
      check_equal_training(theirs_name, over, theirs);
      compare(report, theirs_name, over, theirs, "Python's DDP, gloo", kLimit);
    } catch (const tessera::NotAvailable& e) {
      std::printf("%s: skipped: %s\n", theirs_name.c_str(), e.what());
    }
  }
}

void measure(Report& report, const Programs& programs, const std::string& device) {
  report.meta("device", device);
  if (device == "cuda") report.meta("backend", "nccl");
  for (const std::string model : {"winds", "small", "wide"}) {
    if (device == "cpu") measure_default(report, programs, model);
    const std::string beside_python = model + " beside Python",
                      beside_reducer = model + " beside c10d::Reducer";
    if (!report.wants(beside_python) && !report.wants(beside_reducer)) continue;
    Side ours({programs.rank, "--device", device}, model);
    if (report.wants(beside_python)) {
      Side theirs({programs.python, programs.script, "--device", device}, model);
      compare(report, beside_python, ours, theirs, "Python's DDP", kLimit);
    }
    if (report.wants(beside_reducer)) {
      try {
        Side theirs({programs.rank, "--reducer", "--device", device}, model);
        compare(report, beside_reducer, ours, theirs, "c10d::Reducer in C++", kLimit);
      } catch (const tessera::NotAvailable& e) {
        std::printf("%s: skipped: %s\n", beside_reducer.c_str(), e.what());
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string device = "cpu";
  return drive(
      argc, argv, "ddp",
      "Step time of DistributedDataParallel beside Python's and beside c10d::Reducer",
      [&](Report& report, const Programs& programs) { measure(report, programs, device); },
      [&](CLI::App& app) {
        app.add_option("--device", device, "cpu, or cuda: GPUs, and NCCL between ranks")
            ->check(CLI::IsMember({"cpu", "cuda"}));
      });
}
