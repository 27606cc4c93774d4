#include "beside.h"
#include "commands.h"

namespace tessera::app {

Command add_bench(CLI::App& program) {
  CLI::App* parser = program.add_subcommand("bench", "Measure this machine");
  parser->require_subcommand(1);
  CLI::App* topology = parser->add_subcommand(
      "topology",
      "Measure the links between the ranks of a job; writes what `plan --topology` reads");
  topology->set_help_flag();  // Its own --help goes to the program that does the work.
  topology->prefix_command();
  return {parser, [topology]() -> int {
            become("tessera-bench-topology", "tessera_bench_topology", topology->remaining());
          }};
}

}  // namespace tessera::app
