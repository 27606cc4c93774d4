#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "commands.h"
#include "report_page.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::app {
namespace {

struct ReportOptions {
  std::vector<std::string> runs;
  std::string out;
  std::optional<int> watch;
};

std::vector<RunLog> read_runs(const std::vector<std::string>& paths) {
  std::vector<RunLog> runs;
  for (const std::string& path : paths) runs.push_back(read_run(path));
  // Runs that end in one name ("a/logs", "b/logs") have their paths.
  for (std::size_t i = 0; i < runs.size(); ++i)
    for (std::size_t j = 0; j < runs.size(); ++j)
      if (i != j && runs[i].name == runs[j].name) runs[i].name = paths[i];
  return runs;
}

bool has_numbers(const std::vector<RunLog>& runs) {
  for (const RunLog& run : runs)
    if (!run.series.empty()) return true;
  return false;
}

// Beside the log of the first run.
std::string place_beside(const std::string& run) {
  const std::filesystem::path path(run);
  std::error_code absent;
  return ((std::filesystem::is_directory(path, absent) ? path : path.parent_path()) / "report.html")
      .string();
}

int report(const ReportOptions& options) {
  const std::string out = options.out.empty() ? place_beside(options.runs[0]) : options.out;
  std::vector<RunLog> runs = read_runs(options.runs);
  if (!options.watch && !has_numbers(runs))
    throw InvalidArgument("no numbers in ", list(options.runs),
                          ": a run's folder holds metrics.csv or metrics.jsonl (a line with step, "
                          "epoch, seconds, name, value; or an object with \"step\"); or name the "
                          "file");
  for (bool again = false;; again = true) {
    write_page(report_page(runs, options.watch.value_or(0)), out);
    if (!again) std::cout << "the report is in " << out << std::endl;
    if (!options.watch) return 0;
    std::this_thread::sleep_for(std::chrono::seconds(*options.watch));
    runs = read_runs(options.runs);
  }
}

}  // namespace

Command add_report(CLI::App& program) {
  const auto options = std::make_shared<ReportOptions>();
  CLI::App* parser = program.add_subcommand(
      "report", "Draw what runs have logged: one HTML page that needs nothing beside it");
  parser
      ->add_option("runs", options->runs,
                   "Folders of runs (metrics.csv, metrics.jsonl, checkpoints), or files of that "
                   "kind; several are compared")
      ->required();
  parser->add_option("--out", options->out, "The page; by default report.html in the first run");
  parser
      ->add_option("--watch", options->watch,
                   "Write it again every so many seconds, until interrupted; the browser follows")
      ->check(CLI::Range(1, 86400));
  return {parser, [options] { return report(*options); }};
}

}  // namespace tessera::app
