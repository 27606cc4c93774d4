#pragma once
// The subcommands of the program `tessera`. Each adds its options to the parser and returns what
// runs it.

#include <CLI/CLI.hpp>

#include <functional>

namespace tessera::app {

struct Command {
  CLI::App* parser;
  /// Returns the exit status.
  std::function<int()> run;
};

Command add_run(CLI::App& program);
Command add_bench(CLI::App& program);
Command add_doctor(CLI::App& program);
Command add_new(CLI::App& program);
Command add_plan(CLI::App& program);
Command add_report(CLI::App& program);

}  // namespace tessera::app
