#include "tessera/checkpoint/detail/spread.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/launch/internal/cores.h"

namespace tessera::detail {

namespace {

// More readers of one disk gain nothing, and copies alone are bound by the memory.
constexpr int kMostThreads = 4;

}  // namespace

int threads_of_rank(int asked, int ranks) {
  if (asked < 0)
    throw InvalidArgument(concat("LoadOptions::threads is ", asked, "; 0 leaves the choice open"));
  return asked > 0 ? asked : std::min(kMostThreads, threads_per_rank(cpu_budget().usable(), ranks));
}

void spread(int threads, std::size_t count,
            const std::function<void(std::size_t i, std::size_t worker)>& work) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr thrown;
  const auto run = [&](std::size_t worker) {
    try {
      for (std::size_t i = next++; i < count; i = next++) work(i, worker);
    } catch (...) {
      next = count;
      const std::lock_guard lock(mutex);
      if (!thrown) thrown = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  const std::size_t most = std::min(static_cast<std::size_t>(std::max(threads, 1)), count);
  others.reserve(most);
  try {
    while (others.size() + 1 < most) others.emplace_back(run, others.size() + 1);
  } catch (const std::exception&) {
    // The system has no more threads, or no memory for one: those that are there do the work.
  }
  run(0);
  for (std::thread& other : others) other.join();
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace tessera::detail
