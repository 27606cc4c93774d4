#include <fcntl.h>
#include <unistd.h>

#include <iostream>
#include <vector>

#include "commands.h"
#include "tessera/base/error.h"

namespace {

// A descriptor that the caller closed ("tessera run ... >&-") would be the number of the next file
// or socket that is opened, which then gets the output.
void open_standard_descriptors() {
  for (int fd = 0; fd < 3; ++fd) {
    while (fcntl(fd, F_GETFD) < 0) {
      if (open("/dev/null", O_RDWR) < 0) return;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_descriptors();
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
      if (!command.parser->parsed()) continue;
      const int status = command.run();
      std::cout.flush();
      if (!std::cout) throw tessera::Error("the standard output cannot be written");
      return status;
    }
  } catch (const std::exception& error) {
    std::cerr << "tessera: " << error.what() << "\n";
    return 125;
  }
  return 2;
}
