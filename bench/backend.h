#pragma once
// The option --backend of benchmarks on two ranks.

#include <CLI/CLI.hpp>
#include <string>

#include "tessera/comm/job/manager.h"

namespace tessera::bench {

inline void add_backend(CLI::App& app, std::string& backend) {
  app.add_option("--backend", backend,
                 "gloo, shm, auto (what groups of one host use by default), or mpi under MPI's "
                 "launcher")
      ->check(CLI::IsMember({"auto", "gloo", "mpi", "shm"}))
      ->capture_default_str();
}

/// What the ranks speak over, which cases are named after. Collective where `asked` is auto.
inline std::string backend_of(const std::string& asked, const DistributedManager& manager) {
  return asked == "auto" ? manager.world().backend() : asked;
}

}  // namespace tessera::bench
