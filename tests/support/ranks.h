#pragma once
// The ranks of a case: threads of this process, or processes that a launcher started. A program
// whose main() is run_ranks() (PROCESSES of tessera_test) takes both:
//
//   test_nn_experts                                            ranks are threads
//   tessera run -n 3 -- test_nn_experts --backend=gloo         this process is one of three ranks
//   mpiexec -n 3 test_nn_experts --backend=mpi

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <string>

#include "program_cases.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/threads.h"

namespace tessera::test {

// Ranks may be threads of one process: libtorch's default generator would be shared by all. Each
// thread has one of its own, seeded alike.
inline at::Generator& generator() {
  static thread_local at::Generator one = at::detail::createCPUGenerator();
  return one;
}
inline void seed(std::uint64_t n) { generator().set_current_seed(n); }

/// This process as one of the ranks; null where ranks are threads.
inline std::unique_ptr<DistributedManager>& process() {
  static std::unique_ptr<DistributedManager> one;
  return one;
}
/// How many bodies this process has run as a rank.
inline int& bodies_run() {
  static int n = 0;
  return n;
}

/// What a case may have changed of a job and the next one expects as it was: of a room above comm.
inline std::function<void(DistributedManager&)>& before_each() {
  static std::function<void(DistributedManager&)> one;
  return one;
}

/// Runs `body` on each of `ranks` ranks. As processes: on this one, if the job has as many and
/// `options` name no back end; else nothing. A rank that cannot go on as the others do ends there,
/// which the others are told.
inline void on_ranks(int ranks, const std::function<void(DistributedManager&)>& body,
                     // Ranks that disagree wait for each other: not for long.
                     const ManagerOptions& options = {.timeout = std::chrono::seconds(20)}) {
  const auto seeded = [&](DistributedManager& manager) {
    at::set_num_threads(1);
    seed(0);
    body(manager);
  };
  const auto& job = process();
  if (!job) return run_threads(ranks, seeded, options);
  const bool any = options.backend.empty() || options.backend == "threads";
  if (ranks != job->world_size() || !any) {
    std::cout << concat("  not for ", job->world_size(), " ranks: a case of ", ranks, "\n");
    return;
  }
  ++bodies_run();
  if (before_each()) before_each()(*job);
  job->set_check_level(options.check_level);
  try {
    seeded(*job);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << job->rank() << " threw: " << error.what();
    std::_Exit(1);
  }
  if (::testing::Test::HasFatalFailure()) std::_Exit(1);
}

/// main() of a program whose ranks are threads or, with --backend=NAME, processes; `programs` are
/// those in one executable (program_cases.h).
inline int run_ranks(int argc, char** argv, const char* programs = "") {
  ::testing::InitGoogleTest(&argc, argv);
  keep_cases_of(argv[0], programs);
  at::set_num_threads(1);
  const std::string name = "--backend=";
  ManagerOptions options;
  options.timeout = std::chrono::seconds(60);
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (!argument.starts_with(name)) {
      std::cerr << concat("unknown argument '", argument, "'\n");
      return 2;
    }
    options.backend = argument.substr(name.size());
  }
  if (options.backend.empty()) return RUN_ALL_TESTS();
  process() = std::make_unique<DistributedManager>(DistributedManager::initialize(options));
  int failed = RUN_ALL_TESTS();
  if (bodies_run() == 0) {
    std::cerr << "no case ran: none is for " << process()->world_size() << " ranks\n";
    failed = 1;
  }
  process()->shutdown();
  process().reset();
  return failed;
}

}  // namespace tessera::test
