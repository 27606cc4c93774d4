#pragma once
// Hostile suites: cases that are drawn from a seed. `make test` gives each suite the seeds that had
// found something, and a few more; `make hostile` gives it others for as long as it is told. What
// that finds becomes a case: its seed goes into the suite's list, with what was wrong.
//
// A program with such suites has hostile_main.cpp among its sources:
//   test_hostile_train --seed=42                   that seed alone
//   test_hostile_train --seed=1000 --seconds=60    from there on, for a minute

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <random>
#include <string>
#include <vector>

namespace tessera::testing {

struct HostileRun {
  std::string program;
  /// Below 0: the seeds of `make test`.
  std::int64_t seed = -1;
  /// For all tests of the program together.
  double seconds = 0;
};

/// What the command line says.
inline HostileRun& hostile_run() {
  static HostileRun run;
  return run;
}

/// Calls `body` with each seed of this run, until one fails.
inline void for_seeds(const std::vector<std::uint64_t>& found, int count,
                      const std::function<void(std::uint64_t)>& body) {
  using Clock = std::chrono::steady_clock;
  const HostileRun& run = hostile_run();
  const auto began = Clock::now();
  const auto* unit = ::testing::UnitTest::GetInstance();
  std::int64_t done = 0;
  const auto one = [&](std::uint64_t seed) {
    ++done;
    {
      const ::testing::ScopedTrace trace(__FILE__, __LINE__, "seed " + std::to_string(seed));
      try {
        body(seed);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "thrown: " << error.what();
      }
    }
    if (!::testing::Test::HasFailure()) return true;
    const auto* test = unit->current_test_info();
    std::cout << "hostile: again by " << run.program
              << " --gtest_filter=" << test->test_suite_name() << '.' << test->name()
              << " --seed=" << seed << std::endl;
    return false;
  };
  if (run.seed < 0) {
    for (const std::uint64_t seed : found)
      if (!one(seed)) return;
    for (int n = 1; n <= count; ++n)
      if (!one(static_cast<std::uint64_t>(n))) return;
    return;
  }
  const double limit = run.seconds / std::max(1, unit->test_to_run_count());
  const auto first = static_cast<std::uint64_t>(run.seed);
  const auto spent = [&] { return std::chrono::duration<double>(Clock::now() - began).count(); };
  for (std::uint64_t seed = first; seed == first || spent() < limit; ++seed)
    if (!one(seed)) break;
  std::cout << "hostile: " << done << " seeds from " << first << std::endl;
}

/// Draws by the raw engine alone, so that a seed is the same case everywhere.
class Draws {
 public:
  explicit Draws(std::uint64_t seed) : engine_(seed) {}
  int below(int n) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(n)); }
  int between(int low, int high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
  /// In [low, high), with all the digits of a double.
  double real(double low, double high) {
    return low + (high - low) * static_cast<double>(engine_() >> 11) * 0x1p-53;
  }
  template <class T>
  const T& of(const std::vector<T>& all) {
    return all[static_cast<std::size_t>(below(static_cast<int>(all.size())))];
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace tessera::testing
