#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "commands.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/nearest.h"
#include "tessera/base/text.h"
#include "tessera/version.h"

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

// Says which commands there are where the first argument is none. The parser would take it for an
// argument of no command.
bool is_no_command(const std::string& word, const std::vector<tessera::app::Command>& commands) {
  std::vector<std::string> names;
  for (const auto& command : commands) names.push_back(command.parser->get_name());
  if (word.empty() || word[0] == '-' || std::ranges::find(names, word) != names.end()) return false;
  std::cerr << tessera::concat("tessera: '", word.substr(0, 60),
                               "' is no command; the nearest is '", tessera::nearest(word, names),
                               "'. There are ", tessera::list(names), "; tessera --help\n");
  return true;
}

// mpirun's -np: the parser would read it as -n with the number "p".
void accept_np(std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0] != "run") return;
  for (std::string& argument : arguments) {
    if (argument == "-n" || argument == "--" || argument.starts_with("--ranks") ||
        argument.starts_with("--nproc"))
      return;
    if (argument == "-np") {
      argument = "--np";
      return;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_descriptors();
  CLI::App program("Tessera: distributed training for libtorch");
  program.name("tessera");
  program.set_version_flag("--version", "tessera " TESSERA_VERSION);
  const std::vector<tessera::app::Command> commands{
      tessera::app::add_run(program),    tessera::app::add_doctor(program),
      tessera::app::add_plan(program),   tessera::app::add_bench(program),
      tessera::app::add_report(program), tessera::app::add_new(program)};
  std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  if (arguments.empty()) {
    std::cout << program.help();
    return 0;
  }
  if (is_no_command(arguments[0], commands)) return 2;
  accept_np(arguments);
  std::ranges::reverse(arguments);  // as the parser takes them
  try {
    program.parse(arguments);
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
    // An argument or a file that the caller can correct, or what could not work.
    return dynamic_cast<const tessera::InvalidArgument*>(&error) ||
                   dynamic_cast<const tessera::ConfigurationError*>(&error)
               ? 2
               : 125;
  }
  return 2;
}
