// A rank that trains on what the loader gives, saves after every step, and writes down what it has
// read.
//
//   loader_trainer FOLDER KIND WORKERS STEPS
//
// Goes on from FOLDER/checkpoint if that exists, up to step STEPS. Each rank adds to
// FOLDER/read.PID, one line per step: step, then for each slice "begin end sample ...". Standard
// output: "rank R pid P", then "step S" by rank 0 after each step.

#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

#include "loader_trainer.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/manager.h"
#include "tessera/nn/distributed_data_parallel.h"

using namespace tessera;

namespace {

struct Model : torch::nn::Module {
  Model() { linear->to(torch::kDouble); }
  torch::Tensor forward(const torch::Tensor& x) { return linear(torch::tanh(x)); }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(3, 1));
};

void train(const std::filesystem::path& folder, const std::string& kind, int workers,
           std::uint64_t steps) {
  at::set_num_threads(1);
  auto manager = DistributedManager::initialize();
  const Group world = manager.world();
  std::cout << "rank " << manager.rank() << " pid " << ::getpid() << std::endl;
  // An even number of ranks shares each slice between two.
  const int pair = manager.world_size() % 2 == 0 ? 2 : 1;
  const Mesh mesh({{"data", manager.world_size() / pair}, {"model", pair}});
  const auto input = test::trainer_input(kind);
  Loader loader(input.datasets, input.order, batch_mapping(mesh, {"data"}), manager.rank(),
                {.workers = workers, .prefetch = 3});

  auto model = std::make_shared<Model>();
  {
    const torch::NoGradGuard no_grad;
    for (auto& p : model->parameters()) p.fill_(0.25);
    if (std::ifstream saved(folder / "checkpoint"); saved) {
      std::string state, number;
      std::getline(saved, state);
      loader.restore(state);
      for (auto& p : model->parameters())
        for (std::int64_t i = 0; i < p.numel(); ++i) {
          saved >> number;
          p.view({-1})[i] = std::strtod(number.c_str(), nullptr);
        }
    }
  }
  loader.require_agreement(world);
  DistributedDataParallel parallel(model, world);
  torch::optim::SGD optimizer(model->parameters(), 0.05);
  std::ofstream log(folder / concat("read.", ::getpid()));
  for (;;) {
    const LoadedBatch batch = loader.next();
    if (batch.step >= steps) break;
    optimizer.zero_grad();
    const auto& x = batch.tensors[1];
    const auto error = model->forward(x) - x.sum(1, true);
    const auto loss = batch.rows == 0 ? error.sum() : error.square().mean();
    parallel.mean_loss(loss, static_cast<double>(batch.real)).backward();
    optimizer.step();

    std::ostringstream line;
    line << batch.step;
    for (const BatchSlice& slice : batch.slices) {
      line << " | " << slice.samples.begin << ' ' << slice.samples.end;
      for (std::int64_t i = 0; i < slice.samples.size(); ++i)
        line << ' ' << batch.tensors[0][slice.slot + i].item<std::int64_t>();
    }
    log << line.str() << '\n' << std::flush;
    if (manager.rank() != 0) continue;
    {
      std::ofstream out(folder / "checkpoint.new");
      out << loader.state() << '\n' << std::hexfloat;
      for (const auto& p : model->parameters())
        for (std::int64_t i = 0; i < p.numel(); ++i) out << p.view({-1})[i].item<double>() << ' ';
    }
    std::filesystem::rename(folder / "checkpoint.new", folder / "checkpoint");
    std::cout << "step " << batch.step << ';' << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  try {
    train(argv[1], argv[2], std::atoi(argv[3]), std::strtoull(argv[4], nullptr, 10));
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
