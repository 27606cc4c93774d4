// Steps of a pipeline on two ranks: how long they take beside the simulation of their schedule with
// costs that are measured before each of them, so that a machine that slows down slows both, and
// beside torch.distributed.pipelining.
//
//   bench_pipeline --backend gloo [--out FILE] [--reference FILE]      as both of two ranks
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "backend.h"
#include "harness.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/manager.h"
#include "tessera/pipeline/pipeline.h"
#include "tessera/schedule/generators.h"
#include "tessera/schedule/list_schedule.h"
#include "tessera/schedule/simulate.h"

using namespace tessera;

namespace {

constexpr int kLayers = 8, kMicroBatches = 8, kSteps = 31;
constexpr std::int64_t kWidth = 512, kRows = 64;

// The stages of this rank: kLayers layers in all.
std::vector<std::shared_ptr<PipelineStage>> make_stages(const std::vector<int>& placement,
                                                        int rank) {
  std::vector<std::shared_ptr<PipelineStage>> stages;
  for (const int r : placement) {
    if (r != rank) continue;
    torch::nn::Sequential net;
    for (std::size_t i = 0; i < kLayers / placement.size(); ++i) {
      net->push_back(torch::nn::Linear(kWidth, kWidth));
      net->push_back(torch::nn::Tanh());
    }
    stages.push_back(make_stage(net));
  }
  return stages;
}

// Medians of what pipelining.py wrote, by schedule.
std::map<std::string, double> read_reference(const std::string& path) {
  std::map<std::string, std::vector<double>> all;
  std::ifstream in(path);
  in.imbue(std::locale::classic());
  for (std::string name; std::getline(in, name, '\t');) {
    double seconds = 0;
    in >> seconds;
    in.ignore(1);
    all[name].push_back(seconds);
  }
  std::map<std::string, double> medians;
  for (const auto& [name, times] : all) medians[name] = bench::median(times);
  return medians;
}

}  // namespace

int main(int count, char** arguments) {
  bench::Output output{.shared = true};
  std::string asked = "auto", reference;
  CLI::App app("A pipeline on two ranks");
  bench::add_output(app, output);
  bench::add_backend(app, asked);
  app.add_option("--reference", reference);
  bool explain = false;
  app.add_flag("--explain", explain, "also says where the time beyond the simulation goes");
  CLI11_PARSE(app, count, arguments);
  at::set_num_threads(1);
  ManagerOptions options;
  options.backend = asked;
  auto manager = DistributedManager::initialize(options);
  const std::string backend = bench::backend_of(asked, manager);
  const int rank = manager.rank(), ranks = manager.world_size();
  const auto mesh = manager.mesh({{"pipe", ranks}});
  torch::manual_seed(1);
  const auto x = torch::randn({kRows * kMicroBatches, kWidth}),
             y = torch::randn({kRows * kMicroBatches, kWidth});
  const PipelineBatch batch = split_batch({x}, {y}, kMicroBatches);
  const PipelineLoss mse = [](const auto& o, const auto& t) { return torch::mse_loss(o[0], t[0]); };
  const auto theirs = read_reference(reference);

  // Where steps go: compute beside its simulation, what messages take of the ranks, and waiting.
  struct Shares {
    std::vector<double> work, messages, waits;
  };
  bench::Report report("pipeline", output, rank);
  const auto run =
      [&](const std::string& name, const std::string& beside,
          const std::function<PipelineSchedule(const std::vector<int>&, const PipelineCosts&)>&
              make,
          const std::vector<int>& placement) {
        const std::string title = concat(name, " ", backend);
        if (!report.wants(title)) return;
        const auto stages = make_stages(placement, rank);
        Pipeline first(mesh, "pipe", schedule_gpipe(placement, kMicroBatches), stages, mse);
        const PipelineCosts costs = first.measure(batch, 5);
        Pipeline pipeline(mesh, "pipe", make(placement, costs), stages, mse);
        std::vector<double> spans, steps, ratios, bubbles, simulated, expected_bubbles;
        Shares shares;
        for (int i = 0; i < kSteps + 3; ++i) {
          const Timeline expected = simulate(pipeline.schedule(), pipeline.measure(batch, 1));
          manager.world().barrier();
          const auto began = std::chrono::steady_clock::now();
          pipeline.step(batch);
          manager.world().barrier();
          const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
          const Timeline ran = pipeline.timeline();
          if (i < 3) continue;
          simulated.push_back(expected.makespan);
          expected_bubbles.push_back(expected.makespan / expected.work() - 1);
          steps.push_back(took.count());
          const auto& busy = ran.busy;
          const auto r = static_cast<std::size_t>(std::ranges::max_element(busy) - busy.begin());
          double passed = 0;
          for (std::size_t a = 0; a < ran.spans[r].size(); ++a) {
            if (!is_compute(pipeline.schedule().actions[r][a].kind))
              passed += ran.spans[r][a].end - ran.spans[r][a].start;
          }
          shares.work.push_back(ran.work() / expected.work());
          shares.messages.push_back(passed / expected.makespan);
          shares.waits.push_back((ran.makespan - ran.work() - passed) / expected.makespan -
                                 (1 - expected.work() / expected.makespan));
          spans.push_back(ran.makespan);
          ratios.push_back(ran.makespan / expected.makespan);
          bubbles.push_back(ran.makespan / ran.work() - 1);
        }
        bench::Record record;
        record.name = title;
        record.metric = "span of a step";
        record.value = bench::median(spans) * 1e3;
        record.unit = "ms";
        record.reference = "its simulation";
        record.reference_value = bench::median(simulated) * 1e3;
        record.median_ratio = bench::median(ratios);
        record.ratio = bench::upper_bound_of_median(ratios);
        record.limit = 1.10;
        record.holds = *record.ratio <= 1.10;
        report.add(record);
        bench::Record bubble;
        bubble.name = title;
        bubble.metric = "bubble, share of work";
        bubble.value = bench::median(bubbles);
        bubble.reference = "its simulation";
        bubble.reference_value = bench::median(expected_bubbles);
        report.add(bubble);
        if (explain && rank == 0)
          std::printf("%s: compute %.3f of the simulation's, messages %.3f, waiting %+.3f of it\n",
                      title.c_str(), bench::median(shares.work), bench::median(shares.messages),
                      bench::median(shares.waits));
        if (!theirs.contains(beside)) return;
        bench::Record other;
        other.name = title;
        other.metric = "time of a step";
        other.value = bench::median(steps) * 1e3;
        other.unit = "ms";
        other.reference = concat("torch.distributed.pipelining ", beside, ", gloo");
        other.reference_value = theirs.at(beside) * 1e3;
        other.median_ratio = other.value / *other.reference_value;
        report.add(other);
      };
  run(
      "GPipe", "GPipe",
      [](const auto& placement, const auto&) { return schedule_gpipe(placement, kMicroBatches); },
      loop_placement(ranks));
  run(
      "1F1B", "1F1B", [&](const auto&, const auto&) { return schedule_1f1b(ranks, kMicroBatches); },
      loop_placement(ranks));
  run(
      "ZB-H1", "",
      [&](const auto&, const auto&) { return schedule_zero_bubble_h1(ranks, kMicroBatches); },
      loop_placement(ranks));
  run(
      "ZB-V", "interleaved zero bubble",
      [&](const auto&, const auto&) { return schedule_zero_bubble_v(ranks, kMicroBatches); },
      v_placement(ranks));
  run(
      "list, V", "interleaved zero bubble",
      [](const auto& placement, const auto& costs) {
        return list_schedule(placement, kMicroBatches, costs);
      },
      v_placement(ranks));
  return rank == 0 ? report.finish() : 0;
}
