#include "tessera/comm/job/detail/make_in_time.h"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/group/detail/group_watch.h"

namespace tessera::detail {
namespace {

// What was woken usually ends within this time.
constexpr std::chrono::milliseconds kToEnd{300};

struct Making {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false, woken = false, left_behind = false;
  std::shared_ptr<GroupState> made;
  std::exception_ptr error;

  void run(const GroupSpec& spec) noexcept {
    std::shared_ptr<GroupState> result;
    std::exception_ptr failed;
    try {
      result = make_group_state(spec);
    } catch (...) {
      failed = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex);
      over = true;
      error = failed;
      if (!left_behind) made = std::move(result);
    }
    changed.notify_all();
  }
  void wake() {
    {
      const std::lock_guard lock(mutex);
      woken = true;
    }
    changed.notify_all();
  }
};

}  // namespace

std::shared_ptr<GroupState> make_group_in_time(const GroupSpec& spec,
                                               std::function<void()> interrupt) {
  const Deadline deadline = deadline_after(spec.timeout);
  const auto making = std::make_shared<Making>();
  spec.watch->set_interrupt(
      [making, interrupt = std::move(interrupt)] {
        if (interrupt) interrupt();
        making->wake();
      },
      GroupWatch::Of::creation);
  std::thread([making, spec] { making->run(spec); }).detach();
  {
    std::unique_lock lock(making->mutex);
    const auto over = [&] { return making->over; };
    making->changed.wait_until(lock, deadline, [&] { return making->over || making->woken; });
    if (!making->over) making->changed.wait_for(lock, kToEnd, over);
    if (making->over) {
      if (making->error) std::rethrow_exception(making->error);
      return std::move(making->made);
    }
    making->left_behind = true;
  }
  spec.watch->require_healthy("its creation", GroupWatch::creation);
  spec.watch->expire("its creation", GroupWatch::creation, spec.timeout);
}

}  // namespace tessera::detail
