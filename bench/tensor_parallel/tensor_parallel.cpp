// Time of a training step of transformer blocks whose heads and features are sharded over two
// ranks: tensor_parallel() in C++ beside Python's parallelize_module; same wheel, model, data,
// ranks and threads (sides.h).

#include <signal.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "harness.h"
#include "sides.h"

namespace {

using tessera::bench::Side;

constexpr double kLimit = 1.0;

int run(const std::string& rank_program, const std::string& python, const std::string& script,
        const std::string& out, const std::string& only) {
  tessera::bench::Report report("tensor_parallel", out);
  report.only(only);
  report.meta("ranks", tessera::bench::kRanks);
  report.meta("threads_per_rank", 1);
  report.meta("backend", "gloo");
  report.meta("pairs", tessera::bench::kPairs);
  for (const std::string model : {"small", "small sequence", "wide", "wide sequence"}) {
    const std::string name = model + " beside Python";
    if (!report.wants(name)) continue;
    Side ours({rank_program}, model), theirs({python, script}, model);
    tessera::bench::compare(report, name, ours, theirs, "Python's parallelize_module", kLimit);
  }
  return report.finish();
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Step time of tensor-parallel transformer blocks beside Python's");
  std::string rank_program, python, script, out, only;
  app.add_option("--rank-program", rank_program, "bench_tensor_parallel_rank")->required();
  app.add_option("--python", python, "Python that has torch")->required();
  app.add_option("--script", script, "rank.py")->required();
  app.add_option("--out", out, "JSON file");
  app.add_option("--only", only,
                 "Only cases that this regular expression finds; the file keeps its other records");
  CLI11_PARSE(app, argc, argv);
  signal(SIGPIPE, SIG_IGN);
  try {
    return run(rank_program, python, script, out, only);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_tensor_parallel: %s\n", e.what());
    return 2;
  }
}
