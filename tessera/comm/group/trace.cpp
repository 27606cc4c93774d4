#include "tessera/comm/group/trace.h"

#include <algorithm>
#include <fstream>
#include <iomanip>
#include <map>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/internal/json_text.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/group/detail/request_state.h"
#include "tessera/comm/group/group.h"
#include "tessera/comm/job/detail/manager_state.h"
#include "tessera/comm/job/manager.h"

namespace tessera {
namespace {

double microseconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double, std::micro>(d).count();
}

thread_local WaitTime* innermost = nullptr;

}  // namespace

CommTrace::CommTrace() : origin_(std::chrono::steady_clock::now()) {}

void CommTrace::add(CommEvent event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
}

void CommTrace::clear() {
  const std::lock_guard lock(mutex_);
  events_.clear();
}

std::vector<CommEvent> CommTrace::events() const {
  const std::lock_guard lock(mutex_);
  return events_;
}

std::vector<CommSummary> CommTrace::summary() const {
  std::map<std::pair<std::string, std::string>, CommSummary> sums;
  for (const auto& event : events()) {
    auto& sum = sums[{event.operation, event.group}];
    ++sum.count;
    sum.bytes += event.bytes;
    sum.microseconds += event.end - event.begin;
  }
  std::vector<CommSummary> out;
  for (auto& [key, sum] : sums) {
    sum.operation = key.first;
    sum.group = key.second;
    out.push_back(std::move(sum));
  }
  std::ranges::stable_sort(
      out, [](const auto& a, const auto& b) { return a.microseconds > b.microseconds; });
  return out;
}

std::string CommTrace::table() const {
  const auto rows = summary();
  std::size_t operation = 9, group = 5;
  for (const auto& row : rows) {
    operation = std::max(operation, row.operation.size());
    group = std::max(group, row.group.size());
  }
  TextStream out;
  auto line = [&](const auto& o, const auto& g, const auto& count, const auto& bytes,
                  const auto& time, const auto& mean) {
    out << std::left << std::setw(static_cast<int>(operation)) << o << "  "
        << std::setw(static_cast<int>(group)) << g << std::right << std::setw(10) << count
        << std::setw(16) << bytes << std::setw(14) << time << std::setw(12) << mean << '\n';
  };
  line("operation", "group", "calls", "bytes", "total ms", "mean us");
  for (const auto& row : rows)
    line(row.operation, row.group, row.count, row.bytes, fixed(row.microseconds / 1000, 3),
         fixed(row.microseconds / static_cast<double>(row.count), 1));
  return std::move(out).str();
}

// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event
// Format"): complete events ("X") and names ("M").
std::string CommTrace::timeline(int rank) const {
  const auto all = events();
  std::map<std::string, int> lanes;
  for (const auto& event : all) lanes.emplace(event.group, static_cast<int>(lanes.size()));
  TextStream out;
  out << std::fixed << std::setprecision(3) << "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
  out << "{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": " << rank
      << ", \"args\": {\"name\": \"rank " << rank << "\"}}";
  for (const auto& [group, lane] : lanes)
    out << ",\n{\"ph\": \"M\", \"name\": \"thread_name\", \"pid\": " << rank
        << ", \"tid\": " << lane << ", \"args\": {\"name\": " << json_text("group " + group)
        << "}}";
  for (const auto& event : all)
    out << ",\n{\"ph\": \"X\", \"name\": "
        << json_text(event.name.empty() ? event.operation : event.operation + " " + event.name)
        << ", \"cat\": \"comm\", \"pid\": " << rank << ", \"tid\": " << lanes[event.group]
        << ", \"ts\": " << event.begin << ", \"dur\": " << event.end - event.begin
        << ", \"args\": {\"call\": " << event.sequence << ", \"bytes\": " << event.bytes << "}}";
  out << "\n]}\n";
  return std::move(out).str();
}

void CommTrace::write_timeline(const std::string& path, int rank) const {
  std::ofstream file(path);
  file << timeline(rank);
  file.close();
  if (!file)
    throw Error("the timeline could not be written to '", path,
                "': check that the folder exists and has room");
}

void set_trace(const DistributedManager& manager, std::shared_ptr<CommTrace> trace) {
  manager.state()->set_trace(std::move(trace));
}

void set_trace(const Group& group, std::shared_ptr<CommTrace> trace) {
  group.state()->set_trace(std::move(trace));
}

CommTraceScope::CommTraceScope(const DistributedManager& manager)
    : trace_(std::make_shared<CommTrace>()) {
  set_trace(manager, trace_);
  end_ = [manager] { set_trace(manager, nullptr); };
}

CommTraceScope::CommTraceScope(const Group& group) : trace_(std::make_shared<CommTrace>()) {
  set_trace(group, trace_);
  end_ = [group] { set_trace(group, nullptr); };
}

CommTraceScope::~CommTraceScope() { end_(); }

WaitTime::WaitTime() : outer_(innermost) { innermost = this; }

WaitTime::~WaitTime() {
  innermost = outer_;
  if (outer_) outer_->total_ += total_;
}

bool WaitTime::counts() { return innermost != nullptr; }

void WaitTime::add(Clock::duration waited) { innermost->total_ += waited; }

namespace detail {

void record(CommTrace& trace, const RequestState& call, std::chrono::steady_clock::time_point begin,
            std::int64_t bytes) {
  CommEvent event;
  event.operation = call.operation();
  event.group = call.group().name();
  event.name = call.name();
  event.sequence = call.sequence();
  event.bytes = bytes;
  event.begin = microseconds(begin - trace.origin());
  event.end = microseconds(std::chrono::steady_clock::now() - trace.origin());
  trace.add(std::move(event));
}

}  // namespace detail
}  // namespace tessera
