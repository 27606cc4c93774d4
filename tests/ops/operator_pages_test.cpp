// What the pages of docs/operators/ say of movement: for each family, what is computed where it
// lies, and which calls the rest makes. Three ranks, rows {3, 0, 2}; no shard may move unasked
// unless a claim says so, and every value and gradient is that of plain libtorch.

#include "operator_page.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::test::operator_pages_test {

TEST(OperatorPages, Pointwise) {
  page([](DistributedManager& manager, Page& p) {
    p.claim(
        "operators of equal placements", {rows({5, 4}), rows({5, 4})},
        [](const auto& t) { return (t[0] * t[1] + 1).relu().exp() / t[1]; }, kNothing);
    p.claim(
        "broadcasting a replicated row", {rows({5, 4}), whole_on_all({4})},
        [](const auto& t) { return t[0] * t[1] + t[1]; }, kNothing);
    p.claim(
        "a sharded and a replicated one", {rows({5, 4}), whole_on_all({5, 4})},
        [](const auto& t) { return t[0] * t[1]; }, kNothing);
    p.claim(
        "where, lerp, clamp", {rows({5, 4}), rows({5, 4})},
        [](const auto& t) {
          return at::where(t[0].gt(1), t[0].lerp(t[1], 0.3), t[1].clamp(0.6, 1.2));
        },
        kNothing);
    p.claim(
        "in place", {rows({5, 4}), rows({5, 4})},
        [](const auto& t) { return (t[0] * 1).addcmul_(t[1], t[1]).mul_(2).sigmoid_(); }, kNothing);
    p.moves_shards("other parts", {rows({5, 4}), {{5, 4}, Shard(0), {{0, {1, 2, 2}}}}},
                   [](const auto& t) { return t[0] + t[1]; });
    p.moves_shards("other dims", {rows({5, 4}), along({5, 4}, 1)},
                   [](const auto& t) { return t[0] + t[1]; });
    // Terms of a sum.
    const at::Tensor mine = at::full({4}, manager.rank() + 1.0, at::kDouble);
    const at::Tensor a = from_local(mine, p.mesh(), {Partial()}),
                     b = from_local(mine * 2, p.mesh(), {Partial()});
    const CommTraceScope trace(manager);
    const at::Tensor c = (a - b) * 3 / 2;
    EXPECT_TRUE(trace->events().empty()) << trace->table();
    EXPECT_TRUE(placements(c)[0].is_partial());
    const at::Tensor d = c.exp();
    EXPECT_EQ(calls(*trace), (Calls{{"all_reduce", 1}})) << "what is not linear needs the value";
    EXPECT_LT(difference(c, at::full({4}, -9.0, at::kDouble)), 1e-14);
    EXPECT_LT(difference(d, at::full({4}, -9.0, at::kDouble).exp()), 1e-14);
  });
}

TEST(OperatorPages, Reductions) {
  page([](DistributedManager& manager, Page& p) {
    p.claim(
        "over the sharded dim: a partial result", {rows({5, 4})},
        [](const auto& t) { return t[0].sum(0) + t[0].mean(0); }, kNothing);
    p.claim(
        "over another dim", {rows({5, 4})},
        [](const auto& t) { return t[0].sum(1) + t[0].mean(1) + t[0].logsumexp(1); }, kNothing);
    p.claim("extrema", {rows({5, 4})}, [](const auto& t) { return t[0].amax({0}); }, kNothing, {});
    p.claim(
        "extrema with their places, along a whole dim", {rows({5, 4})},
        [](const auto& t) { return std::get<0>(t[0].max(1)); }, kNothing);
    p.claim("extrema with their places, along the sharded dim", {rows({5, 4})},
            [](const auto& t) { return std::get<0>(t[0].max(0)); }, {{"all_reduce", 3}}, {});
    p.claim("logsumexp along the sharded dim", {rows({5, 4})},
            [](const auto& t) { return t[0].logsumexp(0); }, {{"all_reduce", 2}}, {});
    p.claim("variance", {rows({5, 4})}, [](const auto& t) { return t[0].var(0); },
            {{"all_reduce", 2}}, {});
    p.claim("norm", {rows({5, 4})}, [](const auto& t) { return at::linalg_vector_norm(t[0], 2); },
            {{"all_reduce", 1}});
    p.claim(
        "scans along a whole dim", {rows({5, 4})},
        [](const auto& t) { return t[0].cumsum(1) + std::get<0>(t[0].sort(1)) + t[0].flip(1); },
        kNothing);
    p.moves_shards("scans along the sharded dim", {rows({5, 4})},
                   [](const auto& t) { return t[0].cumsum(0); });
    p.claim(
        "triangles", {rows({5, 4})}, [](const auto& t) { return t[0].tril() + t[0].triu(1); },
        kNothing);
    p.claim("trace", {rows({5, 4})}, [](const auto& t) { return t[0].trace(); }, kNothing);
    // What reads the value sums it up.
    const at::Tensor x = distribute_tensor(at::ones({5, 4}), p.mesh(), {Shard(0)}, {{0, kUneven}});
    const CommTraceScope trace(manager);
    EXPECT_EQ(x.sum().item<float>(), 20);
    EXPECT_EQ(calls(*trace), (Calls{{"all_reduce", 1}}));
  });
}

TEST(OperatorPages, SoftmaxAndLosses) {
  page([](DistributedManager& manager, Page& p) {
    p.claim(
        "classes whole", {rows({5, 4})},
        [](const auto& t) { return t[0].softmax(1) + t[0].log_softmax(1); }, kNothing);
    p.claim(
        "classes sharded", {along({5, 4}, 1)}, [](const auto& t) { return t[0].log_softmax(1); },
        {{"all_reduce", 2}}, Calls{{"all_reduce", 1}});
    p.claim(
        "elementwise losses", {rows({5, 4}), rows({5, 4})},
        [](const auto& t) { return at::mse_loss(t[0], t[1]) + at::smooth_l1_loss(t[0], t[1]); },
        kNothing);
    // Scores are never gathered: what moves are a few numbers a row, whatever the number of
    // classes.
    const at::Tensor scores = randn({6, 300}, at::kDouble), target = randint(300, {6}),
                     plain = scores.clone().requires_grad_(true);
    const at::Tensor x =
        leaf(scores, ShardSpec(p.mesh(), {6, 300}, {Shard(1)}, {{1, {200, 0, 100}}}));
    const CommTraceScope trace(manager);
    const at::Tensor loss =
        at::cross_entropy_loss(x, distribute_tensor(target, p.mesh(), {Replicate()}));
    loss.backward();
    std::int64_t most = 0;
    for (const CommEvent& e : trace->events()) {
      EXPECT_EQ(e.operation, "all_reduce");
      most = std::max(most, e.bytes);
    }
    EXPECT_LE(most, 6 * 8) << "one number a row\n" << trace->table();
    const at::Tensor expected = at::cross_entropy_loss(plain, target);
    expected.backward();
    EXPECT_LT(difference(loss, expected), 1e-12);
    EXPECT_LT(difference(x.grad(), plain.grad()), 1e-12);
  });
}

TEST(OperatorPages, Matmul) {
  page([](DistributedManager& manager, Page& p) {
    p.claim(
        "rows of the first", {rows({5, 4}), whole_on_all({4, 3})},
        [](const auto& t) { return t[0].mm(t[1]); }, kNothing);
    p.claim(
        "columns of the second", {whole_on_all({5, 4}), along({4, 6}, 1)},
        [](const auto& t) { return t[0].mm(t[1]); }, kNothing);
    p.claim(
        "the summed dim of both: a partial result", {along({5, 6}, 1), along({6, 3}, 0)},
        [](const auto& t) { return t[0].mm(t[1]); }, kNothing);
    p.claim(
        "a bias is added once", {along({5, 6}, 1), {{3, 6}, Shard(1)}, whole_on_all({3})},
        [](const auto& t) { return at::linear(t[0], t[1], t[2]); }, kNothing);
    p.claim(
        "batches", {rows({5, 4, 2}), rows({5, 2, 3})}, [](const auto& t) { return t[0].bmm(t[1]); },
        kNothing);
    p.claim(
        "leading dims of linear", {along({2, 6, 4}, 1), whole_on_all({3, 4})},
        [](const auto& t) { return at::linear(t[0], t[1]); }, kNothing);
    p.moves_shards("the summed dim of one, the rows of the other", {rows({5, 4}), along({4, 3}, 0)},
                   [](const auto& t) { return t[0].mm(t[1]); });
    // A column-sharded layer, then a row-sharded one: one sum forward, one backward.
    const auto mlp = [](const auto& t) {
      return at::linear(at::linear(t[0] * 1, t[1]).tanh(), t[2]) * 1;
    };
    p.claim("two layers cut in two ways",
            {whole_on_all({5, 4}), along({7, 4}, 0), along({3, 7}, 1)}, mlp, kNothing);
    const at::Tensor x = leaf(randn({5, 4}), ShardSpec::replicated(p.mesh(), {5, 4}));
    const at::Tensor a = leaf(randn({7, 4}), ShardSpec(p.mesh(), {7, 4}, {Shard(0)})),
                     b = leaf(randn({3, 7}), ShardSpec(p.mesh(), {3, 7}, {Shard(1)}));
    const CommTraceScope trace(manager);
    const at::Tensor y = mlp(std::vector<at::Tensor>{x, a, b}).relu();
    EXPECT_EQ(calls(*trace), (Calls{{"all_reduce", 1}})) << trace->table();
    y.sum().backward();
    EXPECT_TRUE(placements(x.grad())[0].is_partial()) << "summed where its value is needed";
    EXPECT_EQ(calls(*trace), (Calls{{"all_reduce", 1}})) << trace->table();
  });
}

TEST(OperatorPages, Views) {
  page([](DistributedManager& manager, Page& p) {
    p.claim(
        "dims change places", {rows({5, 4, 2})},
        [](const auto& t) {
          return t[0].permute({2, 0, 1}).transpose(1, 2).unsqueeze(0).expand({3, 2, 4, 5});
        },
        kNothing);
    p.claim(
        "whole dims merge and split", {rows({5, 4, 2})},
        [](const auto& t) { return t[0].view({5, 8}).reshape({5, 2, 4}).flatten(1); }, kNothing);
    p.claim(
        "the first of merged dims", {rows({5, 4})}, [](const auto& t) { return t[0].flatten(); },
        kNothing);
    p.claim(
        "slices of the sharded dim", {rows({5, 4})},
        [](const auto& t) { return t[0].slice(0, 1, 4).slice(1, 0, 4, 2); }, kNothing);
    p.claim("splits of the sharded dim", {rows({5, 4})},
            [](const auto& t) { return t[0].split(2, 0)[1] * t[0].slice(0, 2, 4); }, kNothing, {});
    p.claim(
        "chunks of another", {rows({5, 4})},
        [](const auto& t) { return t[0].chunk(2, 1)[1] - t[0].chunk(2, 1)[0]; }, kNothing);
    p.claim(
        "joining along a whole dim", {rows({5, 4}), rows({5, 4})},
        [](const auto& t) {
          return at::cat({t[0], t[1]}, 1) + at::stack({t[0], t[1]}, 1).flatten(1);
        },
        kNothing);
    p.moves_shards("an element of the sharded dim", {rows({5, 4})},
                   [](const auto& t) { return t[0].select(0, 1); });
    p.claim(
        "joining what is replicated to both ends of the sharded dim",
        {whole_on_all({1, 4}), rows({5, 4}), whole_on_all({2, 4})},
        [](const auto& t) { return at::cat({t[0], t[1], t[2]}, 0); }, kNothing, std::nullopt);
    p.moves_shards("merging a later sharded dim", {along({5, 4}, 1)},
                   [](const auto& t) { return t[0].flatten(); });
    // Views share memory.
    const at::Tensor x = distribute_tensor(at::zeros({5, 4}), p.mesh(), {Shard(0)}, {{0, kUneven}});
    const CommTraceScope trace(manager);
    x.t().slice(1, 1, 4).fill_(2);
    EXPECT_TRUE(trace->events().empty()) << trace->table();
    EXPECT_EQ(whole(x).sum().item<float>(), 24);
  });
}

TEST(OperatorPages, Indexing) {
  page([](DistributedManager& manager, Page& p) {
    p.claim(
        "slices of the sharded dim, picked: a partial result", {rows({5, 4})},
        [](const auto& t) { return t[0].index_select(0, index_of(t, {4, 0, 4, 2})); }, kNothing);
    p.claim(
        "one index tensor", {rows({5, 4})},
        [](const auto& t) { return t[0].index({index_of(t, {-1, 3})}); }, kNothing);
    p.claim(
        "elements along a whole dim", {rows({5, 4})},
        [](const auto& t) { return t[0].gather(1, at::argsort(t[0], std::int64_t{1}, false)); },
        kNothing);
    p.claim(
        "rows of an embedding", {rows({5, 4})},
        [](const auto& t) { return at::embedding(t[0], index_of(t, {4, 1, 1})); }, kNothing);
    p.claim(
        "columns of an embedding", {along({5, 4}, 1)},
        [](const auto& t) { return at::embedding(t[0], index_of(t, {4, 1, 1})); }, kNothing);
    p.claim(
        "masks", {rows({5, 4})}, [](const auto& t) { return t[0].masked_fill(t[0].gt(1), 0.5); },
        kNothing);
    p.claim("slices written", {rows({5, 4}), whole_on_all({2, 4})},
            [](const auto& t) { return t[0].index_copy(0, index_of(t, {3, 1}), t[1]); }, kNothing,
            {});
    p.claim("slices added", {rows({5, 4}), whole_on_all({2, 4})},
            [](const auto& t) { return t[0].index_add(0, index_of(t, {3, 1}), t[1]); }, kNothing,
            {});
    p.claim("elements written", {rows({5, 4}), whole_on_all({3})},
            [](const auto& t) {
              return t[0].index_put({index_of(t, {4, 0, 2}), index_of(t, {1, 1, 3})}, t[1]);
            },
            kNothing, {});
    p.moves_shards("several index tensors", {rows({5, 4})}, [](const auto& t) {
      return t[0].index({index_of(t, {4, 0}), index_of(t, {1, 3})});
    });
    p.moves_shards("what depends on all values", {rows({5, 4})},
                   [](const auto& t) { return t[0].masked_select(t[0].gt(1)); });
    // A write to one row is done by the rank that owns it.
    const at::Tensor x = distribute_tensor(at::zeros({5, 4}), p.mesh(), {Shard(0)}, {{0, kUneven}});
    const CommTraceScope trace(manager);
    x.index_put_({distribute_tensor(at::tensor({3}), p.mesh(), {Replicate()})},
                 distribute_tensor(at::ones({4}), p.mesh(), {Replicate()}));
    EXPECT_TRUE(trace->events().empty()) << trace->table();
    EXPECT_EQ(to_local(x).sum().item<float>(), manager.rank() == 2 ? 4 : 0);
  });
}

TEST(OperatorPages, Norms) {
  page([](DistributedManager&, Page& p) {
    const auto affine = [](int n) { return whole_on_all({n}); };
    p.claim(
        "layer norm of samples", {rows({5, 4}), affine(4), affine(4)},
        [](const auto& t) { return at::layer_norm(t[0], {4}, t[1], t[2]); }, kNothing);
    p.claim(
        "group norm of samples", {rows({5, 4, 2}), affine(4), affine(4)},
        [](const auto& t) { return at::group_norm(t[0], 2, t[1], t[2]); }, kNothing);
    p.claim(
        "RMS norm of samples", {rows({5, 4}), affine(4)},
        [](const auto& t) { return at::rms_norm(t[0], {4}, t[1]); }, kNothing);
    p.claim(
        "instance norm of samples", {rows({5, 4, 3})},
        [](const auto& t) {
          return at::instance_norm(t[0], {}, {}, {}, {}, true, 0.1, 1e-5, false);
        },
        kNothing);
    const auto batch_norm = [](const auto& t) {
      return at::batch_norm(t[0], t[1], t[2], {}, {}, true, 0.1, 1e-5, false);
    };
    p.claim("batch norm over all samples", {rows({5, 4, 2}), affine(4), affine(4)}, batch_norm,
            {{"all_reduce", 2}}, Calls{{"all_reduce", 2}});
    p.claim("batch norm of channels", {along({5, 4, 2}, 1), {{4}, Shard(0)}, {{4}, Shard(0)}},
            batch_norm, kNothing);
    p.claim(
        "layer norm over the sharded dim", {along({5, 4}, 1)},
        [](const auto& t) { return at::layer_norm(t[0], {4}); }, {{"all_reduce", 2}},
        Calls{{"all_reduce", 1}});
    p.claim(
        "group norm of sharded channels", {along({5, 4, 2}, 1), affine(4), affine(4)},
        [](const auto& t) { return at::group_norm(t[0], 2, t[1], t[2]); }, {{"all_reduce", 2}},
        Calls{{"all_reduce", 1}});
  });
}

TEST(OperatorPages, Attention) {
  page([](DistributedManager& manager, Page& p) {
    const auto attend = [](const auto& t) {
      return at::scaled_dot_product_attention(t[0], t[1], t[2]);
    };
    p.claim("samples", {rows({5, 2, 4, 3}), rows({5, 2, 4, 3}), rows({5, 2, 4, 3})}, attend,
            kNothing);
    p.claim("heads", {along({2, 4, 3, 2}, 1), along({2, 4, 3, 2}, 1), along({2, 4, 3, 2}, 1)},
            attend, kNothing);
    // Over a sequence keys and values go round once, and no rank holds all of them.
    std::vector<at::Tensor> plain, x;
    for (int i = 0; i < 3; ++i) {
      plain.push_back(randn({1, 2, 9, 4}, at::kDouble).requires_grad_(true));
      x.push_back(
          leaf(plain.back(), ShardSpec(p.mesh(), {1, 2, 9, 4}, {Shard(2)}, {{2, {5, 0, 4}}})));
    }
    const CommTraceScope trace(manager);
    const at::Tensor y = attend(x);
    for (const CommEvent& e : trace->events()) {
      EXPECT_TRUE(e.operation == "send" || e.operation == "receive" || e.operation == "exchange")
          << e.operation;
      EXPECT_LE(e.bytes, 2 * 2 * (5 + 5) * 4 * 8)
          << "the largest part of keys and values there, and another one back";
    }
    EXPECT_LT(difference(y, attend(plain)), 1e-12);
  });
}

TEST(OperatorPages, Random) {
  page([](DistributedManager& manager, Page& p) {
    std::vector<at::Tensor> drawn;
    for (const ShardSpec& s :
         {ShardSpec(p.mesh(), {5, 4}, {Shard(0)}, {{0, kUneven}}),
          ShardSpec(p.mesh(), {5, 4}, {Shard(1)}), ShardSpec::replicated(p.mesh(), {5, 4})}) {
      manual_seed(manager, 3);
      const CommTraceScope trace(manager);
      const at::Tensor x = tessera::rand(s), y = at::randn_like(x), z = at::dropout(y, 0.5, true),
                       u = at::empty_like(x).uniform_(-1, 1);
      EXPECT_TRUE(trace->events().empty()) << trace->table();
      drawn.push_back(at::cat({whole(x), whole(y), whole(z), whole(u)}));
    }
    for (const at::Tensor& t : drawn)
      EXPECT_TRUE(at::equal(t, drawn[0])) << "the same numbers, wherever they lie";
  });
}

TEST(OperatorPages, FactoriesAndCopies) {
  page([](DistributedManager& manager, Page& p) {
    p.claim(
        "copies and casts", {rows({5, 4})},
        [](const auto& t) {
          return t[0].clone() + t[0].to(at::kFloat).to(at::kDouble) * 0 + t[0].contiguous();
        },
        kNothing);
    p.claim("tensors like another", {rows({5, 4})},
            [](const auto& t) {
              return at::zeros_like(t[0]) + at::ones_like(t[0]) + t[0].new_full({5, 4}, 2.0);
            },
            kNothing, {});
    const CommTraceScope trace(manager);
    const ShardSpec s(p.mesh(), {5, 4}, {Shard(0)}, {{0, kUneven}});
    const at::Tensor x = tessera::zeros(s) + tessera::ones(s) + tessera::full(s, 2.0);
    EXPECT_TRUE(placements(x)[0].is_shard());
    EXPECT_TRUE(trace->events().empty()) << trace->table();
    // Another value everywhere: with the target's placements.
    x.copy_(distribute_tensor(at::ones({5, 4}), p.mesh(), {Replicate()}));
    EXPECT_TRUE(trace->events().empty()) << trace->table();
    EXPECT_EQ(whole(x).sum().item<float>(), 20);
  });
}

TEST(OperatorPages, FourierTransforms) {
  page([](DistributedManager& manager, Page& p) {
    const auto parts = [](const at::Tensor& t) { return at::view_as_real(t); };
    p.claim(
        "along a whole dim", {rows({5, 4})},
        [&](const auto& t) { return parts(at::fft_rfft(t[0], std::nullopt, 1)); }, kNothing);
    p.moves_shards("along the sharded dim", {rows({5, 4})},
                   [&](const auto& t) { return parts(at::fft_fft(t[0], std::nullopt, 0)); });
    // Pencils: the data moves once, and no rank holds more than its share of another dim.
    set_policies(manager, {.redistribution = Policy::allow});
    const at::Tensor x =
        leaf(randn({6, 6}, at::kDouble), ShardSpec(p.mesh(), {6, 6}, {Shard(0)}), false);
    const CommTraceScope trace(manager);
    const at::Tensor y = at::fft_fft2(x);
    EXPECT_EQ(trace->events().size(), 1u) << trace->table();
    EXPECT_EQ(trace->events()[0].operation, "all_to_all");
    EXPECT_TRUE(placements(y)[0] == Shard(1));
    EXPECT_EQ(to_local(y).numel(), 12);
  });
}

TEST(OperatorPages, ConvolutionAndPooling) {
  page([](DistributedManager& manager, Page& p) {
    p.claim(
        "samples", {rows({5, 2, 4, 4}), whole_on_all({3, 2, 3, 3}), whole_on_all({3})},
        [](const auto& t) { return at::max_pool2d(at::conv2d(t[0], t[1], t[2], 1, 1), 2); },
        kNothing);
    p.claim(
        "channels of the result", {whole_on_all({2, 2, 4, 4}), along({3, 2, 3, 3}, 0)},
        [](const auto& t) { return at::conv2d(t[0], t[1]); }, kNothing);
    p.claim(
        "pooling of samples", {rows({5, 2, 4, 4})},
        [](const auto& t) {
          return at::avg_pool2d(t[0], 2) + at::adaptive_avg_pool2d(t[0], {2, 2});
        },
        kNothing);
    // In space only halos move, a row or two of each shard.
    const at::Tensor value = randn({1, 2, 9, 6}, at::kDouble),
                     weight = randn({3, 2, 3, 3}, at::kDouble);
    const at::Tensor x =
        leaf(value, ShardSpec(p.mesh(), {1, 2, 9, 6}, {Shard(2)}, {{2, {4, 2, 3}}}), false);
    const at::Tensor w = distribute_tensor(weight, p.mesh(), {Replicate()});
    const CommTraceScope trace(manager);
    const at::Tensor y = at::conv2d(x, w, {}, 1, 1);
    std::int64_t bytes = 0;
    for (const CommEvent& e : trace->events()) bytes += e.bytes;
    EXPECT_GT(bytes, 0);
    EXPECT_LE(bytes, 2 * 2 * 2 * 6 * 8)
        << "to and from two neighbours at most, one row of two channels each\n"
        << trace->table();
    EXPECT_LT(difference(y, at::conv2d(value, weight, {}, 1, 1)), 1e-12);
  });
}

TEST(OperatorPages, Optimizers) {
  page([](DistributedManager& manager, Page& p) {
    torch::nn::Linear net(4, 5);
    net->to(at::kDouble);
    fill(*net, 1);
    distribute_module(*net, p.mesh(), {{"weight", {{Shard(0)}, {{0, kUneven}}}}});
    net(distribute_tensor(randn({5, 4}, at::kDouble), p.mesh(), {Replicate()}))
        .square()
        .sum()
        .backward();
    torch::optim::AdamW adam(net->parameters(), 0.1);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const CommTraceScope trace(manager);
    adam.step();
    sgd.step();
    at::_foreach_mul_(std::vector<at::Tensor>{net->weight.detach(), net->bias.detach()}, 0.5);
    EXPECT_TRUE(trace->events().empty()) << "a step moves nothing\n" << trace->table();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    EXPECT_EQ(calls(*trace), (Calls{{"all_reduce", 1}})) << "one number of each sharded gradient\n"
                                                         << trace->table();
  });
}

}  // namespace tessera::test::operator_pages_test
