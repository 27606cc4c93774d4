// One rank of bench_ddp in C++. The models and numbers are those of rank.py.

#include <torch/torch.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>

#include "backend.h"
#include "device.h"
#include "network.h"
#include "side_rank.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/manager.h"
#include "tessera/nn/distributed_data_parallel.h"

namespace {

using tessera::bench::pattern;
using Forward = std::function<at::Tensor(const at::Tensor&)>;

struct Training {
  std::shared_ptr<torch::nn::Module> module;
  Forward forward;
  at::Tensor input, target;
};

/// Layers of a perceptron: width -> width, `depth` times.
Training perceptron(int rank, std::int64_t width, std::int64_t depth, std::int64_t batch) {
  torch::nn::Sequential net;
  for (std::int64_t i = 0; i < depth; ++i) {
    net->push_back(torch::nn::Linear(width, width));
    net->push_back(torch::nn::Tanh());
  }
  return {net.ptr(), [net](const at::Tensor& x) mutable { return net->forward(x); },
          pattern({batch, width}, rank), pattern({batch, width}, rank + 0.5)};
}

Training make(const std::string& model, int rank) {
  Training training;
  if (model == "winds") {
    winds::WindNet net{winds::NetworkOptions{}};
    training = {net.ptr(), [net](const at::Tensor& x) mutable { return net->forward(x); },
                pattern({4, 14, 73, 144}, rank), pattern({4, 2, 73, 144}, rank + 0.5)};
  } else if (model == "small") {
    training = perceptron(rank, 32, 64, 16);
  } else if (model == "wide") {
    training = perceptron(rank, 1024, 4, 32);
  } else {
    throw tessera::InvalidArgument(tessera::concat("no model ", model));
  }
  tessera::bench::fill(*training.module);
  return training;
}

/// A module of any kind behind one forward.
struct Holder {
  std::shared_ptr<torch::nn::Module> module;
  Forward call;
  at::Tensor forward(const at::Tensor& x) { return call(x); }
  Holder* operator->() { return this; }
  std::shared_ptr<torch::nn::Module> ptr() const { return module; }
};

std::unique_ptr<c10d::Reducer> make_reducer(const std::vector<at::Tensor>& parameters,
                                            const tessera::Group& world) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 15
  // As Python's DistributedDataParallel does it: buckets from the last parameter to the first, the
  // first of them small.
  const std::size_t small = 1 << 20, large = 25 << 20;
  std::vector<at::Tensor> reversed(parameters.rbegin(), parameters.rend());
  auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(reversed, {small, large});
  for (auto& bucket : buckets)
    for (auto& i : bucket) i = parameters.size() - 1 - i;
  return std::make_unique<c10d::Reducer>(parameters, buckets, world.process_group(),
                                         std::vector<bool>(parameters.size(), false), large, false,
                                         false, std::unordered_map<std::size_t, std::string>(),
                                         small, false, false, std::vector<std::int64_t>());
#else
  throw tessera::NotAvailable("c10d::Reducer is called here with the arguments of libtorch 2.15");
#endif
}

int run(const std::string& model, const std::string& device_name, const std::string& backend,
        bool with_reducer) {
  at::set_num_threads(1);
  const c10::Device device = tessera::bench::device_of(device_name, 2);
  tessera::ManagerOptions options;
  options.backend = backend;
  options.device = device;
  auto manager = tessera::DistributedManager::initialize(options);
  Training training = make(model, manager.rank());
  training.module->to(device);
  training.input = training.input.to(device);
  training.target = training.target.to(device);
  const auto parameters = training.module->parameters();
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(1e-3));

  std::unique_ptr<c10d::Reducer> reducer;
  std::unique_ptr<tessera::DistributedDataParallel<Holder>> parallel;
  Forward forward;
  if (with_reducer) {
    reducer = make_reducer(parameters, manager.world());
    forward = [&](const at::Tensor& x) {
      reducer->prepare_for_forward();
      at::Tensor out = training.forward(x);
      reducer->prepare_for_backward({});
      return out;
    };
  } else {
    parallel = std::make_unique<tessera::DistributedDataParallel<Holder>>(
        Holder{training.module, training.forward}, manager.world());
    forward = [&](const at::Tensor& x) { return (*parallel)(x); };
  }
  at::Tensor loss;
  const auto step = [&] {
    optimizer.zero_grad();
    loss = torch::mse_loss(forward(training.input), training.target);
    loss.backward();
    optimizer.step();
  };
  tessera::bench::serve(
      step, [&] { return loss.item<double>(); }, {}, [&] { tessera::bench::settle(device); });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("One rank of bench_ddp");
  std::string model, device = "cpu", backend = "gloo";
  bool reducer = false;
  tessera::bench::add_device(app, device);
  tessera::bench::add_backend(app, backend);
  app.add_flag("--reducer", reducer, "c10d::Reducer instead of DistributedDataParallel");
  app.add_option("model", model, "winds, small or wide")->required();
  CLI11_PARSE(app, argc, argv);
  try {
    return run(model, device, backend, reducer);
  } catch (const tessera::NotAvailable& e) {
    std::printf("skipped: %s\n", e.what());
    return tessera::bench::kSkipped;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_ddp_rank: %s\n", e.what());
    return 1;
  }
}
