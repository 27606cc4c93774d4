// tessera-doctor: what this machine and this launch offer, and one line of advice for each thing
// that will not work.

#include <CLI/CLI.hpp>

#include <iostream>
#include <sstream>

#include "report.h"
#include "tessera/base/text.h"
#include "tessera/launch/launch.h"

namespace {

// The launch, or why it cannot be told. Returns the rank that this process believes to have.
int report_launch(tessera::app::Report& report) {
  report.section("This launch");
  try {
    const tessera::Launch launch = tessera::detect_launch(tessera::Environment::of_process());
    tessera::TextReader lines(tessera::to_text(launch));
    for (std::string line; std::getline(lines, line);) {
      const auto blank = line.find(' ');
      const auto value = line.find_first_not_of(' ', blank);
      report.line(line.substr(0, blank), line.substr(value));
    }
    tessera::require_rendezvous(launch);
    return launch.rank;
  } catch (const std::exception& error) {
    report.problem(error.what());
    return 0;
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program("What this machine and this launch offer, and advice for what will not work");
  program.name("tessera doctor");
  bool check = false;
  std::string backend;
  program.add_flag(
      "--check", check,
      "Run a short all-reduce on every backend that is there; exit status 1 if one fails");
  program.add_option("--check-rank", backend, "One rank of a check, over this backend")->group("");
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? 0 : 2;
  }
  try {
    if (!backend.empty()) {
      tessera::app::check_rank(backend);
      return 0;
    }
    tessera::app::Report report;
    tessera::app::report_machine(report);
    const int rank = report_launch(report);
    tessera::app::report_libraries(report);
    // A check of an unknown launch would fail for the reason that stands above.
    if (check && report.problems() == 0) tessera::app::report_check(report);
    // One rank speaks for all, unless another has something to say.
    if (rank == 0 || report.problems() > 0) {
      std::cout << report.text() << "\n"
                << (report.advices() == 0
                        ? std::string("Nothing to advise.")
                        : tessera::concat(report.advices(), " to look at, marked ->"))
                << "\n";
    }
    return report.problems() == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << "tessera doctor: " << error.what() << "\n";
    return 1;
  }
}
