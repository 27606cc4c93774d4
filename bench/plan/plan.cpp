// Planning at scale: a million ranks on five axes, validation, what placement gains, and what
// making groups costs. Prints a table and writes the records as JSON. Limits in seconds are of the
// processor.
//
//   bench_plan [--out FILE] [--only PATTERN]

#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>

#include "creation.h"
#include "harness.h"
#include "store.h"
#include "tessera/mesh/groups/group_plan.h"
#include "tessera/mesh/groups/orthogonal.h"
#include "tessera/mesh/mapping/rank_mapping.h"

using namespace tessera;

namespace {

// Of the processor, so that a limit in seconds holds or fails alike on an idle and on a busy
// machine: nothing here waits.
double seconds_of(const std::function<void()>& work) {
  const double begin = bench::processor_seconds();
  work();
  return bench::processor_seconds() - begin;
}

double median_seconds(int runs, const std::function<void()>& work) {
  std::vector<double> times;
  for (int i = 0; i < runs; ++i) times.push_back(seconds_of(work));
  return bench::median(times);
}

double peak_megabytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

// 2^20
std::vector<Axis> million_axes() {
  return {{"pipe", 16}, {"data", 32}, {"domain", 16}, {"expert", 8}, {"model", 16}};
}

std::vector<int> shuffled(int n) {
  std::vector<int> ranks(n);
  std::iota(ranks.begin(), ranks.end(), 0);
  std::mt19937 random(1);
  for (int i = n; i > 1; --i) std::swap(ranks[i - 1], ranks[random() % static_cast<unsigned>(i)]);
  return ranks;
}

void million(bench::Report& report) {
  std::size_t members = 0;
  const auto axes_of_rank = [&](const std::function<Mesh()>& make) {
    const auto plan = GroupPlan::of_mesh(make());
    for (const auto& mine : plan.memberships(777777)) members += mine.ranks.size();
  };
  const double row_major =
      1e3 * median_seconds(21, [&] { axes_of_rank([] { return Mesh(million_axes()); }); });
  report.value("million ranks, five axes, row-major", "mesh, plan, one rank's groups", row_major,
               "ms", 10);
  const auto table = shuffled(Mesh(million_axes()).size());
  const Mesh permuted(million_axes(), table);
  const double mine = 1e3 * median_seconds(21, [&] { axes_of_rank([&] { return permuted; }); });
  report.value("million ranks, five axes, any table", "plan, one rank's groups", mine, "ms", 10);
  const Mesh mesh(million_axes());
  const double sets = 1e3 * median_seconds(21, [&] {
                        for (unsigned set = 0; set < 32; ++set) {
                          std::vector<int> axes;
                          for (int i = 0; i < 5; ++i)
                            if (set >> i & 1) axes.push_back(i);
                          members += mesh.group(axes, 777777).size();
                        }
                      });
  report.value("million ranks, five axes, row-major", "one rank's groups of all 32 axis sets", sets,
               "ms", 10);
  const double hash =
      1e3 * median_seconds(21, [&] { members += GroupPlan::of_mesh(mesh).hash() & 1; });
  report.value("million ranks, five axes, row-major", "canonical text and hash", hash, "ms", 10);
  MeshValidation validation;
  const double seconds = seconds_of([&] { validation = validate(mesh); });
  report.value("million ranks, five axes, row-major", "validation of all 32 axis sets", seconds,
               "s", 5);
  const double any = seconds_of([&] { validation = validate(permuted); });
  report.value("million ranks, five axes, any table", "validation of all 32 axis sets", any, "s",
               5);
  report.value("million ranks, five axes", "peak memory", peak_megabytes(), "MB", 1000);
  if (members == 0 || validation.axis_sets != 32) std::printf("nothing was computed\n");
}

void placements(bench::Report& report) {
  struct Case {
    const char* name;
    Topology topology;
    std::vector<Axis> axes;
    std::vector<Traffic> traffic;
  };
  const auto traffic = [](const char* axis, Collective collective, double bytes) {
    return Traffic{{axis}, collective, bytes, 1};
  };
  const std::vector<Case> cases{
      {"8 ranks, 2x4, model outermost",
       Topology::uniform(2, 4),
       {{"model", 4}, {"data", 2}},
       {traffic("model", Collective::all_reduce, 512e6),
        traffic("data", Collective::all_reduce, 1e9)}},
      {"12 ranks, 3x4",
       Topology::uniform(3, 4),
       {{"data", 3}, {"domain", 2}, {"model", 2}},
       {traffic("data", Collective::all_reduce, 1e9), traffic("domain", Collective::send, 64e6),
        traffic("model", Collective::all_gather, 256e6)}},
      {"128 ranks, 16x8, model outermost",
       Topology::uniform(16, 8),
       {{"model", 4}, {"domain", 4}, {"data", 8}},
       {traffic("model", Collective::all_reduce, 512e6), traffic("domain", Collective::send, 64e6),
        traffic("data", Collective::all_reduce, 1e9)}},
      {"100 ranks, unequal hosts",
       Topology::of_counts({8, 8, 4, 8, 16, 8, 8, 16, 16, 8}),
       {{"data", 25}, {"model", 4}},
       {traffic("model", Collective::all_to_all, 128e6),
        traffic("data", Collective::all_reduce, 1e9)}},
      {"4096 ranks, 512x8, four axes",
       Topology::uniform(512, 8),
       {{"pipe", 8}, {"model", 8}, {"domain", 4}, {"data", 16}},
       {traffic("model", Collective::all_reduce, 512e6),
        traffic("data", Collective::reduce_scatter, 1e9), traffic("domain", Collective::send, 64e6),
        traffic("pipe", Collective::send, 32e6)}}};
  for (const Case& c : cases) {
    const CostModel model(c.topology, c.axes, c.traffic);
    RankMapping placement;
    const double seconds = seconds_of([&] { placement = optimise_mapping(model); });
    report.beside(c.name, placement.exact ? "cost per step, optimum" : "cost per step, heuristic",
                  1e3 * placement.seconds, "ms", "naive order", 1e3 * placement.naive_seconds, 1);
    report.value(c.name, "time to find it", seconds, "s", 30);
    std::printf("%s: lower bound %.6g ms, %s\n", c.name, 1e3 * placement.lower_bound,
                placement.method.c_str());
  }
}

/// The exact search against all permutations of slots.
void optimum(bench::Report& report) {
  std::mt19937 random(5);
  const auto pick = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  int cases = 0, missed = 0;
  for (int n = 0; n < 60; ++n) {
    std::vector<int> devices;
    const int ranks = pick(1, 3) * 2;
    for (int left = ranks; left > 0; left -= devices.back())
      devices.push_back(pick(1, std::min(3, left)));
    std::vector<Axis> axes{{"a", 2}, {"b", ranks / 2}};
    std::vector<Traffic> traffic{{{"a"}, Collective::all_reduce, std::pow(10, pick(2, 8)), 1},
                                 {{"b"}, Collective::all_gather, std::pow(10, pick(2, 8)), 1}};
    const CostModel model(Topology::of_counts(devices), axes, traffic);
    std::vector<int> slots(ranks);
    std::iota(slots.begin(), slots.end(), 0);
    double least = INFINITY;
    do least = std::min(least, model.seconds(slots));
    while (std::next_permutation(slots.begin(), slots.end()));
    const auto placement = optimise_mapping(model);
    ++cases;
    missed += !placement.exact || std::abs(placement.seconds - least) > 1e-9 * least ||
              placement.lower_bound > least * (1 + 1e-9);
  }
  report.value("worlds of 2 to 6 ranks",
               "optimum of " + std::to_string(cases) + " cases by brute force", missed, "missed",
               0);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Planning at scale");
  bench::Output output;
  bench::add_output(app, output);
  CLI11_PARSE(app, argc, argv);
  bench::Report report("plan", output);
  million(report);
  optimum(report);
  placements(report);
#ifdef TESSERA_BENCH_CREATION
  bench::group_creation(report);
  bench::store_at_scale(report);
#endif
  return report.finish();
}
