// Tables of embeddings that no rank has whole: lookups, bags, their sparse gradients, the
// optimizers of these and their checkpoints equal one process, and what travels is ids and rows.

#include "tessera/nn/embedding_table.h"

#include <gtest/gtest.h>

#include "../support/folder.h"
#include "size_counter.h"
#include "support.h"
#include "tessera/checkpoint/checkpointer.h"
#include "tessera/checkpoint/optimizer_state.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/clip.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/fully_shard.h"

namespace tessera::test::embedding_table_test {

namespace {

using torch::nn::Embedding;
using torch::nn::EmbeddingBag;
using torch::nn::EmbeddingBagOptions;
using torch::nn::EmbeddingOptions;

template <class Layer>
Layer filled(Layer net, std::uint64_t with) {
  net->to(at::kDouble);
  fill(*net, with);
  return net;
}

at::Tensor dense(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient.to_dense() : gradient;
}

at::Tensor loss_of(const at::Tensor& y) { return y.square().mean() + y.sin().mean(); }

// The table lies as `where`; without sparse gradients rows are asked for where it stays.
void place(torch::nn::Module& net, const ShardSpec& where) {
  ParameterPlacement as{where.placements(), where.sizes()};
  as.stays = where.is_sharded(0) && !where.is_sharded(1);
  distribute_module(net, where.mesh(), {{"weight", as}});
}

void expect_gradient(const at::Tensor& got, const at::Tensor& expected, const std::string& where) {
  ASSERT_TRUE(got.grad().defined()) << where;
  EXPECT_EQ(got.grad().is_sparse(), expected.grad().is_sparse()) << where;
  EXPECT_TRUE(spec(got.grad()) == spec(got)) << where;
  EXPECT_LT(difference(dense(got.grad()), dense(expected.grad()), 1e-3), 1e-11) << where;
  if (!got.grad().is_sparse()) return;
  // Of this rank's shard, each row once.
  const at::Tensor local = to_local(got.grad());
  EXPECT_TRUE(local.is_coalesced()) << where;
  EXPECT_EQ(local.sizes(), at::IntArrayRef(spec(got).local_shape())) << where;
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(int kind, const at::Tensor& table) {
  const std::vector<at::Tensor> tables{table};
  if (kind == 0) return std::make_unique<RowwiseAdagrad>(tables, RowwiseAdagradOptions(0.1));
  if (kind == 1) return std::make_unique<SparseAdam>(tables, SparseAdamOptions(0.1));
  return std::make_unique<torch::optim::SGD>(tables, 0.1);
}

ShardSpec ids_spec(Draw& draw, const DeviceMesh& mesh, const std::vector<std::int64_t>& shape) {
  return draw.spec(mesh, shape, false);
}

std::int64_t bytes_of(const CommTrace& trace, const std::string& name) {
  std::int64_t bytes = 0;
  for (const CommEvent& e : trace.events())
    if (e.name == name) bytes += e.bytes;
  return bytes;
}

}  // namespace

TEST(EmbeddingTable, LookupsAndStepsEqualOneProcess) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      Draw draw(static_cast<std::uint64_t>(70 + ranks));
      for (int round = 0; round < 14; ++round) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
        const std::int64_t rows = draw.between(1, 9), width = draw.between(1, 4);
        EmbeddingOptions options(rows, width);
        options.sparse(draw.chance(85));
        if (draw.chance(40)) options.padding_idx(draw.below(static_cast<int>(rows)));
        auto net = filled(Embedding(options), 5), expected = filled(Embedding(options), 5);
        const ShardSpec table = draw.spec(mesh, {rows, width}, false);
        place(*net, table);
        const int kind = options.sparse() ? draw.below(3) : 2;
        const auto opt = optimizer_of(kind, net->weight),
                   other = optimizer_of(kind, expected->weight);
        for (int step = 0; step < 3; ++step) {
          const std::string where =
              concat(ranks, " ranks, round ", round, ", step ", step, ": ", table);
          const int backwards = draw.between(1, 2);
          opt->zero_grad();
          other->zero_grad();
          for (int i = 0; i < backwards; ++i) {
            std::vector<std::int64_t> shape{draw.between(0, 7)};
            if (draw.chance(40)) shape.push_back(draw.between(1, 3));
            const at::Tensor ids = randint(rows, shape);
            const at::Tensor mine =
                draw.chance(80) ? leaf(ids, ids_spec(draw, mesh, shape), false) : ids;
            const at::Tensor got = net->forward(mine), wanted = expected->forward(ids);
            EXPECT_LT(difference(got, wanted, 1e-3), 1e-12) << where;
            if (shape[0] == 0) continue;
            loss_of(got).backward();
            loss_of(wanted).backward();
          }
          if (expected->weight.grad().defined())
            expect_gradient(net->weight, expected->weight, where);
          if (draw.chance(30) && expected->weight.grad().defined() && !options.sparse())
            clip_gradients({net->weight}, mesh.all(), {.max_norm = 1e9});
          opt->step();
          other->step();
          EXPECT_LT(difference(net->weight, expected->weight, 1e-3), 1e-11) << where;
        }
        const c10::InferenceMode no_autograd;
        const at::Tensor ids = randint(rows, {5});
        EXPECT_LT(difference(net->forward(leaf(ids, ids_spec(draw, mesh, {5}), false)),
                             expected->forward(ids)),
                  1e-12);
      }
    });
  }
}

namespace {

struct DrawnBags {
  at::Tensor ids, offsets, weights;
  std::int64_t bags = 0, used = 0;
};

DrawnBags drawn_bags(Draw& draw, std::int64_t rows, bool include_last) {
  DrawnBags b;
  b.bags = draw.between(0, 5);
  std::vector<std::int64_t> offsets;
  std::int64_t n = 0;
  for (std::int64_t i = 0; i < b.bags; ++i) {
    offsets.push_back(n);
    n += draw.chance(30) ? 0 : draw.between(1, 4);
  }
  if (include_last) offsets.push_back(n);
  // Indices behind the last offset are in no bag.
  b.ids = randint(rows, {include_last && draw.chance(50) ? n + 2 : n});
  b.offsets = at::tensor(offsets, at::kLong);
  b.used = n;
  b.weights = randn(b.ids.sizes(), at::kDouble);
  return b;
}

}  // namespace

TEST(EmbeddingTable, BagsEqualOneProcess) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      Draw draw(static_cast<std::uint64_t>(170 + ranks));
      for (int round = 0; round < 40; ++round) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
        const std::int64_t rows = draw.between(1, 9), width = draw.between(1, 4);
        const int mode = draw.below(3);
        const bool include_last = draw.chance(40), weighted = mode == 0 && draw.chance(50);
        EmbeddingBagOptions options(rows, width);
        options.sparse(mode < 2).include_last_offset(include_last);
        if (mode == 0) options.mode(torch::kSum);
        if (mode == 1) options.mode(torch::kMean);
        if (mode == 2) options.mode(torch::kMax);
        if (draw.chance(40)) options.padding_idx(draw.below(static_cast<int>(rows)));
        auto net = filled(EmbeddingBag(options), 5), expected = filled(EmbeddingBag(options), 5);
        const ShardSpec table = draw.spec(mesh, {rows, width}, false);
        place(*net, table);
        const DrawnBags b = drawn_bags(draw, rows, include_last);
        const std::string where = concat(ranks, " ranks, round ", round, ", mode ", mode, ": ",
                                         table, ", offsets ", b.offsets);
        const at::Tensor ids = leaf(b.ids, ids_spec(draw, mesh, b.ids.sizes().vec()), false);
        const at::Tensor offsets =
            draw.chance(50) ? b.offsets
                            : leaf(b.offsets, ids_spec(draw, mesh, b.offsets.sizes().vec()), false);
        const at::Tensor one = b.weights.clone().requires_grad_(true);
        const at::Tensor samples = leaf(b.weights, ids_spec(draw, mesh, b.ids.sizes().vec()));
        const at::Tensor got =
            weighted ? net->forward(ids, offsets, samples) : net->forward(ids, offsets);
        const at::Tensor used = b.ids.narrow(0, 0, b.used);
        const at::Tensor wanted = weighted
                                      ? expected->forward(used, b.offsets, one.narrow(0, 0, b.used))
                                      : expected->forward(used, b.offsets);
        EXPECT_LT(difference(got, wanted, 1e-3), 1e-12) << where;
        if (b.bags == 0) continue;
        loss_of(got).backward();
        loss_of(wanted).backward();
        expect_gradient(net->weight, expected->weight, where);
        if (weighted) {
          EXPECT_LT(difference(samples.grad(), one.grad(), 1e-3), 1e-11) << where;
        }
      }
    });
  }
}

TEST(EmbeddingTable, IdsAndRowsTravelOnce) {
  constexpr std::int64_t kRows = 1000, kWidth = 16, kRow = kWidth * 8;
  on_ranks(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    auto net = filled(
        EmbeddingBag(
            EmbeddingBagOptions(kRows, kWidth).mode(torch::kSum).sparse(true).padding_idx(7)),
        3);
    place(*net, {mesh, {kRows, kWidth}, {Shard(0)}});
    // Two rows of each rank, one of them many times, and padding.
    const std::int64_t me = manager.rank();
    const at::Tensor ids =
        at::tensor(std::vector<std::int64_t>{3, 900 + me, 3, 7, 3, 7, 3, 3}, at::kLong);
    const auto [indices, offsets] = bags_from_local(ids, at::tensor({0, 1, 4}, at::kLong), mesh);
    const CommTraceScope trace(manager);
    const at::Tensor y = net->forward(indices, offsets);
    EXPECT_EQ(spec(y).local_shape()[0], 3);
    y.sum().backward();
    EXPECT_EQ(bytes_of(*trace, "rows of an embedding"), 2 * 8) << trace->table();
    // The owner of row 3 gives it to both, that of the others one to each.
    EXPECT_EQ(bytes_of(*trace, "embedding"), 2 * kRow) << trace->table();
    EXPECT_EQ(bytes_of(*trace, "gradient of an embedding"), 2 * kRow) << trace->table();
    EXPECT_EQ(to_local(net->weight.grad())._nnz(), me == 0 ? 1 : 2);
    std::int64_t all = 0;
    for (const CommEvent& e : trace->events()) all += e.bytes;
    EXPECT_LT(all, 5 * kRow + 200) << trace->table();
    const at::Tensor g = net->weight.grad();
    EXPECT_EQ(difference((g * 2).to_dense(), 2 * g.to_dense()), 0);
    EXPECT_EQ(difference((g / 2 + g).to_dense(), 1.5 * g.to_dense()), 0);
    EXPECT_TRUE(g.to(at::kFloat).is_sparse());
    EXPECT_EQ(difference(g.to(at::kFloat).to_dense().to(at::kDouble), g.to_dense()), 0);
    EXPECT_THROW(g.to(g.options().layout(at::kStrided)), ShardingError);
    RowwiseAdagrad optimizer(net->parameters());
    const CommTraceScope step(manager);
    optimizer.step();
    EXPECT_TRUE(step->events().empty()) << step->table();
    EXPECT_EQ(spec(static_cast<const RowwiseAdagradParamState&>(
                       *optimizer.state().at(net->weight.unsafeGetTensorImpl()))
                       .sum())
                  .local_shape()[0],
              kRows / 2);
  });
}

namespace {

struct Words : torch::nn::Module {
  Embedding table = register_module("table", Embedding(EmbeddingOptions(3000, 4).sparse(true)));
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(4, 4));
};

}  // namespace

TEST(EmbeddingTable, NothingOfTheTablesSizeIsMadeOrReduced) {
  constexpr std::int64_t kRows = 3000, kWidth = 4;
  SizeCounter allocator;
  on_ranks(4, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"data", 2}, {"table", 2}});
    Words net;
    distribute_module(net, mesh, {{"table.weight", {{Replicate(), Shard(0)}}}});
    SparseAdam optimizer(net.table->parameters());
    for (int step = 0; step < 3; ++step) {
      mesh.all().barrier();
      // Moments are made by the first step.
      if (step > 0) allocator.watched = kRows / 2 * kWidth * sizeof(float);
      mesh.all().barrier();
      const CommTraceScope trace(manager);
      const at::Tensor ids = distribute_tensor(randint(kRows, {8}), mesh, {Shard(0), Shard(0)});
      net.zero_grad();
      net.layer->forward(net.table->forward(ids)).square().mean().backward();
      optimizer.step();
      EXPECT_TRUE(net.layer->weight.grad().defined());
      mesh.all().barrier();
      EXPECT_EQ(allocator.most, 0) << "step " << step;
      std::int64_t bytes = 0;
      for (const CommEvent& e : trace->events()) bytes += e.bytes;
      EXPECT_LT(bytes, 1500) << trace->table();
      mesh.all().barrier();
      allocator.watched = ~std::size_t{0};
    }
  });
}

TEST(EmbeddingTable, RanksOfAnotherAxisAddTheirRows) {
  on_ranks(4, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"data", 2}, {"table", 2}});
    const auto options = EmbeddingBagOptions(50, 3).mode(torch::kMean).sparse(true);
    auto net = filled(EmbeddingBag(options), 3), expected = filled(EmbeddingBag(options), 3);
    place(*net, {mesh, {50, 3}, {Replicate(), Shard(0)}});
    RowwiseAdagrad optimizer(net->parameters()), other(expected->parameters());
    for (int step = 0; step < 3; ++step) {
      seed(static_cast<std::uint64_t>(step) * 10 + static_cast<std::uint64_t>(manager.rank()));
      const std::int64_t n = manager.rank() == 2 ? 0 : 6;
      const at::Tensor ids = randint(50, {n});
      const at::Tensor begins = n > 0 ? at::tensor({0, 2}, at::kLong) : at::zeros({0}, at::kLong);
      const auto [indices, offsets] = bags_from_local(ids, begins, mesh);
      const at::Tensor all = full_tensor(indices), starts = full_tensor(offsets);
      optimizer.zero_grad();
      other.zero_grad();
      loss_of(net->forward(indices, offsets)).backward();
      loss_of(expected->forward(all, starts)).backward();
      expect_gradient(net->weight, expected->weight, concat("step ", step));
      const double norm = clip_gradients({net->weight}, mesh.all(), {.max_norm = 0.05});
      const at::Tensor plain = expected->weight.grad().to_dense();
      EXPECT_NEAR(norm, plain.norm().item<double>(), 1e-12);
      if (norm > 0.05) expected->weight.grad().mul_(0.05 / norm);
      optimizer.step();
      other.step();
      EXPECT_LT(difference(net->weight, expected->weight), 1e-12) << step;
    }
  });
}

TEST(EmbeddingTable, StatesReshardWithTheirRows) {
  const ::tessera::testing::Folder folder;
  const auto options = EmbeddingOptions(11, 4).sparse(true);
  const auto step = [&](Embedding& net, torch::optim::Optimizer& optimizer, int number,
                        const std::optional<DeviceMesh>& mesh) {
    seed(static_cast<std::uint64_t>(number));
    const at::Tensor ids = randint(11, {6});
    optimizer.zero_grad();
    loss_of(net->forward(mesh ? distribute_tensor(ids, *mesh, {Shard(0)}) : ids)).backward();
    optimizer.step();
  };
  for (const int kind : {0, 1}) {
    const std::string name = concat("kind-", kind);
    auto expected = filled(Embedding(options), 8);
    auto other = optimizer_of(kind, expected->weight);
    for (int i = 0; i < 4; ++i) step(expected, *other, i, std::nullopt);
    on_threads(2, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", 2}});
      auto net = filled(Embedding(options), 8);
      place(*net, {mesh, {11, 4}, {Shard(0)}, {{0, {3, 8}}}});
      auto optimizer = optimizer_of(kind, net->weight);
      for (int i = 0; i < 2; ++i) step(net, *optimizer, i, mesh);
      CheckpointState state;
      state.add("net.", *net);
      add_optimizer(state, "opt.", *optimizer, *net);
      Checkpointer(manager, folder.path()).save(name, state);
    });
    for (const auto& [ranks, dim] : std::vector<std::pair<int, int>>{{1, 0}, {3, 0}, {2, 1}}) {
      on_threads(ranks, [&, dim = dim](DistributedManager& manager) {
        const auto mesh = manager.mesh({{"x", manager.world_size()}});
        auto net = filled(Embedding(options), 1);
        place(*net, {mesh, {11, 4}, {Shard(dim)}});
        auto optimizer = optimizer_of(kind, net->weight);
        const CheckpointReader saved(manager.world(), folder.path(), name);
        CheckpointState state;
        state.add("net.", *net);
        saved.load(state, {.allow_extra = true});
        load_optimizer(saved, "opt.", *optimizer, *net);
        for (int i = 2; i < 4; ++i) step(net, *optimizer, i, mesh);
        EXPECT_LT(difference(net->weight, expected->weight), 1e-12) << kind << " on " << ranks;
      });
    }
  }
}

TEST(EmbeddingTable, ATableThatIsAMatrixTooAddsBothGradients) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const auto options = EmbeddingOptions(7, 3).sparse(true);
    auto net = filled(Embedding(options), 2), expected = filled(Embedding(options), 2);
    place(*net, {mesh, {7, 3}, {Shard(0)}});
    const at::Tensor ids = randint(7, {5});
    const auto tied = [](Embedding& n, const at::Tensor& words) {
      return loss_of(n->forward(words).matmul(n->weight.t()));
    };
    tied(net, distribute_tensor(ids, mesh, {Shard(0)})).backward();
    tied(expected, ids).backward();
    EXPECT_LT(difference(dense(net->weight.grad()), dense(expected->weight.grad())), 1e-12);
  });
}

TEST(EmbeddingTable, RefusesInWordsOnEveryRank) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    auto net = filled(Embedding(EmbeddingOptions(6, 2).sparse(true)), 2);
    place(*net, {mesh, {6, 2}, {Shard(0)}});
    const auto text = [](const std::function<void()>& call) -> std::string {
      try {
        call();
      } catch (const std::exception& e) {
        return e.what();
      }
      return "";
    };
    // One rank alone has an id that there is not; both are told, and go on.
    const at::Tensor wrong = at::tensor({0, 1, 2, 17}, at::kLong);
    const std::string said =
        text([&] { net->forward(distribute_tensor(wrong, mesh, {Shard(0)})); });
    EXPECT_NE(said.find("index 17 on rank 1 is out of range for a table of 6 rows"),
              std::string::npos)
        << said;
    const at::Tensor ids = at::tensor({0, 1, 2, 5}, at::kLong);
    net->forward(distribute_tensor(ids, mesh, {Shard(0)})).sum().backward();
    // Optimizers of torch's that keep moments.
    torch::optim::Adagrad adagrad(net->parameters());
    const std::string other = text([&] { adagrad.step(); });
    EXPECT_NE(other.find("RowwiseAdagrad"), std::string::npos) << other;
    // A gradient that is dense.
    SparseAdam optimizer(net->parameters());
    net->weight.mutable_grad() = net->weight.grad().to_dense();
    EXPECT_NE(text([&] { optimizer.step(); }).find("sparse = true"), std::string::npos);
    const auto& state = *optimizer.state().begin()->second;
    EXPECT_EQ(static_cast<const SparseAdamParamState&>(state).step(), 0) << "it was no step";
    EXPECT_THROW(RowwiseAdagrad(net->parameters(), RowwiseAdagradOptions(-1)), InvalidArgument);
    // Offsets of one rank, and dtypes that differ.
    const at::Tensor two = at::tensor({0, 2}, at::kLong);
    const bool first = manager.rank() == 0;
    EXPECT_THROW(bags_from_local(ids, first ? two + 3 : two, mesh), std::exception);
    EXPECT_THROW(bags_from_local(ids.to(first ? at::kInt : at::kLong), two, mesh), InvalidArgument);
    auto bags = filled(EmbeddingBag(EmbeddingBagOptions(6, 2).mode(torch::kSum).sparse(true)), 2);
    place(*bags, {mesh, {6, 2}, {Shard(0)}});
    const at::Tensor all = distribute_tensor(ids, mesh, {Shard(0)});
    for (const std::vector<std::int64_t>& offsets :
         {std::vector<std::int64_t>{0, 9}, {1, 3}, {0, 3, 2}}) {
      const at::Tensor starts = at::tensor(offsets, at::kLong);
      EXPECT_THROW(bags->forward(all, starts), InvalidArgument);
      EXPECT_THROW(bags->forward(all, distribute_tensor(starts, mesh, {Shard(0)})),
                   InvalidArgument);
    }
    // Units of fully_shard() gather a table that does not stay.
    Embedding unit(EmbeddingOptions(6, 2).sparse(true));
    fully_shard(*unit, mesh);
    EXPECT_THROW(unit->forward(all), ShardingError);
    EXPECT_EQ(net->forward(all).size(0), 4) << "and they go on";
  });
}

}  // namespace tessera::test::embedding_table_test
