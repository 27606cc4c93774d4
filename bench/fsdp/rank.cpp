// One rank of bench_fsdp in C++. The models and numbers are those of rank.py.

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "counter.h"
#include "side_rank.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/trace.h"
#include "tessera/comm/job/manager.h"
#include "tessera/nn/deferred.h"
#include "tessera/nn/fully_shard.h"
#include "tessera/tensor/shard_tensor.h"

namespace {

using namespace tessera::bench;

// Four layers of 16.
struct SmallImpl : torch::nn::Module {
  SmallImpl() {
    for (int i = 0; i < 4; ++i)
      layers.push_back(register_module(std::to_string(i), torch::nn::Linear(16, 16)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer(x);
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Small);

// "NAME", "NAME memory" (counted, on a batch of a few numbers) or "NAME plain" (not sharded);
// "units shm" communicates in shared memory, all others over Gloo. "bytes" is for readers: what a
// step holds and sends, beside the formulas of docs/fully_sharded.md.
struct Model {
  explicit Model(const std::string& name)
      : counted(name.ends_with(" memory")), plain(name.ends_with(" plain")) {
    const std::int64_t batch = counted ? 1 : 4;
    if (name.starts_with("units")) {
      for (int unit = 0; unit < 32; ++unit) net->push_back(Small());
      shape = {batch, 16};
    } else if (name.starts_with("small") || name.starts_with("wide")) {
      const bool small = name.starts_with("small");
      const std::int64_t width = small ? 64 : 256;
      for (int i = 0; i < (small ? 8 : 6); ++i) net->push_back(Block(width));
      shape = {batch, counted ? 8 : 32, width};
    } else {
      throw tessera::InvalidArgument(tessera::concat("no model ", name));
    }
    fill(*net);
  }
  bool counted, plain;
  torch::nn::Sequential net;
  std::vector<std::int64_t> shape;
};

std::int64_t bytes_of(const torch::nn::Module& module, bool here = false) {
  std::int64_t all = 0;
  for (const at::Tensor& p : module.parameters())
    all += here ? static_cast<std::int64_t>(tessera::to_local(p.detach()).nbytes())
                : static_cast<std::int64_t>(p.numel() * p.element_size());
  return all;
}

void print_bytes(bool speaks, const char* what, double formula, std::int64_t counted) {
  if (speaks)
    std::printf("  %-44s %12.0f %12lld\n", what, formula, static_cast<long long>(counted));
}

// The formulas of docs/fully_sharded.md, and what is counted in a step whose order is learnt.
void report_bytes(const tessera::DistributedManager& manager, const char* what,
                  const tessera::FullyShardOptions& options) {
  using tessera::Shard;
  const bool speaks = manager.rank() == 0;
  const int n = manager.world_size();
  const auto mesh = manager.mesh({{"data", n}});
  Model model("wide memory");
  const double all = static_cast<double>(bytes_of(*model.net)), others = (n - 1.0) / n;
  std::int64_t largest = 0;
  for (const auto& unit : model.net->children()) largest = std::max(largest, bytes_of(*unit));
  tessera::fully_shard(*model.net, mesh, options);
  const std::int64_t mine = bytes_of(*model.net, true);
  const at::Tensor data =
      tessera::from_local(pattern(model.shape, manager.rank()), mesh, {Shard(0)});
  torch::optim::SGD optimizer(model.net->parameters(), torch::optim::SGDOptions(1e-3));
  const auto forward = [&] { return model.net->forward(data).square().mean(); };
  const auto step = [&] {
    forward().backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  // The most bytes beside what lives before.
  const auto most = [](const std::function<void()>& body) {
    bench_counter_restart();
    const std::int64_t before = bench_counter_bytes();
    body();
    return bench_counter_bytes() - before;
  };
  for (int i = 0; i < 4; ++i) step();
  // Where units are released, without what forward keeps for backward.
  const bool twice = options.reshard_after_forward;
  std::int64_t gathered_most = 0;
  for (int i = 0; i < 3; ++i) {
    at::Tensor loss;
    gathered_most = most([&] {
      const at::AutoGradMode grad(!twice);
      loss = forward();
    });
    if (!twice) loss.backward();
  }
  step();
  std::map<std::string, std::int64_t> given;
  {
    const tessera::CommTraceScope trace(manager);
    step();
    for (const auto& s : trace->summary()) given[s.operation] += s.bytes;
  }
  // What the other ranks give to gathers, and what of a reduced message is not this rank's.
  const at::Tensor gathered = at::full({1}, given["all_gather"], at::kLong);
  mesh.all().all_reduce(gathered, tessera::ReduceOp::sum);
  const double ratio = options.precision.parameters ? 0.5 : 1;
  if (speaks)
    std::printf("%s: %d ranks, P = %.0f, U = %lld bytes\n  %-44s %12s %12s\n", what, n, all,
                static_cast<long long>(largest), "on rank 0", "formula", "counted");
  print_bytes(speaks, "shards of the parameters, P / n", all / n, mine);
  print_bytes(speaks, twice ? "gathered at most, 2 U" : "gathered at most, P, and activations",
              ratio * (twice ? 2.0 * static_cast<double>(largest) : all), gathered_most);
  print_bytes(
      speaks, twice ? "received by gathers, 2 P (n - 1) / n" : "received by gathers, P (n - 1) / n",
      ratio * (twice ? 2 : 1) * all * others, gathered.item<std::int64_t>() - given["all_gather"]);
  print_bytes(
      speaks, "sent to be reduced, P (n - 1) / n", ratio * all * others,
      given["reduce_scatter"] - static_cast<std::int64_t>(ratio * static_cast<double>(mine)));
}

// A step makes the model "wide" on no rank, shards it, and fills the shards.
void serve_construction(const tessera::DistributedManager& manager, const Peak& peak) {
  const auto mesh = manager.mesh({{"data", manager.world_size()}});
  torch::nn::Sequential net = nullptr;
  const auto step = [&] {
    net = nullptr;
    net = tessera::deferred([] {
      torch::nn::Sequential made;
      for (int i = 0; i < 6; ++i) made->push_back(Block(256));
      return made;
    });
    tessera::fully_shard(*net, mesh);
  };
  serve(step, [&] { return static_cast<double>(bytes_of(*net)); }, peak);
}

int run(const std::string& backend, const std::string& name) {
  at::set_num_threads(1);
  if (name == "bytes") {
    bench_counter_install();
    tessera::ManagerOptions options;
    options.backend = backend;
    const auto manager = tessera::DistributedManager::initialize(options);
    report_bytes(manager, "by default", {});
    report_bytes(manager, "reshard_after_forward = false", {.reshard_after_forward = false});
    report_bytes(manager, "precision of bfloat16",
                 {.precision = {.parameters = at::kBFloat16, .reduce = at::kBFloat16}});
    return 0;
  }
  if (name.ends_with(" memory")) bench_counter_install();
  tessera::ManagerOptions options;
  options.backend = name.starts_with("units shm") ? "shm" : backend;
  auto manager = tessera::DistributedManager::initialize(options);
  Peak peak;
  if (name.ends_with(" memory")) peak = {bench_counter_restart, bench_counter_bytes};
  if (name.starts_with("construction")) {
    serve_construction(manager, peak);
    return 0;
  }
  Model model(name);
  at::Tensor data = pattern(model.shape, manager.rank()),
             target = pattern(model.shape, manager.rank() + 0.5);
  if (!model.plain) {
    const auto mesh = manager.mesh({{"data", manager.world_size()}});
    tessera::fully_shard(*model.net, mesh);
    data = tessera::from_local(data, mesh, {tessera::Shard(0)});
    target = tessera::from_local(target, mesh, {tessera::Shard(0)});
  }
  torch::optim::SGD optimizer(model.net->parameters(), torch::optim::SGDOptions(1e-3));
  at::Tensor loss;
  const auto step = [&] {
    optimizer.zero_grad();
    loss = torch::mse_loss(model.net->forward(data), target);
    loss.backward();
    optimizer.step();
  };
  serve(step, [&] { return loss.item<double>(); }, peak);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 3) throw tessera::InvalidArgument("bench_fsdp_rank BACKEND MODEL");
    return run(argv[1], argv[2]);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_fsdp_rank: %s\n", e.what());
    return 1;
  }
}
