#include "tessera/train/local_ranks.h"

#include "tessera/base/error.h"
#include "tessera/launch/local_run.h"

namespace tessera {

std::optional<int> start_local_ranks(int ranks, int argc, char** argv,
                                     const Environment& environment) {
  if (ranks < 1) throw InvalidArgument("a program was to start ", ranks, " ranks of itself");
  if (ranks == 1 || detect_launch(environment).launcher != "single") return std::nullopt;
  LocalRun run;
  run.ranks = ranks;
  // The file that runs, wherever argv[0] would be looked for.
  run.command = {"/proc/self/exe"};
  for (int i = 1; i < argc; ++i) run.command.emplace_back(argv[i]);
  return run_local(run).exit_status;
}

}  // namespace tessera
