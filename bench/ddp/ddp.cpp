// Time of a training step: our DistributedDataParallel in C++, Python's, and c10d::Reducer called
// from C++; same wheel, model, data, ranks and threads (sides.h).

#include <string>

#include "harness.h"
#include "sides.h"

namespace {

using namespace tessera::bench;

constexpr double kLimit = 1.03;

void measure(Report& report, const Programs& programs) {
  for (const std::string model : {"winds", "small", "wide"}) {
    const std::string beside_python = model + " beside Python",
                      beside_reducer = model + " beside c10d::Reducer";
    if (!report.wants(beside_python) && !report.wants(beside_reducer)) continue;
    Side ours({programs.rank}, model);
    if (report.wants(beside_python)) {
      Side theirs({programs.python, programs.script}, model);
      compare(report, beside_python, ours, theirs, "Python's DDP", kLimit);
    }
    if (report.wants(beside_reducer)) {
      Side theirs({programs.rank, "--reducer"}, model);
      compare(report, beside_reducer, ours, theirs, "c10d::Reducer in C++", kLimit);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return drive(argc, argv, "ddp",
               "Step time of DistributedDataParallel beside Python's and beside c10d::Reducer",
               measure);
}
