// Stages whose model is made on no rank: each is filled by the ranks that run it alone, with the
// values of a model that one process made, and trains as that one does.

#include <gtest/gtest.h>

#include <map>

#include "../support/folder.h"
#include "../support/meta.h"
#include "pipeline_support.h"
#include "tessera/checkpoint/fill_deferred.h"
#include "tessera/nn/deferred.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/fully_shard.h"
#include "tessera/nn/tensor_parallel.h"

namespace tessera {
namespace {

namespace nn = torch::nn;

// The table of the first stage once more.
struct TiedHeadImpl : nn::Module {
  explicit TiedHeadImpl(at::Tensor table)
      : weight(register_parameter("weight", std::move(table))) {}
  at::Tensor forward(const at::Tensor& x) { return x.matmul(weight.t()); }
  at::Tensor weight;
};
TORCH_MODULE(TiedHead);

struct Model {
  std::vector<nn::Sequential> stages;
  at::Tensor tied() const { return stages[0]->parameters()[0]; }
};

// Four stages: one without parameters, one with frozen ones and a buffer, two that share a table.
Model model_of_stages() {
  Model model;
  nn::Linear first(5, 5), frozen(7, 5);
  model.stages.emplace_back(first);
  model.stages.emplace_back(nn::Tanh());
  model.stages.emplace_back(nn::Linear(5, 7), frozen, nn::LayerNorm(nn::LayerNormOptions({5})));
  model.stages.emplace_back(nn::GELU(), TiedHead(first->weight));
  for (at::Tensor& p : frozen->parameters()) p.requires_grad_(false);
  for (nn::Sequential& s : model.stages) s->to(torch::kDouble);
  return model;
}

Model on_meta() {
  Model model = model_of_stages();
  struct All : nn::Module {
    void add(const nn::Sequential& stage) {
      test::to_meta(*register_module(std::to_string(children().size()), stage.ptr()));
    }
  } all;
  for (const nn::Sequential& s : model.stages) all.add(s);
  defer(all, [](nn::Module& m) {
    const torch::NoGradGuard no_grad;
    if (auto* head = m.as<TiedHeadImpl>())
      head->weight.fill_(100);
    else
      reset_parameters(m);
  });
  return model;
}

using Made = Model (*)();
Model in_scope() { return deferred(&model_of_stages); }

std::map<std::string, at::Tensor> values_of(const nn::Module& net) {
  std::map<std::string, at::Tensor> all;
  for (const NamedTensor& entry : named_tensors(net))
    all[entry.name] = test::whole(entry.tensor).clone();
  return all;
}

at::Tensor mean_square(const std::vector<at::Tensor>& outputs,
                       const std::vector<at::Tensor>& targets) {
  return torch::mse_loss(outputs[0], targets[0]);
}

struct Expected {
  std::vector<std::map<std::string, at::Tensor>> values;
  RandomState random;
  double loss = 0;
  std::vector<std::vector<at::Tensor>> gradients;
};

constexpr std::uint64_t kSeed = 17;

Expected of_one_process(Made make) {
  Expected all;
  test::on_threads(1, [&](DistributedManager& one) {
    manual_seed(one, kSeed);
    const Model model = make();
    std::vector<NamedTensor> tensors;
    for (const auto& s : model.stages)
      for (const NamedTensor& entry : named_tensors(*s)) tensors.push_back(entry);
    materialize(tensors, one.mesh({{"x", 1}}));
    all.random = random_state(one);
    test::seed(3);
    at::Tensor out = test::randn({7, 5}, at::kDouble);
    const at::Tensor y = test::randn({7, 5}, at::kDouble);
    for (nn::Sequential s : model.stages) out = s->forward(out);
    const at::Tensor loss = torch::mse_loss(out, y);
    loss.backward();
    all.loss = loss.item<double>();
    for (const auto& s : model.stages) {
      all.values.push_back(values_of(*s));
      auto& gradients = all.gradients.emplace_back();
      for (const at::Tensor& p : s->parameters())
        if (p.requires_grad()) gradients.push_back(p.grad());
    }
  });
  return all;
}

void expect_values(const nn::Module& net, const std::map<std::string, at::Tensor>& expected) {
  const auto got = values_of(net);
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [name, value] : expected) EXPECT_TRUE(got.at(name).equal(value)) << name;
}

PipelineOptions tied(const Model& model, const std::vector<int>& mine) {
  PipelineOptions options;
  for (const int s : mine)
    if (s == 0 || s == 3) options.tied["table"].push_back(model.tied());
  return options;
}

void run_stages(DistributedManager& manager, const PipelineSchedule& schedule, Made make,
                const Expected& expected) {
  manual_seed(manager, kSeed);
  const auto mesh = manager.mesh(test::mapped({{"pipe", schedule.ranks()}}));
  const Model model = make();
  const std::vector<int> mine = schedule.stages_of(mesh.coordinate()[0]);
  std::vector<std::shared_ptr<PipelineStage>> own;
  for (const int s : mine) own.push_back(make_stage(model.stages[static_cast<std::size_t>(s)]));
  Pipeline pipeline(mesh, "pipe", schedule, own, mean_square, tied(model, mine));
  EXPECT_EQ(random_state(manager), expected.random);
  test::seed(3);
  const at::Tensor x = test::randn({7, 5}, at::kDouble), y = test::randn({7, 5}, at::kDouble);
  for (int s = 0; s < 4; ++s) {
    const nn::Sequential& stage = model.stages[static_cast<std::size_t>(s)];
    if (std::ranges::find(mine, s) != mine.end()) {
      expect_values(*stage, expected.values[static_cast<std::size_t>(s)]);
    } else if (s == 2) {
      for (const NamedTensor& entry : named_tensors(*stage))
        EXPECT_TRUE(is_deferred(entry.tensor)) << "no rank makes what it does not run";
    }
  }
  const PipelineResult done = pipeline.step(split_batch({x}, {y}, schedule.micro_batches));
  EXPECT_NEAR(done.loss, expected.loss, 1e-12);
  for (const int s : mine) {
    std::size_t i = 0;
    for (const at::Tensor& p : model.stages[static_cast<std::size_t>(s)]->parameters()) {
      if (!p.requires_grad()) continue;
      EXPECT_LT(test::difference(p.grad(), expected.gradients[static_cast<std::size_t>(s)][i++]),
                1e-12);
    }
  }
}

template <class Call>
std::string refused(const Call& call) {
  try {
    call();
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "nothing was thrown";
}

bool says(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}

}  // namespace

TEST(PipelineDeferred, StagesHaveTheValuesOfOneProcessAndTrainAsIt) {
  for (const Made make : {&in_scope, &on_meta}) {
    const Expected expected = of_one_process(make);
    for (const PipelineSchedule& schedule :
         {schedule_gpipe(std::vector<int>(4, 0), 2), schedule_gpipe({0, 1, 1, 0}, 3),
          schedule_interleaved(2, 2, 3), schedule_gpipe({0, 1, 2, 0}, 2), schedule_1f1b(4, 3),
          schedule_zero_bubble_v(2, 3)}) {
      test::on_threads(schedule.ranks(), [&](DistributedManager& manager) {
        run_stages(manager, schedule, make, expected);
      });
    }
  }
}

// Sharded on the mesh of their ranks, whether by rows or by a plan, stages have the same values.
TEST(PipelineDeferred, ShardedStagesHaveTheValuesOfOneProcess) {
  const Expected expected = of_one_process(&in_scope);
  for (const bool plan : {false, true}) {
    test::on_threads(8, [&](DistributedManager& manager) {
      manual_seed(manager, kSeed);
      const auto mesh = manager.mesh(test::mapped({{"tensor", 2}, {"pipe", 4}}));
      const auto shards = stage_mesh(mesh, "pipe");
      Model model = in_scope();
      const int s = mesh.coordinate()[1];
      nn::Sequential& stage = model.stages[static_cast<std::size_t>(s)];
      if (plan)
        tensor_parallel(*stage, shards,
                        s == 2 ? LayerShardings{{"0", column()}, {"1", row()}} : LayerShardings());
      else
        fully_shard(*stage, shards, {.coalesce_bytes = 0});
      for (const at::Tensor& p : stage->parameters()) EXPECT_TRUE(is_sharded(p));
      // Fully sharded, the two tables lie in units of other sizes.
      PipelineOptions options = plan ? tied(model, {s}) : PipelineOptions();
      options.sample_axes = std::vector<std::string>();
      Pipeline pipeline(mesh, "pipe", schedule_1f1b(4, 2), {make_stage(stage)}, mean_square,
                        options);
      expect_values(*stage, expected.values[static_cast<std::size_t>(s)]);
      // The stage without parameters has drawn nothing, and goes on where the others do.
      EXPECT_EQ(random_state(manager), expected.random);
    });
  }
}

// Each rank reads its own stages from the files of the whole, under other names.
TEST(PipelineDeferred, StagesAreFilledFromFiles) {
  const testing::Folder folder;
  const std::string path = folder.path() + "/model.safetensors";
  const Expected expected = of_one_process(&in_scope);
  test::on_threads(1, [&](DistributedManager& one) {
    NamedTensors saved;
    for (std::size_t s = 0; s < 4; ++s)
      for (const auto& [name, value] : expected.values[s])
        saved.emplace_back(concat("model.", s, ".", name), value + 1);
    save(saved, one.mesh({{"x", 1}}), path);
  });
  test::on_threads(2, [&](DistributedManager& manager) {
    manual_seed(manager, kSeed);
    const auto mesh = manager.mesh({{"pipe", 2}});
    const PipelineSchedule schedule = schedule_gpipe({0, 1, 1, 0}, 2);
    const Model model = in_scope();
    const std::vector<int> mine = schedule.stages_of(manager.rank());
    std::vector<std::shared_ptr<PipelineStage>> own;
    const auto saved = std::make_shared<CheckpointReader>(manager.group({manager.rank()}), path);
    for (const int s : mine) {
      nn::Sequential stage = model.stages[static_cast<std::size_t>(s)];
      if (!stage->parameters().empty())
        fill_deferred(*stage, saved, {{"*", concat("model.", s, ".*")}}, {.allow_extra = true});
      own.push_back(make_stage(stage));
    }
    Pipeline pipeline(mesh, "pipe", schedule, own, mean_square, tied(model, mine));
    EXPECT_EQ(random_state(manager), expected.random) << "numbers go on as if it had drawn";
    for (const int s : mine) {
      auto plus_one = expected.values[static_cast<std::size_t>(s)];
      for (auto& [name, value] : plus_one) value = value + 1;
      expect_values(*model.stages[static_cast<std::size_t>(s)], plus_one);
    }
  });
}

// What one rank cannot fill is told to all, and everything stays deferred.
TEST(PipelineDeferred, WhatCannotBeFilledIsNamedOnAllRanks) {
  test::on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"pipe", 3}});
    const int rank = manager.rank();
    const auto make = [&](const nn::Sequential& stage) {
      Pipeline(mesh, "pipe", schedule_1f1b(3, 2), {make_stage(stage)}, mean_square);
    };
    nn::Sequential net = deferred([] { return nn::Sequential(nn::Linear(5, 5)); });
    nn::Sequential meta(nn::Linear(5, 5));
    test::to_meta(*meta);
    EXPECT_TRUE(says(refused([&] { make(rank == 1 ? meta : net); }),
                     "'stage 1: 0.weight' is on the meta device"));
    EXPECT_TRUE(is_deferred(net->parameters()[0]));
    defer(*meta, [](nn::Module&) {});
    EXPECT_TRUE(says(refused([&] { make(rank == 2 ? meta : net); }), "'0.weight'"));
    nn::Sequential given = deferred([] { return nn::Sequential(nn::Linear(5, 5)); });
    set_source(given->parameters()[1], "the bias", [](const ShardSpec*, c10::Device) -> at::Tensor {
      throw InvalidArgument("the bias is nowhere");
    });
    EXPECT_TRUE(says(refused([&] { make(rank == 0 ? given : net); }), "the bias is nowhere"));
    EXPECT_TRUE(is_deferred(net->parameters()[0]) && is_deferred(given->parameters()[0]));
    // A stage of the program's own, which names nothing.
    struct Own : PipelineStage {
      std::vector<at::Tensor> forward(const std::vector<at::Tensor>& x) override { return x; }
      std::vector<at::Tensor> parameters() const override { return {weight}; }
      at::Tensor weight = deferred([] { return torch::randn({3}); }).requires_grad_();
    };
    const auto own = std::make_shared<Own>();
    const Pipeline pipeline(mesh, "pipe", schedule_1f1b(3, 2), {own}, mean_square);
    EXPECT_TRUE(!own->weight.is_meta() && own->weight.is_leaf() && own->weight.requires_grad());
  });
}

}  // namespace tessera
