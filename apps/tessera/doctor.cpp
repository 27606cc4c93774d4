#include "beside.h"
#include "commands.h"

namespace tessera::app {

Command add_doctor(CLI::App& program) {
  CLI::App* parser = program.add_subcommand(
      "doctor",
      "Say what this machine and this launch offer, and what will not work (--check tries it)");
  parser->set_help_flag();  // Its own --help goes to the program that does the work.
  parser->prefix_command();
  return {parser,
          [parser]() -> int { become("tessera-doctor", "tessera_doctor", parser->remaining()); }};
}

}  // namespace tessera::app
