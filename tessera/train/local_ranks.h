#pragma once
// A program that starts its own ranks where no launcher has.
//
//   int main(int argc, char** argv) {
//     if (const auto status = tessera::start_local_ranks(4, argc, argv)) return *status;
//     auto manager = tessera::DistributedManager::initialize();   // one of four ranks
//     ...

#include <optional>

#include "tessera/launch/launch.h"

namespace tessera {

/// Where a launcher has started this process, or `ranks` is 1: nothing. Otherwise runs this program
/// again, `ranks` times with the same arguments, waits for them as `tessera run` does (run_local),
/// and returns the exit status for main() to return. Call it before anything else: the process has
/// one thread then. `environment`: where to look for a launcher. Throws InvalidArgument for less
/// than one rank, ConfigurationError as detect_launch() does.
std::optional<int> start_local_ranks(int ranks, int argc, char** argv,
                                     const Environment& environment = Environment::of_process());

}  // namespace tessera
