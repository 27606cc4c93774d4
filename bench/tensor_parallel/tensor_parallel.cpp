// Time of a training step of transformer blocks whose heads and features are sharded over two
// ranks: tensor_parallel() in C++ beside Python's parallelize_module; same wheel, model, data,
// ranks and threads (sides.h).

#include <string>

#include "harness.h"
#include "sides.h"

namespace {

using namespace tessera::bench;

constexpr double kLimit = 1.0;

void measure(Report& report, const Programs& programs) {
  for (const std::string model : {"small", "small sequence", "wide", "wide sequence"}) {
    const std::string name = model + " beside Python";
    if (!report.wants(name)) continue;
    Side ours({programs.rank}, model), theirs({programs.python, programs.script}, model);
    compare(report, name, ours, theirs, "Python's parallelize_module", kLimit);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return drive(argc, argv, "tensor_parallel",
               "Step time of tensor-parallel transformer blocks beside Python's", measure);
}
