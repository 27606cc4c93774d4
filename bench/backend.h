#pragma once
// What benchmarks on two ranks share: the option --backend, and a call of both timed.

#include <ATen/ops/full.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <functional>
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

/// Seconds of one of `repeats` calls in a row, begun together; the slowest rank counts. Collective.
inline double seconds_of(const Group& ranks, int repeats, const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  ranks.barrier();
  const auto start = Clock::now();
  for (int i = 0; i < repeats; ++i) call();
  const at::Tensor slowest = at::full(
      {1}, std::chrono::duration<double>(Clock::now() - start).count() / repeats, at::kDouble);
  ranks.all_reduce(slowest, ReduceOp::max);
  return slowest.item<double>();
}

}  // namespace tessera::bench
