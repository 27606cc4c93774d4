// Training that is interrupted and goes on from a checkpoint, on the same ranks and on others, for
// every optimizer; empty and uneven shards among them.

#include <torch/torch.h>

#include "support.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::test {

using ::tessera::testing::Folder;

namespace {

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

std::vector<std::pair<std::string, MakeOptimizer>> optimizers() {
  using namespace torch::optim;
  return {
      {"Adam",
       [](std::vector<at::Tensor> p) {
         return std::make_unique<Adam>(p, AdamOptions(0.05).amsgrad(true));
       }},
      {"AdamW",
       [](std::vector<at::Tensor> p) { return std::make_unique<AdamW>(p, AdamWOptions(0.05)); }},
      {"SGD",
       [](std::vector<at::Tensor> p) {
         return std::make_unique<SGD>(p, SGDOptions(0.05).momentum(0.9));
       }},
      {"RMSprop",
       [](std::vector<at::Tensor> p) {
         return std::make_unique<RMSprop>(p, RMSpropOptions(0.01).momentum(0.5).centered(true));
       }},
      {"Adagrad", [](std::vector<at::Tensor> p) {
         return std::make_unique<Adagrad>(p, AdagradOptions(0.05));
       }}};
}

struct Training {
  Training(DistributedManager& manager, const MakeOptimizer& make)
      : mesh(manager.mesh({{"x", manager.world_size()}})),
        net(torch::nn::Linear(4, 5), torch::nn::Tanh(), torch::nn::Linear(5, 2)) {
    net->to(at::kDouble);
    fill(*net, 5);
    const int n = manager.world_size();
    distribute_module(
        *net, mesh,
        [&](const std::string& name, const at::Tensor& t) -> std::optional<ParameterPlacement> {
          if (name != "0.weight" && name != "2.bias") return std::nullopt;
          // Everything on the last rank: the others' shards are empty.
          Sizes sizes(n, 0);
          sizes.back() = t.size(0);
          if (name == "0.weight" && n > 1) {
            sizes[0] = 1;
            sizes.back() -= 1;
          }
          return ParameterPlacement{{Shard(0)}, {{0, sizes}}};
        });
    optimizer = make(net->parameters());
  }
  void step(int i) {
    seed(1000 + i);
    const at::Tensor x = distribute_tensor(randn({6, 4}, at::kDouble), mesh, {Shard(0)});
    optimizer->zero_grad();
    net->forward(x).square().mean().backward();
    optimizer->step();
  }
  CheckpointState state() {
    CheckpointState s;
    s.add("net.", *net);
    add_optimizer(s, "optimizer.", *optimizer, *net);
    return s;
  }
  std::vector<at::Tensor> values() {
    std::vector<at::Tensor> all;
    for (const auto& p : net->parameters()) all.push_back(whole(p).clone());
    return all;
  }
  DeviceMesh mesh;
  torch::nn::Sequential net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

}  // namespace

TEST(Resume, EveryOptimizerOnTheSameAndOnOtherRanks) {
  constexpr int kSteps = 5, kSavedAfter = 3;
  for (const auto& [name, make] : optimizers()) {
    const Folder folder;
    std::vector<at::Tensor> straight;
    on_threads(3, [&, &make = make](DistributedManager& manager) {
      Training run(manager, make);
      Checkpointer checkpoints(manager, folder.path());
      for (int i = 0; i < kSteps; ++i) {
        run.step(i);
        if (i + 1 == kSavedAfter) {
          // Its own learning rate comes back too.
          run.optimizer->param_groups()[0].options().set_lr(0.02);
          checkpoints.start_save("c", run.state());
        }
      }
      checkpoints.wait();
      if (manager.rank() == 0)
        straight = run.values();
      else
        run.values();
    });
    for (const int ranks : {3, 1, 2, 4}) {
      on_threads(ranks, [&, &make = make](DistributedManager& manager) {
        Training run(manager, make);
        if (ranks == 2) run.step(99);  // a state that is there already is replaced
        const CheckpointReader saved(manager.world(), folder.path(), "c");
        CheckpointState net;
        net.add("net.", *run.net);
        saved.load(net, {.allow_extra = true});
        load_optimizer(saved, "optimizer.", *run.optimizer, *run.net);
        EXPECT_EQ(run.optimizer->param_groups()[0].options().get_lr(), 0.02);
        for (int i = kSavedAfter; i < kSteps; ++i) run.step(i);
        const auto got = run.values();
        for (std::size_t p = 0; p < got.size(); ++p) {
          if (ranks == 3)
            EXPECT_TRUE(got[p].equal(straight[p])) << name << " parameter " << p << ": bit by bit";
          else
            EXPECT_LT(difference(got[p], straight[p]), 1e-12) << name << " parameter " << p;
        }
      });
    }
  }
}

// C++ modules list a tied parameter once under each of its names, and so does their optimizer.
TEST(Resume, TiedParameters) {
  for (const auto& [name, make] : optimizers()) {
    const Folder folder;
    on_threads(2, [&, &make = make](DistributedManager& manager) {
      const auto run = [&](bool resumes) {
        torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::Tanh());
        net->to(at::kDouble);
        fill(*net, 5);
        net->register_parameter("again", net->ptr<torch::nn::LinearImpl>(0)->weight);
        const auto optimizer = make(net->parameters());
        ASSERT_EQ(optimizer->param_groups()[0].params().size(), 3u);
        Checkpointer checkpoints(manager, folder.path());
        if (resumes) {
          const CheckpointReader saved(manager.world(), folder.path(), "c");
          CheckpointState modules;
          modules.add("net.", *net);
          saved.load(modules, {.allow_extra = true});
          load_optimizer(saved, "optimizer.", *optimizer, *net);
        }
        static thread_local std::vector<at::Tensor> straight;
        for (int i = resumes ? 2 : 0; i < 4; ++i) {
          if (i == 2 && !resumes) {
            CheckpointState state;
            state.add("net.", *net);
            add_optimizer(state, "optimizer.", *optimizer, *net);
            checkpoints.save("c", state);
          }
          seed(i);
          optimizer->zero_grad();
          net->forward(randn({4, 3}, at::kDouble)).square().mean().backward();
          optimizer->step();
        }
        std::vector<at::Tensor> values;
        for (const at::Tensor& p : net->parameters()) values.push_back(p.detach().clone());
        if (!resumes) straight = values;
        for (std::size_t i = 0; i < values.size(); ++i)
          EXPECT_TRUE(values[i].equal(straight[i])) << name << " parameter " << i;
      };
      run(false);
      run(true);
    });
  }
}

TEST(Resume, InterruptedAtEveryStepWhileTheNextSaveIsInProgress) {
  const auto make = optimizers()[0].second;
  std::vector<std::vector<at::Tensor>> after;
  const Folder folder;
  constexpr int kSteps = 4;
  on_threads(2, [&](DistributedManager& manager) {
    Training run(manager, make);
    Checkpointer checkpoints(manager, folder.path());
    for (int i = 0; i < kSteps; ++i) {
      run.step(i);
      checkpoints.start_save(concat("step", i), run.state());
      const auto values = run.values();
      if (manager.rank() == 0) after.push_back(values);
    }
  });
  for (int i = 0; i < kSteps; ++i) {
    on_threads(2, [&](DistributedManager& manager) {
      Training run(manager, make);
      const CheckpointReader saved(manager.world(), folder.path(), concat("step", i));
      CheckpointState net;
      net.add("net.", *run.net);
      saved.load(net, {.allow_extra = true});
      load_optimizer(saved, "optimizer.", *run.optimizer, *run.net);
      for (int k = i + 1; k < kSteps; ++k) run.step(k);
      const auto got = run.values();
      for (std::size_t p = 0; p < got.size(); ++p) EXPECT_TRUE(got[p].equal(after.back()[p])) << i;
    });
  }
}

TEST(Resume, MistakesAreReported) {
  const Folder folder;
  on_threads(2, [&](DistributedManager& manager) {
    Training adam(manager, optimizers()[0].second), sgd(manager, optimizers()[2].second);
    adam.step(0);
    Checkpointer(manager, folder.path()).save("c", adam.state());
    const CheckpointReader saved(manager.world(), folder.path(), "c");
    EXPECT_TRUE(contains(thrown<InvalidArgument>([&] {
                           load_optimizer(saved, "optimizer.", *sgd.optimizer, *sgd.net);
                         }),
                         "is Adam, this one is SGD"));
    EXPECT_TRUE(contains(thrown<InvalidArgument>(
                             [&] { load_optimizer(saved, "other.", *adam.optimizer, *adam.net); }),
                         "no optimizer 'other.'"));
    CheckpointState state;
    EXPECT_TRUE(contains(
        thrown<InvalidArgument>([&] { add_optimizer(state, "o.", *adam.optimizer, *sgd.net); }),
        "not the module's"));
    torch::optim::LBFGS other(adam.net->parameters());
    EXPECT_THROW(add_optimizer(state, "o.", other, *adam.net), NotAvailable);
  });
}

// Over two ranks whose optimizers have a layer each, as stages of a pipeline do.
TEST(Resume, OptimizersOverOtherParametersAreRefused) {
  const Folder folder;
  const auto layers = [] {
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::Linear(3, 2));
    fill(*net, 3);
    net->forward(at::ones({4, 2})).sum().backward();
    return net;
  };
  using Tensors = std::vector<at::Tensor>;
  const auto groups_of = [](const std::vector<Tensors>& groups) {
    std::vector<torch::optim::OptimizerParamGroup> all;
    for (const Tensors& g : groups) all.emplace_back(g);
    return all;
  };
  on_threads(2, [&](DistributedManager& manager) {
    auto net = layers();
    const Tensors p = net->parameters(), mine = net[manager.rank()]->parameters();
    torch::optim::Adam both(p, 0.1), two(groups_of({{p[0], p[1]}, {p[2], p[3]}}), {0.1}),
        stage(mine, 0.1);
    CheckpointState state;
    state.add("net.", *net);
    const std::map<std::string, torch::optim::Adam*> all{
        {"both.", &both}, {"two.", &two}, {"stage.", &stage}};
    for (const auto& [name, one] : all) {
      one->step();
      add_optimizer(state, name, *one, *net);
    }
    Checkpointer(manager, folder.path()).save("c", state);
  });
  on_threads(2, [&](DistributedManager& manager) {
    auto net = layers();
    const CheckpointReader saved(manager.world(), folder.path(), "c");
    const Tensors p = net->parameters();
    const auto load = [&](const std::string& prefix, const std::vector<Tensors>& groups,
                          const LoadOptions& options = {}) {
      torch::optim::Adam adam(groups_of(groups), {0.5});
      load_optimizer(saved, prefix, adam, *net, {}, options);
      return adam.state().size();
    };
    const auto why = [&](const std::string& prefix, const std::vector<Tensors>& groups) {
      return thrown<InvalidArgument>([&] { load(prefix, groups); });
    };
    EXPECT_EQ(load("both.", {p}), 4u);
    EXPECT_EQ(load("both.", {{p[3], p[0], p[2], p[1]}}), 4u) << "the order is none";
    EXPECT_EQ(load("two.", {{p[0], p[1]}, {p[2], p[3]}}), 4u);
    // All together have what was saved: one rank has both layers, the other none of the second.
    EXPECT_EQ(load("stage.", {p}), 4u);
    const int other = 1 - manager.rank();
    EXPECT_EQ(load("stage.", {net[other]->parameters()}), 2u);
    const std::string less = why("both.", {{p[0], p[1], p[2]}});
    EXPECT_TRUE(contains(less, "'1.bias' is in the checkpoint alone")) << less;
    const std::string swapped = why("two.", {{p[0], p[2]}, {p[1], p[3]}});
    EXPECT_TRUE(contains(swapped, "'0.bias' is in group 0 there and in group 1 here")) << swapped;
    EXPECT_EQ(load("both.", {{p[0], p[1], p[2]}}, {.allow_missing = true}), 3u);
    // More on one rank is told to the other.
    net->register_parameter("extra", at::ones({2}));
    Tensors more = p;
    if (manager.rank() == 1) more.push_back(net->parameters().front());
    const std::string extra = why("both.", {more});
    EXPECT_TRUE(contains(extra, "rank 1: ") && contains(extra, "'extra' is here alone")) << extra;
    EXPECT_EQ(load("both.", {more}, {.allow_missing = true}), 4u);
  });
}

}  // namespace tessera::test
