// Time of a training step: our DistributedDataParallel in C++, Python's, and c10d::Reducer called
// from C++; same wheel, model, data, ranks and threads (sides.h).

#include <signal.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "harness.h"
#include "sides.h"
#include "tessera/base/text.h"

namespace {

using tessera::concat;
using tessera::bench::compare;
using tessera::bench::kPairs;
using tessera::bench::kRanks;
using tessera::bench::Side;

constexpr double kLimit = 1.03;

int run(const std::string& rank_program, const std::string& python, const std::string& script,
        const std::string& out, const std::string& only) {
  tessera::bench::Report report("ddp", out);
  report.only(only);
  report.meta("ranks", kRanks);
  report.meta("threads_per_rank", 1);
  report.meta("backend", "gloo");
  report.meta("pairs", kPairs);
  for (const std::string model : {"winds", "small", "wide"}) {
    const std::string beside_python = concat(model, " beside Python"),
                      beside_reducer = concat(model, " beside c10d::Reducer");
    if (!report.wants(beside_python) && !report.wants(beside_reducer)) continue;
    Side ours({rank_program}, model);
    if (report.wants(beside_python)) {
      Side theirs({python, script}, model);
      compare(report, beside_python, ours, theirs, "Python's DDP", kLimit);
    }
    if (report.wants(beside_reducer)) {
      Side theirs({rank_program, "--reducer"}, model);
      compare(report, beside_reducer, ours, theirs, "c10d::Reducer in C++", kLimit);
    }
  }
  return report.finish();
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Step time of DistributedDataParallel beside Python's and beside c10d::Reducer");
  std::string rank_program, python, script, out, only;
  app.add_option("--rank-program", rank_program, "bench_ddp_rank")->required();
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
    std::fprintf(stderr, "bench_ddp: %s\n", e.what());
    return 2;
  }
}
