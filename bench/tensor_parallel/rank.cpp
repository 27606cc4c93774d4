// One rank of bench_tensor_parallel in C++. The model and numbers are those of rank.py.

#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <vector>

#include "side_rank.h"
#include "tessera/comm/group/trace.h"
#include "tessera/comm/job/manager.h"
#include "tessera/nn/tensor_parallel.h"
#include "tessera/tensor/policy.h"
#include "tessera/tensor/shard_tensor.h"

namespace {

using namespace tessera::bench;

int run(const std::string& model) {
  using tessera::column, tessera::row;
  at::set_num_threads(1);
  auto manager = tessera::DistributedManager::initialize({.backend = "gloo"});
  tessera::set_policies(manager, {.redistribution = tessera::Policy::error});
  const bool sequence = model.ends_with("sequence"), small = model.starts_with("small");
  const std::int64_t width = small ? 64 : 256, length = small ? 32 : 128;
  torch::nn::Sequential net;
  const int blocks = small ? 4 : 2;
  for (int i = 0; i < blocks; ++i) net->push_back(Block(width));
  fill(*net);
  const auto mesh = manager.mesh({{"tensor", manager.world_size()}});
  const std::int64_t heads = width / kHeadSize;
  tessera::TensorParallelOptions options;
  if (sequence) options.sequence_dim = 1;
  tensor_parallel(*net, mesh,
                  {{"*.query", column(heads)},
                   {"*.key", column(heads)},
                   {"*.value", column(heads)},
                   {"*.out", row(heads)},
                   {"*.up", column()},
                   {"*.down", row()}},
                  options);
  const std::vector<tessera::Placement> lies{sequence ? tessera::Shard(1) : tessera::Replicate()};
  const at::Tensor data = tessera::distribute_tensor(pattern({4, length, width}, 0), mesh, lies),
                   target =
                       tessera::distribute_tensor(pattern({4, length, width}, 0.5), mesh, lies);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(1e-3));
  at::Tensor loss;
  const auto step = [&] {
    optimizer.zero_grad();
    loss = torch::mse_loss(net->forward(data), target);
    loss.backward();
    optimizer.step();
  };
  if (model.starts_with("bytes")) {
    step();
    const bool speaks = manager.rank() == 0;
    const double unit =
        4.0 * length * width * 4 * (manager.world_size() - 1) / manager.world_size();
    const tessera::CommTraceScope trace(manager);
    const auto print = [&](const char* pass) {
      double received = 0;
      if (speaks)
        std::printf("%s of %d blocks%s\n", pass, blocks, sequence ? ", along the sequence" : "");
      for (const auto& s : trace->summary()) {
        // Of what a rank gives to an all-gather each other rank has as much; an all-reduce is a
        // reduce-scatter and an all-gather.
        const double all = static_cast<double>(s.bytes), n = manager.world_size();
        received += s.operation == "all_gather"       ? all * (n - 1)
                    : s.operation == "reduce_scatter" ? all * (n - 1) / n
                                                      : 2 * all * (n - 1) / n;
        if (speaks)
          std::printf("  %-16s %4lld calls, %10lld bytes given\n", s.operation.c_str(),
                      static_cast<long long>(s.count), static_cast<long long>(s.bytes));
      }
      if (speaks)
        std::printf("  received %.0f bytes, %.2f units of b t c (n - 1) / n a block\n", received,
                    received / unit / blocks);
      trace->clear();
    };
    loss = torch::mse_loss(net->forward(data), target);
    print("forward");
    loss.backward();
    print("backward");
    return 0;
  }
  serve(step, [&] { return loss.item<double>(); });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "small");
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_tensor_parallel_rank: %s\n", e.what());
    return 1;
  }
}
