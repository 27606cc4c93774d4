// fully_shard: parameters that stay where they are, while what is needed of them moves.

#include "fully_shard_case.h"
#include "tessera/tensor/errors.h"

namespace tessera::test::fully_shard_stay_test {

namespace {

using torch::nn::Embedding;
using torch::nn::EmbeddingBag;
using torch::nn::EmbeddingBagOptions;
using torch::nn::EmbeddingOptions;

// A table before a layer, and perhaps after it too.
struct WordsImpl : torch::nn::Module {
  WordsImpl(const EmbeddingOptions& options, bool tied) : tied(tied) {
    table = register_module("table", Embedding(options));
    layer = register_module("layer", Linear(options.embedding_dim(), options.embedding_dim()));
  }
  at::Tensor forward(const at::Tensor& words) {
    const at::Tensor h = layer->forward(table->forward(words)).tanh();
    return tied ? h.matmul(table->weight.t()) : h;
  }
  const bool tied;
  Embedding table = nullptr;
  Linear layer = nullptr;
};
TORCH_MODULE(Words);

Words words_of(const EmbeddingOptions& options, bool tied = false) {
  Words net(options, tied);
  net->to(at::kDouble);
  fill(*net, 9);
  return net;
}

}  // namespace

TEST(FullyShardStay, MovesIndicesAndRowsInPlaceOfTheTable) {
  constexpr int kRanks = 2;
  constexpr std::int64_t kRows = 1001, kWidth = 12, kWords = 16;
  constexpr std::int64_t kRow = kWidth * sizeof(double);
  SizeCounter allocator;
  on_threads(kRanks, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", kRanks}});
    Words net = words_of({kRows, kWidth}), expected = words_of({kRows, kWidth});
    fully_shard(*net, mesh, {.stay = {"table.*"}});
    EXPECT_EQ(spec(net->table->weight).local_shape()[0], manager.rank() == 0 ? 501 : 500);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      expected->zero_grad();
      const at::Tensor words = randint(kRows, {kWords});
      const at::Tensor wanted = expected->forward(words);
      wanted.square().mean().backward();
      mesh.all().barrier();
      allocator.watched = kRows * kRow;
      mesh.all().barrier();
      const CommTraceScope trace(manager);
      const at::Tensor y = net->forward(distribute_tensor(words, mesh, {Shard(0)}));
      y.square().mean().backward();
      mesh.all().barrier();
      EXPECT_EQ(allocator.most, 0) << "nothing has the size of the table";
      mesh.all().barrier();
      allocator.watched = ~std::size_t{0};
      std::int64_t bytes = 0;
      for (const CommEvent& e : trace->events()) {
        if (e.operation == "all_to_all") bytes += e.bytes;
      }
      // Of each word an index and a row of gradients, and rows for the other rank.
      EXPECT_LE(bytes, kWords / kRanks * (8 + kRow) + kWords * kRow + 8 * kRanks) << trace->table();
      EXPECT_LT(difference(y, wanted), 1e-12);
      expect_same(*net, *expected, concat("step ", step));
    }
  });
}

TEST(FullyShardStay, EmbeddingsEqualOneProcess) {
  for (const auto& axes : meshes()) {
    int ranks = 1;
    for (const Axis& a : axes) ranks *= a.size;
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(test::mapped(axes));
      Draw draw(31);
      for (int round = 0; round < 5; ++round) {
        const std::int64_t rows = draw.between(2, 9);
        EmbeddingOptions options(rows, draw.between(1, 4));
        if (draw.chance(40)) options.padding_idx(draw.below(static_cast<int>(rows)));
        options.scale_grad_by_freq(draw.chance(30));
        const bool tied = draw.chance(40);
        Words net = words_of(options, tied), expected = words_of(options, tied);
        FullyShardOptions how{.stay = {"table.weight"}};
        if (draw.chance(50)) how.axes = {"x"};
        fully_shard(*net, mesh, how);
        torch::optim::SGD opt(net->parameters(), 0.1), other(expected->parameters(), 0.1);
        for (int step = 0; step < 2; ++step) {
          const std::string where = concat("round ", round, " on ", ranks, " step ", step);
          opt.zero_grad();
          other.zero_grad();
          const std::int64_t n = draw.between(1, 6);
          const at::Tensor words =
              draw.chance(50) ? randint(rows, {n}) : randint(rows, {n, draw.between(1, 3)});
          const at::Tensor mine =
              draw.chance(80)
                  ? sharded(draw, words, mesh)
                  : leaf(words, ShardSpec::replicated(mesh, words.sizes().vec()), false);
          const at::Tensor got = net->forward(mine), wanted = expected->forward(words);
          EXPECT_LT(difference(got, wanted, 1e-3), 1e-11) << where;
          loss_of(got).backward();
          loss_of(wanted).backward();
          expect_same(*net, *expected, where);
          opt.step();
          other.step();
        }
        const at::NoGradGuard no_grad;
        const at::Tensor words = randint(rows, {5});
        EXPECT_LT(difference(net->forward(sharded(draw, words, mesh)), expected->forward(words)),
                  1e-11);
      }
    });
  }
}

TEST(FullyShardStay, RanksWithoutRowsComputeInTheSamePrecision) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    Embedding net(EmbeddingOptions(2, 3)), expected(EmbeddingOptions(2, 3));
    net->to(at::kDouble);
    expected->to(at::kDouble);
    fill(*net, 4);
    fill(*expected, 4);
    fully_shard(*net, mesh, {.stay = {"weight"}, .precision = {.parameters = at::kFloat}});
    const at::Tensor words = randint(2, {6});
    const at::Tensor y = net->forward(distribute_tensor(words, mesh, {Shard(0)}));
    EXPECT_EQ(y.scalar_type(), at::kFloat) << manager.rank();
    EXPECT_LT(difference(y.to(at::kDouble), expected->forward(words)), 1e-6);
  });
}

TEST(FullyShardStay, SecondDerivatives) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const EmbeddingOptions options = EmbeddingOptions(7, 3).padding_idx(2);
    Words net = words_of(options), expected = words_of(options);
    fully_shard(*net, mesh, {.stay = {"table.*"}});
    const at::Tensor words = randint(7, {8});
    const auto penalty = [](Words& n, const at::Tensor& w) {
      const at::Tensor y = loss_of(n->forward(w));
      const at::Tensor g = torch::autograd::grad({y}, {n->table->weight}, {}, true, true)[0];
      return y + g.square().sum();
    };
    const at::Tensor wanted = penalty(expected, words);
    wanted.backward();
    const at::Tensor got = penalty(net, distribute_tensor(words, mesh, {Shard(0)}));
    got.backward();
    EXPECT_LT(difference(got, wanted), 1e-11);
    expect_same(*net, *expected, "second derivatives");
  });
}

// The table stays where it is: what travels is a small part of it.
TEST(FullyShardStay, BagsOfEmbeddings) {
  constexpr std::int64_t kRows = 4099, kWidth = 4;
  for (const int ranks : {1, 2, 3}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", ranks}});
      for (const bool mean : {false, true}) {
        const auto make = [&] {
          EmbeddingBagOptions options(kRows, kWidth);
          if (mean) {
            options.mode(torch::kMean);
          } else {
            options.mode(torch::kSum);
          }
          EmbeddingBag bag(options);
          bag->to(at::kDouble);
          fill(*bag, 4);
          return bag;
        };
        EmbeddingBag net = make(), expected = make();
        fully_shard(*net, mesh, {.stay = {"weight"}});
        const at::Tensor words = randint(kRows, {9});
        const at::Tensor offsets = at::tensor({0, 2, 2, 6}, at::kLong);
        const at::Tensor wanted = expected->forward(words, offsets);
        wanted.sin().sum().backward();
        const at::Tensor sharded_words = distribute_tensor(words, mesh, {Shard(0)});
        const CommTraceScope trace(manager);
        const at::Tensor got = net->forward(sharded_words, offsets);
        got.sin().sum().backward();
        std::int64_t bytes = 0;
        for (const CommEvent& e : trace->events()) bytes += e.bytes;
        if (ranks > 1) {  // alone, nothing travels
          EXPECT_LT(bytes, kRows * kWidth * 8 / 32) << trace->table();
        }
        EXPECT_LT(difference(got, wanted), 1e-12);
        expect_same(*net, *expected, mean ? "mean" : "sum");
      }
    });
  }
}

TEST(FullyShardStay, OtherOperatorsTreatItAsData) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    Linear net(4, 7), expected(4, 7);
    for (Linear* n : {&net, &expected}) {
      (*n)->to(at::kDouble);
      fill(**n, 6);
    }
    fully_shard(*net, mesh, {.stay = {"weight"}});
    for (int step = 0; step < 2; ++step) {
      const at::Tensor x = randn({5, 4}, at::kDouble);
      const at::Tensor got = net->forward(distribute_tensor(x, mesh, {Shard(0)}));
      const at::Tensor wanted = expected->forward(x);
      EXPECT_LT(difference(got, wanted), 1e-12);
      got.square().sum().backward();
      wanted.square().sum().backward();
      expect_same(*net, *expected, concat("step ", step));
    }
  });
}

TEST(FullyShardStay, RefusesWhatCannotBe) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Net net = net_of({});
    EXPECT_THROW(fully_shard(*net, mesh, {.stay = {"scale"}}), InvalidArgument);
    EXPECT_THROW(fully_shard(*net, mesh, {.stay = {"nothing"}}), InvalidArgument);
    EXPECT_FALSE(is_sharded(net->last)) << "nothing has changed";
    const at::Tensor words = at::tensor({0, 3, 1, 2}, at::kLong);
    // An index out of range, which one rank alone sees, is an error on both, and they go on.
    Words one = words_of({4, 2}), expected = words_of({4, 2});
    fully_shard(*one, mesh, {.stay = {"table.weight"}});
    const at::Tensor wrong = at::tensor({0, 3, 1, 4}, at::kLong);
    EXPECT_THROW(one->forward(distribute_tensor(wrong, mesh, {Shard(0)})), std::exception);
    EXPECT_LT(difference(one->forward(distribute_tensor(words, mesh, {Shard(0)})),
                         expected->forward(words)),
              1e-12);
  });
}

}  // namespace tessera::test::fully_shard_stay_test
