#include <iostream>
#include <vector>

#include "commands.h"
#include "tessera/base/error.h"

int main(int argc, char** argv) {
  CLI::App program("Tessera: distributed training for libtorch");
  program.name("tessera");
  program.require_subcommand(1);
  const std::vector<tessera::app::Command> commands{
      tessera::app::add_run(program), tessera::app::add_doctor(program),
      tessera::app::add_plan(program), tessera::app::add_bench(program)};
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? 0 : 2;
  }
  try {
    for (const auto& command : commands) {
      if (command.parser->parsed()) return command.run();
    }
  } catch (const std::exception& error) {
    std::cerr << "tessera: " << error.what() << "\n";
    return 125;
  }
  return 2;
}
