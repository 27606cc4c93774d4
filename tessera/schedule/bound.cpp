#include "tessera/schedule/costs.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <queue>

#include "tessera/schedule/detail/positions.h"
#include "tessera/schedule/schedule.h"

namespace tessera {
namespace {

// An action on one machine: not before its head, and so much comes after it.
struct Job {
  double head, time, tail;
};

// The latest of end + tail in the best order of one machine that may be interrupted: the longest
// tail of what is ready goes first.
double jackson(std::vector<Job> jobs) {
  std::ranges::sort(jobs, [](const Job& a, const Job& b) { return a.head < b.head; });
  const auto shorter = [](const Job& a, const Job& b) { return a.tail < b.tail; };
  std::priority_queue<Job, std::vector<Job>, decltype(shorter)> ready(shorter);
  double now = 0, latest = 0;
  std::size_t next = 0;
  while (next < jobs.size() || !ready.empty()) {
    if (ready.empty()) now = std::max(now, jobs[next].head);
    for (; next < jobs.size() && jobs[next].head <= now; ++next) ready.push(jobs[next]);
    Job job = ready.top();
    ready.pop();
    const double until =
        next < jobs.size() ? jobs[next].head : std::numeric_limits<double>::infinity();
    const bool ends = job.time <= until - now;
    if (ends) {
      now += job.time;
      latest = std::max(latest, now + job.tail);
    } else {
      job.time -= until - now;
      now = until;
      ready.push(job);
    }
  }
  return latest;
}

// a + n * b, of which the largest counts.
struct Line {
  double a, b;
};

// The largest of the lines for each n from 1 to `count`.
std::vector<double> largest(std::vector<Line> lines, int count) {
  std::ranges::sort(
      lines, [](const Line& x, const Line& y) { return x.b != y.b ? x.b < y.b : x.a < y.a; });
  // Those that are the largest somewhere, by slope: a line is none if its neighbours meet above it.
  std::vector<Line> hull;
  for (const Line& line : lines) {
    if (!hull.empty() && hull.back().b == line.b) hull.pop_back();
    while (hull.size() > 1) {
      const Line &x = hull[hull.size() - 2], &y = hull.back();
      if ((x.a - line.a) * (y.b - x.b) > (x.a - y.a) * (line.b - x.b)) break;
      hull.pop_back();
    }
    hull.push_back(line);
  }
  std::vector<double> values;
  std::size_t at = 0;
  for (int n = 1; n <= count; ++n) {
    const auto value = [&](std::size_t i) { return hull[i].a + n * hull[i].b; };
    while (at + 1 < hull.size() && value(at + 1) >= value(at)) ++at;
    values.push_back(hull.empty() ? 0.0 : std::max(value(at), 0.0));
  }
  return values;
}

// A micro-batch's way: forward through all stages, and back. Position x < S is F of stage x, else I
// of stage 2 S - 1 - x; weights[x] is the time of the W that follows an I.
class Way {
 public:
  Way(const std::vector<int>& placement, const PipelineCosts& costs, double size)
      : stages_(static_cast<int>(placement.size())) {
    for (int x = 0; x < length(); ++x) {
      const int s = stage(x);
      const StageCosts& c = costs.stages[s];
      rank_.push_back(placement[s]);
      const double again = c.recompute ? c.forward : 0;
      const double whole = c.backward.value_or(c.input_gradient + c.weight_gradient + again);
      const double input = std::min(whole, c.input_gradient + again);
      const double both = std::min(whole, c.input_gradient + c.weight_gradient + 2 * again);
      time_.push_back((x < stages_ ? c.forward : input) * size);
      weight_.push_back(x < stages_ ? 0 : (both - input) * size);
      // From the end of the position before to the start of this one.
      const double travel = x == 0 ? 0 : costs.travel(stage(x - 1), s, placement);
      start_.push_back(x == 0 ? 0 : start_.back() + time_[x - 1] + travel);
    }
  }

  int length() const { return 2 * stages_; }
  int rank(int x) const { return rank_[x]; }
  double time(int x) const { return time_[x]; }
  double weight(int x) const { return weight_[x]; }
  double end(int x) const { return start_[x] + time_[x]; }
  double end() const { return end(length() - 1); }

  // When the n-th micro-batch to pass x has ended it, at the earliest: each of the n has been at
  // all positions before.
  std::vector<Line> ends(int x, int ranks) const {
    std::vector<Line> lines{{start_[x], time_[x]}};
    // Of each rank its first position's start, and its time on all positions up to here.
    std::vector<std::optional<double>> first(ranks);
    std::vector<double> times(ranks, 0.0);
    for (int y = 0; y <= x; ++y) {
      if (!first[rank_[y]]) first[rank_[y]] = start_[y];
      times[rank_[y]] += time_[y];
    }
    // Nothing of the rank's last position is left to wait for but the way from there.
    for (int y = x; y >= 0; --y) {
      std::optional<double>& from = first[rank_[y]];
      if (from) lines.push_back({*from + end(x) - end(y), times[rank_[y]]});
      from.reset();
    }
    return lines;
  }

  // What comes at least after an end at x, of n micro-batches that are no further.
  std::vector<Line> follow(int x, int ranks) const {
    std::vector<std::optional<double>> first(ranks);
    std::vector<double> times(ranks, 0.0), weights(ranks, 0.0), last(ranks, 0.0);
    for (int y = x; y < length(); ++y) {
      const int r = rank_[y];
      if (y > x) times[r] += time_[y];
      weights[r] += weight_[y];
      last[r] = end() - end(y);
      // Rounding must not put it before the end at x.
      if (!first[r] && (y > x || weight_[y] > 0))
        first[r] = y == x ? 0.0 : std::max(start_[y] - end(x), 0.0);
    }
    std::vector<Line> lines;
    for (int r = 0; r < ranks; ++r) {
      // Without weight gradients the rank's last position has the rest of the way behind it.
      if (first[r])
        lines.push_back({*first[r] + (weights[r] > 0 ? 0 : last[r]), times[r] + weights[r]});
    }
    return lines;
  }

 private:
  int stage(int x) const { return x < stages_ ? x : 2 * stages_ - 1 - x; }

  int stages_;
  std::vector<int> rank_;
  std::vector<double> time_, weight_, start_;
};

}  // namespace

MakespanBound makespan_bound(const std::vector<int>& placement, int micro_batches,
                             const PipelineCosts& costs) {
  const int ranks = ranks_of(placement);
  const int stages = static_cast<int>(placement.size());
  // Each position is looked at from each other.
  if (stages > detail::kMostBoundStages || micro_batches < 1 ||
      micro_batches > detail::kMostCells / stages) {
    throw InvalidArgument("a bound for ", micro_batches, " micro-batches of ", stages,
                          " stages; there may be ", detail::kMostBoundStages, " stages, and 1 to ",
                          detail::kMostCells / stages, " micro-batches of these");
  }
  costs.check(stages, micro_batches);
  // Positions count micro-batches, not which: where these differ, each has the least size, and the
  // work that is missing then is added as if it could be done at any time.
  double all = micro_batches, size = 1;
  if (!costs.sizes.empty()) {
    all = 0;
    for (const double one : costs.sizes) all += one;
    size = *std::ranges::min_element(costs.sizes);
  }
  const Way way(placement, costs, size);
  const Way one(placement, costs, 1);
  std::vector<std::vector<Job>> jobs(ranks);
  std::vector<double> work(ranks, 0.0);
  for (int x = 0; x < way.length(); ++x) {
    const int rank = way.rank(x);
    const std::vector<double> ends = largest(way.ends(x, ranks), micro_batches);
    const std::vector<double> follow = largest(way.follow(x, ranks), micro_batches);
    for (int n = 1; n <= micro_batches; ++n) {
      const double end = ends[n - 1];
      jobs[rank].push_back({end - way.time(x), way.time(x), follow[micro_batches - n]});
      if (way.weight(x) > 0) jobs[rank].push_back({end, way.weight(x), 0});
    }
    work[rank] += (one.time(x) + one.weight(x)) * all;
  }
  MakespanBound bound;
  for (int rank = 0; rank < ranks; ++rank) {
    double first = std::numeric_limits<double>::infinity();
    for (const Job& job : jobs[rank]) first = std::min(first, job.head);
    const double makespan = std::max(jackson(jobs[rank]), first + work[rank]);
    if (makespan > bound.makespan) bound = {makespan, rank, bound.work};
    bound.work = std::max(bound.work, work[rank]);
  }
  return bound;
}

}  // namespace tessera
