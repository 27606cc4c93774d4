// Layers of which a sample uses a part, on two ranks with one thread each: a step of an embedding
// table with sparse gradients beside the memory traffic of the rows that it touches, and a layer of
// experts beside a loop over plain layers in one process.

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <optional>

#include "backend.h"
#include "device.h"
#include "harness.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/manager.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/embedding_table.h"
#include "tessera/nn/experts.h"
#include "tessera/tensor/shard_tensor.h"

namespace {

using tessera::concat, tessera::Shard;
using tessera::bench::Report, tessera::bench::seconds_of;

constexpr std::int64_t kRows = 1'000'000, kColumns = 64;
constexpr double kTableLimit = 1.1, kExpertsLimit = 1.05;

struct Options {
  std::string backend = "gloo";
  tessera::bench::Output output{.shared = true};
};

void measure(Report& report, const tessera::Group& world, const std::string& name,
             const std::function<void()>& ours, const std::function<void()>& theirs,
             const std::string& reference, double limit) {
  if (!report.wants(name)) return;
  for (int i = 0; i < 2; ++i) {
    ours();
    theirs();
  }
  report.time(name,
              tessera::bench::alternate(
                  31, [&] { return seconds_of(world, 1, ours); },
                  [&] { return seconds_of(world, 1, theirs); }),
              reference, limit);
}

torch::nn::Embedding table_of() {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(kRows, kColumns).sparse(true));
  return table;
}

// A step: the rows of some ids, the gradients of their squares, and plain SGD on them.
struct TableStep {
  torch::nn::Embedding table;
  at::Tensor ids;
  torch::optim::SGD optimizer{table->parameters(), torch::optim::SGDOptions(1e-3)};
  void operator()() {
    optimizer.zero_grad();
    table->forward(ids).square().sum().backward();
    optimizer.step();
  }
};

// What a step must read and write of rows at least: rows and their gradients once in each pass, the
// distinct ones where they lie.
struct RowTraffic {
  at::Tensor table, ids, distinct, batch, gradient;
  RowTraffic(const at::Tensor& weight, const at::Tensor& given)
      : table(weight),
        ids(given),
        distinct(std::get<0>(at::_unique(given))),
        batch(at::empty({given.numel(), weight.size(1)})),
        gradient(at::empty_like(batch)) {}
  void operator()() {
    at::index_select_out(batch, table, 0, ids);
    gradient.copy_(batch);
    table.index_copy_(0, distinct, table.index_select(0, distinct));
  }
};

void tables(Report& report, const tessera::DistributedManager& manager,
            const std::string& backend) {
  const auto world = manager.world();
  const auto both = manager.mesh({{"table", 2}});
  const auto alone = manager.mesh(tessera::Mesh({{"table", 1}}, {manager.rank()}));
  for (const std::int64_t count : {10'000, 100'000}) {
    torch::manual_seed(manager.rank());
    const at::Tensor ids = at::randint(kRows, {count});
    const auto on = [&](const tessera::DeviceMesh& mesh) {
      torch::nn::Embedding table = table_of();
      tessera::distribute_module(*table, mesh, {{"weight", {{Shard(0)}}}});
      return TableStep{table, tessera::from_local(ids, mesh, {Shard(0)})};
    };
    TableStep single = on(alone), shared = on(both), plain{table_of(), ids};
    const at::NoGradGuard no_grad;
    RowTraffic traffic(table_of()->weight.detach(), ids);
    const auto training = [](TableStep& step) {
      return [&step] {
        const at::AutoGradMode grad(true);
        step();
      };
    };
    const std::string text = concat("table step ids=", count, " ", backend);
    measure(report, world, text + ", 1 rank beside plain", training(single), training(plain),
            "plain", kTableLimit);
    measure(report, world, text + ", 1 rank", training(single), traffic, "row traffic",
            kTableLimit);
    measure(report, world, text + ", 2 ranks", training(shared), traffic, "row traffic",
            kTableLimit);
  }
}

// Each expert's tokens by themselves, in plain libtorch.
struct Loop {
  tessera::Experts like;
  at::Tensor operator()(const at::Tensor& x) const {
    const at::Tensor probabilities = x.matmul(like->router.t()).softmax(-1);
    const auto [weights, chosen] = probabilities.topk(like->options.chosen, -1);
    at::Tensor result = at::zeros_like(x);
    for (std::int64_t e = 0; e < like->options.experts; ++e) {
      const auto at = chosen.eq(e).nonzero_numpy();
      const at::Tensor rows = x.index_select(0, at[0]);
      const at::Tensor made = at::gelu(rows.matmul(like->up[e])).matmul(like->down[e]);
      result = result.index_add(0, at[0], made * weights.index({at[0], at[1]}).unsqueeze(1));
    }
    return result;
  }
};

void experts(Report& report, const tessera::DistributedManager& manager,
             const std::string& backend) {
  const auto world = manager.world();
  const auto both = manager.mesh({{"expert", 2}});
  for (const std::int64_t tokens : {256, 4096}) {
    const auto layer = [] {
      torch::manual_seed(1);
      return tessera::Experts(
          tessera::ExpertsOptions{.experts = 8, .features = 128, .hidden = 256, .chosen = 2});
    };
    tessera::Experts single = layer(), shared = layer();
    const Loop loop{layer()};
    const auto on = tessera::experts_on(both);
    tessera::distribute_module(*shared, both, {{"up", on}, {"down", on}});
    const at::Tensor x = at::randn({tokens, 128});
    const at::Tensor mine = tessera::distribute_tensor(x, both, {Shard(0)});
    const auto step = [](const at::Tensor& y, const torch::nn::Module& of) {
      y.square().mean().backward();
      for (const at::Tensor& p : of.parameters()) p.mutable_grad() = at::Tensor();
    };
    const auto plain = [&] { step(loop(x), *loop.like); };
    const std::string text = concat("experts tokens=", tokens, " ", backend);
    measure(
        report, world, text + ", 1 rank", [&] { step(single->forward(x).value, *single); }, plain,
        "loop", kExpertsLimit);
    measure(
        report, world, text + ", 2 ranks", [&] { step(shared->forward(mine).value, *shared); },
        plain, "loop", 1);
  }
}

int run(const Options& o) {
  torch::set_num_threads(1);
  tessera::ManagerOptions options;
  options.backend = o.backend;
  auto manager = tessera::DistributedManager::initialize(options);
  if (manager.world_size() != 2)
    throw tessera::InvalidArgument("bench_sparse runs on 2 ranks, and there are ",
                                   manager.world_size());
  const std::string backend = tessera::bench::backend_of(o.backend, manager);
  std::optional<tessera::bench::AwakeCores> awake;
  if (backend == "gloo") awake.emplace();
  Report report("sparse", o.output, manager.rank());
  report.meta("torch", TORCH_VERSION);
  report.meta("threads_per_rank", at::get_num_threads());
  tables(report, manager, backend);
  experts(report, manager, backend);
  manager.world().barrier();
  return manager.rank() == 0 ? report.finish() : 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Embedding tables and experts on two ranks beside one");
  Options o;
  tessera::bench::add_backend(app, o.backend);
  tessera::bench::add_output(app, o.output);
  CLI11_PARSE(app, argc, argv);
  return tessera::bench::guarded("bench_sparse", [&] { return run(o); });
}
