// Modules without values through the trainer: a strategy that places them fills them, and trains as
// one process does; any other names what has no values, and is free again.

#include "tessera/nn/deferred.h"
#include "../support/meta.h"
#include "cases.h"
#include "tessera/checkpoint/checkpointer.h"
#include "tessera/checkpoint/file.h"
#include "tessera/nn/fully_shard.h"

namespace tessera::test {

namespace {

// The regression's network, with its values, and no memory for them.
torch::nn::Sequential recorded_net(bool meta) {
  const auto make = [] {
    return torch::nn::Sequential(torch::nn::Linear(3, 5), torch::nn::Tanh(),
                                 torch::nn::Linear(5, 2));
  };
  torch::nn::Sequential net = meta ? make() : deferred(make);
  if (meta) {
    to_meta(*net);
    defer(*net);
  }
  net->to(at::kDouble);
  fill(*net, 11);
  return net;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "nothing was thrown";
}

bool tells(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}

}  // namespace

TEST(TrainedDeferred, AStrategyThatPlacesTrainsAsOneProcess) {
  for (const int ranks : {1, 3}) {
    const auto expected = alone(ranks, 4, 1, with(nullptr, 1));
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"data", ranks}});
      const std::vector<Placement> rows{Shard(0)};
      const Parallelise whole_units = [](const std::string&, torch::nn::Module& module,
                                         const DeviceMesh& on) { fully_shard(module, on); };
      for (const bool meta : {false, true}) {
        for (const auto& strategy :
             {std::make_shared<MeshStrategy>(mesh, fully_sharded(), rows),
              std::make_shared<MeshStrategy>(mesh, whole_units, rows),
              std::make_shared<MeshStrategy>(mesh, NamedPlacements(), rows)}) {
          Regression task(recorded_net(meta));
          Trainer(with(strategy, 1)).fit(task, ragged_batches(manager.rank(), 4));
          expect_near(task.values(), expected, concat(ranks, " ranks, meta ", meta));
        }
      }
    });
  }
}

TEST(TrainedDeferred, WhatPlacesNothingNamesWhatHasNoValues) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"data", 2}});
    const std::vector<Placement> rows{Shard(0)};
    const Parallelise nothing = [](const std::string&, torch::nn::Module&, const DeviceMesh&) {};
    for (const std::shared_ptr<Strategy>& strategy : std::vector<std::shared_ptr<Strategy>>{
             std::make_shared<DDPStrategy>(manager), std::make_shared<ManualStrategy>(manager),
             std::make_shared<MeshStrategy>(mesh, nothing, rows)}) {
      const auto session = [&](const torch::nn::Sequential& net) {
        return std::make_unique<Session>(strategy, NamedModules{{"net", net.ptr()}},
                                         SessionOptions{.signals = false});
      };
      torch::nn::Sequential recorded = recorded_net(false);
      const std::string said = refusal([&] { session(recorded); });
      EXPECT_TRUE(tells(said, "'net.0.weight' is deferred and has no values yet")) << said;
      EXPECT_TRUE(is_deferred(recorded->parameters()[0]));
      torch::nn::Sequential meta = small_net();
      to_meta(*meta);
      EXPECT_TRUE(tells(refusal([&] { session(meta); }), "'net.0.weight' is on the meta device"));
      // The strategy is free, and the module as good as any once it has values.
      materialize(*recorded);
      const auto made = session(recorded);
      const torch::nn::Sequential other = recorded_net(false);
      EXPECT_TRUE(tells(refusal([&] {
                          made->add(std::make_shared<torch::optim::SGD>(other->parameters(), 0.1));
                        }),
                        "optimizer 0: 'parameter 0' is deferred"));
    }
  });
  auto alone_net = recorded_net(true);
  const auto single = std::make_shared<SingleDevice>();
  EXPECT_TRUE(tells(refusal([&] {
                      const Session session(single, {{"net", alone_net.ptr()}},
                                            SessionOptions{.signals = false});
                    }),
                    "the strategy 'single': 'net.0.weight' is deferred"));
}

// What a checkpoint would save has values.
TEST(TrainedDeferred, ASaveNamesWhatHasNoValues) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"data", 2}});
    const torch::nn::Sequential net = recorded_net(false);
    EXPECT_TRUE(tells(refusal([&] { save(*net, mesh, folder.path() + "/net.safetensors"); }),
                      "'0.weight' has no data (device meta): place its module first"));
    CheckpointState state;
    state.add("net.", *net);
    Checkpointer checkpoints(manager, folder.path());
    EXPECT_TRUE(tells(refusal([&] { checkpoints.save("one", state); }), "'net.0.weight'"));
  });
}

}  // namespace tessera::test
