#pragma once
// Time limits that saturate: milliseconds::max() means "practically for ever", and never a deadline
// in the past.
//
//   const Deadline deadline = deadline_after(limit);           // instead of now() + limit
//   changed.wait_until(lock, deadline, ready);                  // instead of wait_for(lock, limit)
//   poll(&waiting, 1, poll_milliseconds(deadline));
//   options.timeout = bounded_limit(limit);  // for a library that adds it to now
//
// Never add a limit that a caller gave to a point in time, and never hand one to wait_for(): both
// overflow, and the wait ends at once or never.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>

namespace tessera {

/// The time limit of what waits for other ranks, where a program gives none.
inline constexpr std::chrono::milliseconds kDefaultLimit = std::chrono::minutes(5);

using Deadline = std::chrono::steady_clock::time_point;

/// Ten years: no wait is longer. Far enough from the ends of every clock that other libraries may
/// multiply it by a few and add it to now.
inline constexpr std::chrono::milliseconds kLongestLimit = std::chrono::hours(24 * 365 * 10);

/// `limit`, at least zero and at most kLongestLimit, rounded up to whole milliseconds.
template <class Rep, class Period>
constexpr std::chrono::milliseconds bounded_limit(std::chrono::duration<Rep, Period> limit) {
  // Compared as floating point: the units of two durations may have no common integer type.
  const std::chrono::duration<double> seconds(limit);
  if (!(seconds.count() > 0)) return std::chrono::milliseconds(0);
  if (seconds >= std::chrono::duration<double>(kLongestLimit)) return kLongestLimit;
  return std::chrono::ceil<std::chrono::milliseconds>(limit);
}

/// The point in time `limit` after `begin`: `begin` itself for a limit of zero or less, ten years
/// after it for any longer limit.
template <class Rep, class Period>
Deadline deadline_after(std::chrono::duration<Rep, Period> limit,
                        Deadline begin = std::chrono::steady_clock::now()) {
  const auto bounded = bounded_limit(limit);
  return begin > Deadline::max() - bounded ? Deadline::max() : begin + bounded;
}

/// Time left, at least zero.
inline std::chrono::milliseconds time_left(Deadline deadline) {
  const Deadline now = std::chrono::steady_clock::now();
  if (deadline <= now) return std::chrono::milliseconds(0);
  return std::chrono::ceil<std::chrono::milliseconds>(deadline - now);
}

/// time_left() in the form that poll() and epoll_wait() take: at most some 24 days, after which the
/// caller looks at the clock again.
inline int poll_milliseconds(Deadline deadline) {
  return static_cast<int>(
      std::min<std::int64_t>(time_left(deadline).count(), std::numeric_limits<int>::max()));
}

}  // namespace tessera
