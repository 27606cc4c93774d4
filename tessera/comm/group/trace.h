#pragma once
// CommTrace: what the calls of a manager's groups cost: how often, how many bytes and how long, by
// operation and group, and when, as a timeline.
//
//   CommTraceScope trace(manager);  // from here on every call of the manager's groups is recorded
//   ...training...
//   std::cout << trace->table();
//   trace->write_timeline("comm.json", manager.rank());  // for chrome://tracing or ui.perfetto.dev
//
// When off, a call pays one test of a pointer; when on, about a tenth of a microsecond and 100
// bytes.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/base/pinned.h"

namespace tessera {

class DistributedManager;
class Group;

/// One call, as this rank saw it. Times in microseconds since the trace was made.
struct CommEvent {
  /// "all_reduce".
  std::string operation;
  std::string group;
  /// CallOptions::name; may be empty.
  std::string name;
  /// Sequence number of the call in its group; for messages the number of collective calls before
  /// it.
  std::uint64_t sequence = 0;
  /// Payload that this rank gave to the call (received, for a receive).
  std::int64_t bytes = 0;
  /// When the call was made (or started).
  double begin = 0;
  /// When the result was there and its wait() returned.
  double end = 0;
};

/// The sum of all calls of one operation in one group.
struct CommSummary {
  std::string operation, group;
  std::int64_t count = 0, bytes = 0;
  /// Sum of end - begin over the calls.
  double microseconds = 0;
};

/// A recorder that several threads may write to. Nothing is recorded until it is set on a manager
/// or a group.
class CommTrace : Pinned {
 public:
  CommTrace();

  std::chrono::steady_clock::time_point origin() const { return origin_; }
  void add(CommEvent event);
  void clear();

  /// All events in order of completion.
  std::vector<CommEvent> events() const;
  /// One entry per operation and group, the one with most time first.
  std::vector<CommSummary> summary() const;
  /// The summary as text, one line per operation and group.
  std::string table() const;
  /// The events in Trace Event Format (JSON): one process with the number `rank` and one lane per
  /// group, so that files of several ranks can be loaded together.
  std::string timeline(int rank = 0) const;
  /// Writes timeline() to a file. Throws Error if it cannot be written.
  void write_timeline(const std::string& path, int rank = 0) const;

 private:
  const std::chrono::steady_clock::time_point origin_;
  mutable std::mutex mutex_;
  std::vector<CommEvent> events_;
};

/// Records every group of the manager, also those made later; null ends it. Call it between calls,
/// not during one.
void set_trace(const DistributedManager& manager, std::shared_ptr<CommTrace> trace);
/// Records one group. A group has one trace: the newest replaces the one before.
void set_trace(const Group& group, std::shared_ptr<CommTrace> trace);

/// Records into a trace while the scope lives.
class CommTraceScope : Pinned {
 public:
  explicit CommTraceScope(const DistributedManager& manager);
  explicit CommTraceScope(const Group& group);
  ~CommTraceScope();

  CommTrace& operator*() const { return *trace_; }
  CommTrace* operator->() const { return trace_.get(); }
  const std::shared_ptr<CommTrace>& get() const { return trace_; }

 private:
  std::shared_ptr<CommTrace> trace_;
  std::function<void()> end_;
};

/// Adds up, while it lives, the time that the calling thread spends in calls of groups, whatever
/// they are made by: all of a blocking call, and the wait() of a started one, since until then the
/// rank goes on with its work. Of two that live on one thread the inner one counts, and hands what
/// it has counted to the outer one at its end. Calls of a device's stream, for which the host does
/// not wait, and calls of other threads are not counted. When none lives, a call pays one test of a
/// pointer.
class WaitTime : Pinned {
 public:
  using Clock = std::chrono::steady_clock;

  WaitTime();
  ~WaitTime();

  Clock::duration total() const { return total_; }

  /// True if one lives on this thread.
  static bool counts();
  /// Adds to the one of this thread, which must be there.
  static void add(Clock::duration waited);

 private:
  WaitTime* const outer_;
  Clock::duration total_{0};
};

}  // namespace tessera
