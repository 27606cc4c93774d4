// fully_shard of layers that see no sharded tensor: the embedding of a time or of a class, which is
// the same for all samples of a rank, or for all parts of a field.

#include "fully_shard_case.h"
#include "tessera/tensor/policy.h"
#include "tessera/tensor/redistribution.h"

namespace tessera::test::fully_shard_replicated_test {

namespace {

using torch::nn::Conv1d;
using torch::nn::Conv1dOptions;

// What a diffusion model does with a time and a class, by layers of each kind.
struct ConditionImpl : torch::nn::Module {
  explicit ConditionImpl(std::int64_t width_) : width(width_) {
    in = register_module("in", Linear(5, width));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    groups = register_module("groups", torch::nn::GroupNorm(1, width));
    classes = register_module("classes", torch::nn::Embedding(4, width));
    along = register_module("along", Conv1d(Conv1dOptions(width, width, 3).padding(1)));
    // as GPT-2's: its rows are summed over
    weight = register_parameter("weight", torch::zeros({width, width}));
    bias = register_parameter("bias", torch::zeros({width}));
    scale = register_parameter("scale", torch::zeros({width}));
  }
  at::Tensor forward(const at::Tensor& time, const at::Tensor& label) {
    at::Tensor h = norm->forward(torch::gelu(in->forward(time)));
    h = at::addmm(bias, h, weight) * scale + classes->forward(label);
    const at::Tensor curve = along->forward(h.unsqueeze(-1).expand({-1, -1, 4}));
    return groups->forward(curve).mean(-1).sin() + h.matmul(weight.t());
  }
  std::int64_t width;
  Linear in = nullptr;
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::GroupNorm groups = nullptr;
  torch::nn::Embedding classes = nullptr;
  Conv1d along = nullptr;
  at::Tensor weight, bias, scale;
};
TORCH_MODULE(Condition);

struct DenoiserImpl : torch::nn::Module {
  DenoiserImpl(std::int64_t channels, std::int64_t width) {
    condition = register_module("condition", Condition(width));
    first = register_module("first", Conv1d(Conv1dOptions(channels, width, 3).padding(1)));
    last = register_module("last", Conv1d(Conv1dOptions(width, channels, 1)));
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& time, const at::Tensor& label) {
    const at::Tensor h = first->forward(x) + condition->forward(time, label).unsqueeze(-1);
    return last->forward(torch::gelu(h));
  }
  Condition condition = nullptr;
  Conv1d first = nullptr, last = nullptr;
};
TORCH_MODULE(Denoiser);

Denoiser denoiser_of(std::int64_t channels, std::int64_t width) {
  Denoiser net(channels, width);
  net->to(at::kDouble);
  fill(*net, 5);
  return net;
}

// Samples along "data", the field along "domain"; of one time, or of one each.
struct Sample {
  at::Tensor x, time, label;
};

Sample sample_of(Draw& draw, std::int64_t channels, bool one_time) {
  const std::int64_t samples = draw.between(1, 5), times = one_time ? 1 : samples;
  return {randn({samples, channels, draw.between(2, 9)}, at::kDouble),
          randn({times, 5}, at::kDouble), randint(4, {times})};
}

Sample placed(Draw& draw, const Sample& s, const DeviceMesh& mesh) {
  const Mesh& axes = mesh.mesh();
  const bool domain = axes.dims() > 1;
  const int data = axes.axes()[0].size;
  const Sizes rows = draw.sizes(s.x.size(0), data);
  std::vector<Placement> field{Shard(0)},
      time{s.time.size(0) == 1 && s.x.size(0) > 1 ? Placement(Replicate()) : Placement(Shard(0))};
  ShardSizes sizes{{0, rows}}, time_sizes;
  if (time[0].is_shard()) time_sizes = {{0, rows}};
  if (domain) {
    field.push_back(Shard(2));
    time.push_back(Replicate());
    sizes[2] = draw.sizes(s.x.size(2), axes.axes()[1].size);
  }
  const auto on_mesh = [&](const at::Tensor& t, const std::vector<Placement>& to,
                           const ShardSizes& of) {
    return leaf(t, ShardSpec(mesh, t.sizes().vec(), to, of), false);
  };
  return {on_mesh(s.x, field, sizes), on_mesh(s.time, time, time_sizes),
          on_mesh(s.label, time, time_sizes)};
}

}  // namespace

TEST(FullyShardReplicated, GathersWhatLayersOfNoSampleNeed) {
  for (const auto& axes : {std::vector<Axis>{{"data", 3}}, {{"data", 2}, {"domain", 2}}}) {
    int ranks = 1;
    for (const Axis& a : axes) ranks *= a.size;
    on_threads(ranks, [&](DistributedManager& manager) {
      // Nothing but parameters moves.
      set_policies(manager, {.redistribution = Policy::error, .plain_values = Policy::allow});
      const auto mesh = manager.mesh(test::mapped(axes));
      Draw draw(23);
      for (int round = 0; round < 4; ++round) {
        const std::int64_t channels = draw.between(1, 3), width = draw.between(2, 7);
        Denoiser net = denoiser_of(channels, width), expected = denoiser_of(channels, width);
        FullyShardOptions options{.reshard_after_forward = draw.chance(60)};
        if (draw.chance(50)) options.units = {"condition", "condition.*"};
        fully_shard(*net, mesh, options);
        const auto adam = torch::optim::AdamWOptions(0.01).eps(1e-3);
        torch::optim::AdamW opt(net->parameters(), adam), plain(expected->parameters(), adam);
        for (int step = 0; step < 3; ++step) {
          const std::string where = concat("round ", round, " on ", ranks, " step ", step);
          const Sample whole = sample_of(draw, channels, draw.chance(60));
          const Sample mine = placed(draw, whole, mesh);
          opt.zero_grad();
          plain.zero_grad();
          const at::Tensor got = net->forward(mine.x, mine.time, mine.label);
          const at::Tensor wanted = expected->forward(whole.x, whole.time, whole.label);
          EXPECT_TRUE(spec(got).placements() == spec(mine.x).placements()) << where;
          EXPECT_LT(difference(got, wanted, 1e-3), 1e-10) << where;
          loss_of(got).backward();
          loss_of(wanted).backward();
          expect_same(*net, *expected, where);
          opt.step();
          plain.step();
        }
        expect_same(*net, *expected, concat("round ", round), false);
      }
    });
  }
}

// Data of the parameter's own shape, which is no arithmetic of parameters.
TEST(FullyShardReplicated, GathersForSquareDataToo) {
  on_threads(3, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error, .plain_values = Policy::allow});
    const auto mesh = manager.mesh({{"data", 3}});
    Linear net(LinearOptions(6, 6).bias(false)), expected(LinearOptions(6, 6).bias(false));
    for (Linear* each : {&net, &expected}) {
      (*each)->to(at::kDouble);
      fill(**each, 3);
    }
    fully_shard(*net, mesh);
    const at::Tensor x = randn({6, 6}, at::kDouble);
    const at::Tensor same = distribute_tensor(x, mesh, {Replicate()});
    const at::Tensor y = net->forward(same) + same.matmul(net->weight);
    EXPECT_TRUE(spec(y).placements()[0].is_replicate()) << spec(y);
    EXPECT_LT(difference(y, expected->forward(x) + x.matmul(expected->weight)), 1e-12);
  });
}

// The unit is gathered anyway: the summand need not be reduced for it.
TEST(FullyShardReplicated, ASumOverSamplesStaysASummandBesideAParameter) {
  on_threads(3, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error, .plain_values = Policy::allow});
    const auto mesh = manager.mesh({{"data", 3}});
    Linear net(4, 7);
    net->to(at::kDouble);
    fill(*net, 3);
    const at::Tensor weight = net->weight.detach().clone();
    fully_shard(*net, mesh);
    const at::Tensor x = randn({6, 7, 4}, at::kDouble);
    const at::Tensor y = distribute_tensor(x, mesh, {Shard(0)}).sum(0) * net->weight;
    EXPECT_TRUE(spec(y).placements()[0].is_partial()) << spec(y);
    EXPECT_LT(difference(y, x.sum(0) * weight), 1e-12);
  });
}

TEST(FullyShardReplicated, ArithmeticOfParametersStaysInShards) {
  on_threads(3, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error, .plain_values = Policy::allow});
    const auto mesh = manager.mesh({{"data", 3}});
    Linear net(4, 7);
    fully_shard(*net, mesh);
    const at::NoGradGuard no_grad;
    const at::Tensor& w = net->weight;
    const CommTraceScope trace(manager);
    const at::Tensor half = at::full({}, 0.5);
    for (const at::Tensor& t : {w * 2, w * half, w + w.square(), w - at::ones_like(w)})
      EXPECT_TRUE(spec(t).placements() == spec(w).placements()) << spec(t);
    w.mul_(half).add_(w, 0.1);
    EXPECT_TRUE(trace->events().empty()) << trace->table();
  });
}

}  // namespace tessera::test::fully_shard_replicated_test
