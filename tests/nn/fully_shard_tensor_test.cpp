// fully_shard: of modules whose layers tensor_parallel() has sharded over another axis.

#include "fully_shard_case.h"
#include "tessera/nn/tensor_parallel.h"

namespace tessera::test::fully_shard_tensor_test {

namespace {

using torch::nn::Embedding;
using torch::nn::LayerNorm;
using torch::nn::LayerNormOptions;

struct LayerImpl : torch::nn::Module {
  LayerImpl(std::int64_t width, std::int64_t hidden, bool bias) {
    norm = register_module("norm", LayerNorm(LayerNormOptions({width})));
    up = register_module("up", Linear(LinearOptions(width, hidden).bias(bias)));
    down = register_module("down", Linear(LinearOptions(hidden, width).bias(bias)));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(norm(x)))); }
  LayerNorm norm = nullptr;
  Linear up = nullptr, down = nullptr;
};
TORCH_MODULE(Layer);

// Words in, the score of each word out, by one table; without a norm before it, so that the
// residual is Partial there, and its gradient behind it.
struct ScorerImpl : torch::nn::Module {
  struct Shape {
    std::int64_t words = 7, width = 6, hidden = 5;
    int layers = 2;
    bool bias = true;
  };
  explicit ScorerImpl(Shape s) {
    table = register_module("table", Embedding(s.words, s.width));
    layers = register_module("layers", torch::nn::ModuleList());
    for (int i = 0; i < s.layers; ++i) layers->push_back(Layer(s.width, s.hidden, s.bias));
  }
  at::Tensor forward(const at::Tensor& words) {
    at::Tensor h = table(words);
    for (std::size_t i = 0; i < layers->size(); ++i) h = layers->ptr<LayerImpl>(i)->forward(h);
    return at::linear(h, table->weight);
  }
  Embedding table = nullptr;
  torch::nn::ModuleList layers = nullptr;
};
TORCH_MODULE(Scorer);

Scorer scorer_of(ScorerImpl::Shape shape) {
  Scorer net(shape);
  net->to(at::kDouble);
  fill(*net, 13);
  return net;
}

TensorParallelPlan make_tensor_parallel(Scorer& net, const DeviceMesh& mesh, bool sequence) {
  TensorParallelOptions options;
  if (sequence) options.sequence_dim = 1;
  return tessera::tensor_parallel(
      *net, mesh, {{"*.up", column()}, {"*.down", row()}, {"table", vocabulary()}}, options);
}

// Samples over all axes but that of the tensor shards.
at::Tensor samples_of(Draw& draw, const at::Tensor& words, const DeviceMesh& mesh) {
  std::vector<Placement> placements;
  int ranks = 1;
  for (const Axis& a : mesh.mesh().axes()) {
    const bool tensor = a.name == "tensor";
    placements.push_back(tensor ? Placement(Replicate()) : Placement(Shard(0)));
    if (!tensor) ranks *= a.size;
  }
  return leaf(
      words,
      ShardSpec(mesh, words.sizes().vec(), placements, {{0, draw.sizes(words.size(0), ranks)}}),
      false);
}

const std::vector<std::vector<Axis>>& grids() {
  static const std::vector<std::vector<Axis>> all{{{"sharded", 2}, {"tensor", 2}},
                                                  {{"tensor", 2}, {"sharded", 2}},
                                                  {{"sharded", 3}, {"tensor", 1}},
                                                  {{"sharded", 1}, {"tensor", 3}},
                                                  {{"data", 2}, {"sharded", 1}, {"tensor", 2}}};
  return all;
}

}  // namespace

TEST(FullyShardTensor, TrainsLikeOneProcess) {
  for (const auto& axes : grids()) {
    int ranks = 1;
    for (const Axis& a : axes) ranks *= a.size;
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(test::mapped(axes));
      // Nothing but parameters moves by itself.
      set_policies(manager, {.redistribution = Policy::error});
      Draw draw(41);
      for (int round = 0; round < 4; ++round) {
        const ScorerImpl::Shape shape{draw.between(3, 8), draw.between(3, 7), draw.between(2, 6),
                                      draw.between(1, 3), draw.chance(50)};
        Scorer net = scorer_of(shape), expected = scorer_of(shape);
        make_tensor_parallel(net, mesh, round % 2 == 1);
        fully_shard(*net, mesh,
                    {.axes = {"sharded"},
                     .reshard_after_forward = draw.chance(60),
                     .prefetch = draw.below(3)});
        const auto adam = torch::optim::AdamWOptions(0.01).eps(1e-3);
        torch::optim::AdamW opt(net->parameters(), adam),
            expected_opt(expected->parameters(), adam);
        for (int step = 0; step < 3; ++step) {
          const std::string where = concat("round ", round, " step ", step);
          opt.zero_grad();
          expected_opt.zero_grad();
          const at::Tensor words = randint(shape.words, {draw.between(1, 5), draw.between(2, 4)});
          const at::Tensor y = net->forward(samples_of(draw, words, mesh));
          const at::Tensor wanted = expected->forward(words);
          EXPECT_LT(difference(y, wanted, 1e-3), 1e-10) << where;
          loss_of(y).backward();
          loss_of(wanted).backward();
          expect_same(*net, *expected, where);
          opt.step();
          expected_opt.step();
        }
        expect_same(*net, *expected, concat("round ", round), false);
      }
    });
  }
}

TEST(FullyShardTensor, GathersEachUnitOnceInAPass) {
  on_threads(4, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"sharded", 2}, {"tensor", 2}});
    Scorer net = scorer_of({.words = 8, .width = 6, .hidden = 4, .layers = 3});
    make_tensor_parallel(net, mesh, false);
    fully_shard(*net, mesh, {.axes = {"sharded"}, .coalesce_bytes = 0});
    const at::Tensor& up = net->layers->ptr<LayerImpl>(0)->up->weight;
    const at::Tensor& down = net->layers->ptr<LayerImpl>(0)->down->weight;
    // Along the dim that the tensor axis leaves.
    EXPECT_EQ(placements(up), (std::vector<Placement>{Shard(1), Shard(0)}));
    EXPECT_EQ(placements(down), (std::vector<Placement>{Shard(0), Shard(1)}));
    EXPECT_EQ(up.numel(), 24);
    const at::Tensor elements =
        at::full({}, static_cast<double>(to_local(up.detach()).numel()), at::kDouble);
    mesh.all().all_reduce(elements);
    EXPECT_EQ(elements.item<double>(), 24) << "each element on one rank";
    Draw draw(2);
    const at::Tensor words = samples_of(draw, randint(8, {4, 3}), mesh);
    for (int step = 0; step < 3; ++step) {
      const CommTraceScope trace(manager);
      loss_of(net->forward(words)).backward();
      int units = 0, others = 0;
      for (const CommEvent& e : trace->events()) {
        if (e.operation == "all_gather") ++(e.name.starts_with("gather of unit") ? units : others);
      }
      EXPECT_EQ(others, 0) << "neither data nor shards over the tensor axis\n" << trace->table();
      if (step == 0) continue;
      // Forward: the table's, each layer's, the table's again, with which backward goes on.
      EXPECT_LE(units, 2 + 3 + 3 + 1) << trace->table();
      EXPECT_GE(units, 3 + 3) << trace->table();
    }
  });
}

TEST(FullyShardTensor, ComputesInAnotherPrecision) {
  on_threads(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"sharded", 2}, {"tensor", 2}});
    Scorer net = scorer_of({}), expected = scorer_of({});
    make_tensor_parallel(net, mesh, false);
    EXPECT_THROW(
        fully_shard(*net, mesh, {.axes = {"sharded"}, .precision = {.reduce = at::kFloat}}),
        InvalidArgument);
    fully_shard(*net, mesh, {.axes = {"sharded"}, .precision = {.parameters = at::kFloat}});
    Draw draw(3);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      expected->zero_grad();
      const at::Tensor words = randint(7, {5, 2});
      const at::Tensor y = net->forward(samples_of(draw, words, mesh));
      EXPECT_EQ(y.scalar_type(), at::kFloat);
      const at::Tensor wanted = expected->forward(words);
      EXPECT_LT(difference(y.to(at::kDouble), wanted), 1e-5);
      loss_of(y).backward();
      loss_of(wanted).backward();
      const auto named = net->named_parameters();
      for (const auto& item : expected->named_parameters())
        EXPECT_LT(difference(named[item.key()].grad(), item.value().grad(), 1e-2), 1e-4)
            << item.key();
    }
  });
}

TEST(FullyShardTensor, RefusesAxesThatAreTaken) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"sharded", 1}, {"tensor", 2}});
    Scorer net = scorer_of({});
    make_tensor_parallel(net, mesh, false);
    EXPECT_THROW(fully_shard(*net, mesh), ShardingError);
    EXPECT_THROW(fully_shard(*net, mesh, {.axes = {"tensor"}}), ShardingError);
    fully_shard(*net, mesh, {.axes = {"sharded"}});
    fully_shard(*net, mesh, {.axes = {"sharded"}});  // nothing is left to do
  });
}

}  // namespace tessera::test::fully_shard_tensor_test
