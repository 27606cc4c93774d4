// Tensor parallelism: transformers of drawn shapes beside one process, and what they move.

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "call_counts.h"
#include "call_order.h"
#include "transformer.h"

namespace tessera::test::tensor_parallel_test {

namespace {

struct Batch {
  at::Tensor tokens, next;
};
Batch batch_of(const Shape& s, std::int64_t rows = 4) {
  seed(9);
  return {randint(s.vocabulary, {rows, s.length}), randint(s.vocabulary, {rows, s.length})};
}

Batch on_mesh(const Batch& b, const DeviceMesh& mesh) {
  std::vector<Placement> lies;
  for (const Axis& axis : mesh.mesh().axes())
    lies.push_back(axis.name == "tensor" ? Replicate() : Shard(0));
  return {distribute_tensor(b.tokens, mesh, lies), distribute_tensor(b.next, mesh, lies)};
}

std::string name_of(const Shape& s) {
  return concat("heads ", s.heads, '/', s.groups, " hidden ", s.hidden, " vocabulary ",
                s.vocabulary, " length ", s.length, s.fused ? " fused" : "",
                s.gated ? " gated" : "", s.bias ? " bias" : "", s.tied ? " tied" : "",
                s.bare ? " bare" : "");
}

void expect_as_one_process(DistributedManager& manager, const std::vector<Axis>& axes,
                           const Shape& s, std::optional<int> sequence) {
  const std::string where =
      concat(name_of(s), " on ", Mesh(axes).to_string(), sequence ? " along the sequence" : "");
  // Nothing is gathered but what the plan says.
  set_policies(manager, {.redistribution = Policy::error});
  const auto mesh = manager.mesh(test::mapped(axes));
  const Batch plain = batch_of(s), batch = on_mesh(plain, mesh);
  auto expected = made(s), net = made(s);
  const at::Tensor scores = expected->forward(plain.tokens);
  const at::Tensor alone = expected->loss(plain.tokens, plain.next);
  alone.backward();
  TensorParallelOptions options;
  options.sequence_dim = sequence;
  if (mesh.mesh().has_axis("sharded")) options.sharded_axis = "sharded";
  tensor_parallel(*net, mesh, layers_of(s), options);
  for (int step = 0; step < 2; ++step) {
    for (auto& p : net->parameters()) p.mutable_grad().reset();
    const at::Tensor loss = net->loss(batch.tokens, batch.next);
    EXPECT_LT(difference(loss, alone), 1e-12) << where;
    loss.backward();
  }
  EXPECT_LT(difference(net->forward(batch.tokens), scores), 1e-12) << where;
  const auto got = net->named_parameters(), all = expected->named_parameters();
  for (const auto& item : all) {
    const at::Tensor grad = got[item.key()].grad();
    ASSERT_TRUE(grad.defined()) << where << ' ' << item.key();
    EXPECT_LT(difference(grad, item.value().grad(), 1e-3), 1e-11) << where << ' ' << item.key();
    EXPECT_TRUE(spec(grad) == spec(got[item.key()])) << where << ' ' << item.key();
  }
}

}  // namespace

TEST(TensorParallel, TrainsAsOneProcessWithUnevenHeadsFeaturesAndEmptyShards) {
  const std::vector<std::vector<Axis>> meshes{{{"tensor", 1}},
                                              {{"tensor", 2}},
                                              {{"tensor", 3}},
                                              {{"tensor", 4}},
                                              {{"data", 2}, {"tensor", 2}},
                                              {{"tensor", 2}, {"data", 2}},
                                              {{"sharded", 2}, {"tensor", 2}},
                                              {{"sharded", 3}, {"tensor", 1}}};
  for (const auto& axes : meshes) {
    on_ranks(Mesh(axes).size(), [&](DistributedManager& manager) {
      Draw draw(17);
      for (int round = 0; round < 4; ++round) {
        Shape s;
        s.groups = draw.between(1, 5);
        s.heads = s.groups * draw.between(1, 2);
        s.hidden = draw.of<std::int64_t>({2, 7, 13});
        s.vocabulary = draw.of<std::int64_t>({3, 11});
        s.length = draw.of<std::int64_t>({2, 5});
        s.fused = round % 2 == 0;
        s.gated = draw.chance(50);
        s.bias = draw.chance(60);
        s.tied = draw.chance(50);
        s.bare = draw.chance(40);
        expect_as_one_process(manager, axes, s, {});
        expect_as_one_process(manager, axes, s, 1);
      }
    });
  }
}

TEST(TensorParallel, CallsNoMoreCollectivesThanMegatron) {
  on_ranks(2, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error, .plain_values = Policy::allow});
    const auto mesh = manager.mesh({{"tensor", 2}});
    for (const bool fused : {true, false}) {
      for (const bool sequence : {false, true}) {
        Shape s;
        s.fused = fused;
        s.gated = !fused;
        s.length = 6;
        auto net = made(s);
        tensor_parallel(*net, mesh, layers_of(s),
                        {.sequence_dim = sequence ? std::optional(1) : std::nullopt});
        const Batch batch = on_mesh(batch_of(s), mesh);
        const int n = static_cast<int>(s.blocks);
        CommTraceScope trace(manager);
        const at::Tensor scores = net->forward(batch.tokens);
        const auto forward = calls(*trace);
        trace->clear();
        const at::Tensor loss = at::cross_entropy_loss(scores.flatten(0, 1), batch.next.flatten());
        const auto of_loss = calls(*trace);
        trace->clear();
        loss.backward();
        const auto backward = calls(*trace);
        using Calls = std::map<std::string, int>;
        // The largest score, the sum of exponentials, and the count of the mean.
        EXPECT_EQ(of_loss, (Calls{{"all_reduce", 3}}));
        if (!sequence) {
          // two for a block, and one for the embedding
          EXPECT_EQ(forward, (Calls{{"all_reduce", 2 * n + 1}})) << trace->table();
          // two for a block, one for the head, and one number a row for the loss
          EXPECT_EQ(backward, (Calls{{"all_reduce", 2 * n + 1 + 1}})) << trace->table();
        } else {
          EXPECT_EQ(forward, (Calls{{"all_gather", 2 * n + 1}, {"reduce_scatter", 2 * n + 1}}))
              << trace->table();
          // Of a block: the inputs of its two pairs and the gradients of their results gathered,
          // the gradients of the inputs scattered. Beside the head's: one message for gradients of
          // what is replicated, one for the table's, one number a row for the loss.
          EXPECT_EQ(backward, (Calls{{"all_gather", 4 * n + 1},
                                     {"reduce_scatter", 2 * n + 1 + 1},
                                     {"all_reduce", 1 + 1}}))
              << trace->table();
        }
      }
    }
  });
}

// Without a norm the residual is Partial in front of the head, and so is its gradient behind it.
TEST(TensorParallel, CallsNoMoreCollectivesWithoutANormBeforeTheHead) {
  on_ranks(2, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error, .plain_values = Policy::allow});
    const auto mesh = manager.mesh({{"tensor", 2}});
    for (const bool bias : {true, false}) {
      Shape s;
      s.bare = true;
      s.bias = bias;
      s.length = 6;
      auto net = made(s);
      tensor_parallel(*net, mesh, layers_of(s));
      const Batch batch = on_mesh(batch_of(s), mesh);
      const int n = static_cast<int>(s.blocks);
      CommTraceScope trace(manager);
      const at::Tensor scores = net->forward(batch.tokens);
      using Calls = std::map<std::string, int>;
      EXPECT_EQ(calls(*trace), (Calls{{"all_reduce", 2 * n + 1}})) << trace->table();
      const at::Tensor loss = at::cross_entropy_loss(scores.flatten(0, 1), batch.next.flatten());
      trace->clear();
      loss.backward();
      // In a message of gradients the bias of the last row layer alone: what is Partial behind it
      // is reduced for all others.
      EXPECT_EQ(calls(*trace), (Calls{{"all_reduce", 2 * n + 1 + 1 + (bias ? 1 : 0)}}))
          << trace->table();
      std::int64_t of_gradients = 0;
      for (const CommEvent& e : trace->events())
        of_gradients += e.name == "gradients" ? e.bytes : 0;
      EXPECT_EQ(of_gradients, bias ? s.width * 8 : 0) << trace->table();
    }
  });
}

TEST(TensorParallel, ReduceScattersWhereTheNextOperatorTakesShards) {
  on_ranks(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"tensor", 3}});
    for (const bool bias : {true, false}) {
      set_policies(manager, {.redistribution = Policy::error});
      auto layer = linear(5, 6, bias), expected = linear(5, 6, bias);
      for (auto* l : {&layer, &expected}) {
        (*l)->to(at::kDouble);
        fill(**l, 3);
      }
      tensor_parallel(*layer, mesh, {{"", row()}});
      const at::Tensor x = randn({2, 4, 5}, at::kDouble), rest = randn({2, 4, 6}, at::kDouble);
      const at::Tensor of_layer = leaf(x, ShardSpec(mesh, {2, 4, 5}, {Shard(2)})),
                       residual = leaf(rest, ShardSpec(mesh, {2, 4, 6}, {Shard(1)}));
      const at::Tensor plain = x.clone().requires_grad_(), beside = rest.clone().requires_grad_();
      CommTraceScope trace(manager);
      const at::Tensor y = residual + layer(of_layer);
      EXPECT_EQ(calls(*trace), (std::map<std::string, int>{{"reduce_scatter", 1}}))
          << trace->table();
      EXPECT_EQ(placements(y), std::vector<Placement>{Shard(1)});
      const at::Tensor wanted = beside + expected(plain);
      EXPECT_LT(difference(y, wanted), 1e-12);
      // The gradient, sharded too, is gathered.
      set_policies(manager, {.redistribution = Policy::allow});
      y.sin().sum().backward();
      wanted.sin().sum().backward();
      EXPECT_LT(difference(of_layer.grad(), plain.grad()), 1e-12);
      EXPECT_LT(difference(residual.grad(), beside.grad()), 1e-12);
      EXPECT_LT(difference(layer->weight.grad(), expected->weight.grad()), 1e-12);
    }
  });
}

// Dropout draws by global index: the same elements go, however the data lie.
TEST(TensorParallel, DropsTheSameElementsAlongTheSequence) {
  on_ranks(3, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"tensor", 3}});
    Shape s;
    s.dropout = 0.3;
    s.gated = true;
    const Batch batch = on_mesh(batch_of(s), mesh);
    std::vector<Transformer> nets;
    std::vector<at::Tensor> losses;
    for (const auto& sequence : {std::optional<int>(), std::optional<int>(1)}) {
      auto net = made(s);
      tensor_parallel(*net, mesh, layers_of(s), {.sequence_dim = sequence});
      manual_seed(manager, 4);
      losses.push_back(net->loss(batch.tokens, batch.next));
      losses.back().backward();
      nets.push_back(net);
    }
    EXPECT_LT(difference(losses[1], losses[0]), 1e-12);
    const auto got = nets[1]->named_parameters(), expected = nets[0]->named_parameters();
    for (const auto& item : expected)
      EXPECT_LT(difference(got[item.key()].grad(), item.value().grad(), 1e-3), 1e-11) << item.key();
  });
}

// A failure of one rank alone: the others had gone further, and had gathered something else.
TEST(TensorParallel, GathersASharedInputAnewAfterAFailure) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"tensor", 2}});
    auto first = linear(3, 4, true), second = linear(3, 5, true), plain = linear(3, 5, true);
    for (auto* l : {&first, &second, &plain}) {
      (*l)->to(at::kDouble);
      fill(**l, 3);
      if (l != &plain) tensor_parallel(**l, mesh, {{"", column()}}, {.sequence_dim = 1});
    }
    const at::Tensor value = randn({2, 5, 3}, at::kDouble);
    const at::Tensor x = leaf(value, ShardSpec(mesh, {2, 5, 3}, {Shard(1)})) * 1,
                     other = leaf(value, ShardSpec(mesh, {2, 5, 3}, {Shard(1)})) * 2;
    for (const int bad : {0, 1}) {
      at::Tensor index = at::zeros({2, 1}, at::kLong);
      index[bad][0] = 7;
      EXPECT_ANY_THROW({
        (void)first(x);
        at::gather(distribute_tensor(at::ones({2, 3}), mesh, {Shard(0)}), 1,
                   distribute_tensor(index, mesh, {Shard(0)}));
        (void)first(other);
        mesh.all().barrier();
      });
      mesh.all().barrier();
      EXPECT_LT(difference(second(x), plain(value)), 1e-12) << bad;
    }
  });
}

TEST(TensorParallel, SharesAGatheredInputThatHasBeenWrittenToBefore) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"tensor", 2}});
    auto first = linear(3, 4, true), second = linear(3, 5, true);
    for (auto* l : {&first, &second}) {
      (*l)->to(at::kDouble);
      tensor_parallel(**l, mesh, {{"", column()}}, {.sequence_dim = 1});
    }
    at::Tensor x = leaf(randn({2, 5, 3}, at::kDouble), ShardSpec(mesh, {2, 5, 3}, {Shard(1)})) * 1;
    x.mul_(2);
    (void)first(x);
    const CommTraceScope trace(manager);
    (void)second(x);
    EXPECT_TRUE(trace->events().empty()) << trace->table();
  });
}

TEST(TensorParallel, SharesAGatheredInputOnlyWhileItIsTheSameValue) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"tensor", 2}});
    auto first = linear(3, 4, true), second = linear(3, 5, true), twin = linear(3, 4, true),
         other = linear(3, 5, true);
    for (auto* l : {&first, &second, &twin, &other}) {
      (*l)->to(at::kDouble);
      fill(**l, 3);
      if (l == &first || l == &second)
        tensor_parallel(**l, mesh, {{"", column()}}, {.sequence_dim = 1});
    }
    const at::Tensor value = randn({2, 5, 3}, at::kDouble);
    const auto both = [](Linear& a, Linear& b, const at::Tensor& x) {
      const at::Tensor early = a(x), same = b(x), twice = x * 2;
      const at::Tensor loss =
          early.square().sum() + same.sin().sum() + b(twice).mul(0.1).exp().sum();
      const at::NoGradGuard no_grad;
      at::Tensor values = x.detach().clone();
      const at::Tensor before = a(values).clone();
      values.mul_(3);
      const at::Tensor after = a(values);
      (void)b(x);  // of no graph: not handed to one that has a graph
      const at::AutoGradMode graphs(true);
      return loss + (before - after).square().sum() + b(x).square().sum();
    };
    at::Tensor x = leaf(value, ShardSpec(mesh, {2, 5, 3}, {Shard(1)}));
    at::Tensor plain = value.clone().requires_grad_();
    const at::Tensor loss = both(first, second, x * 1), expected = both(twin, other, plain * 1);
    EXPECT_LT(difference(loss, expected), 1e-12);
    loss.backward();
    expected.backward();
    EXPECT_LT(difference(x.grad(), plain.grad()), 1e-11);
    EXPECT_LT(difference(first->weight.grad(), twin->weight.grad()), 1e-11);
    EXPECT_LT(difference(second->weight.grad(), other->weight.grad()), 1e-11);
    EXPECT_LT(difference(second->bias.grad(), other->bias.grad()), 1e-11);

    {
      const c10::InferenceMode inference;
      const auto written = [](Linear& a, Linear& b, at::Tensor x) {
        const at::Tensor before = a(x).sum();
        x.mul_(2);
        return before + b(x).square().sum();
      };
      EXPECT_LT(difference(written(first, second, distribute_tensor(value, mesh, {Shard(1)})),
                           written(twin, other, value.clone())),
                1e-12);
    }

    // twice through one graph, and a second derivative
    x.mutable_grad().reset();
    plain.mutable_grad().reset();
    const auto twice = [](Linear& a, const at::Tensor& x) {
      const at::Tensor y = a(x).pow(3).sum();
      y.backward({}, /*keep_graph=*/true);
      const at::Tensor g =
          torch::autograd::grad({y}, {x, a->weight}, {}, true, /*create_graph=*/true)[0];
      g.square().sum().backward();
    };
    twice(first, x);
    twice(twin, plain);
    EXPECT_LT(difference(x.grad(), plain.grad()), 1e-11);
    EXPECT_LT(difference(first->weight.grad(), twin->weight.grad()), 1e-11);
  });
}

// One rank keeps results, and their graphs, that the others have dropped: all of them gather alike.
TEST(TensorParallel, GathersAlikeWhateverARankKeeps) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"tensor", 2}});
    std::vector<Linear> layers, twins;
    for (int i = 0; i < 3; ++i) {
      layers.push_back(linear(3, 4 + i, true));
      twins.push_back(linear(3, 4 + i, true));
      for (Linear* l : {&layers.back(), &twins.back()}) {
        (*l)->to(at::kDouble);
        fill(**l, 3);
      }
      tensor_parallel(*layers.back(), mesh, {{"", column()}}, {.sequence_dim = 1});
    }
    const at::Tensor value = randn({2, 5, 3}, at::kDouble), other = randn({3, 2}, at::kDouble);
    at::Tensor x = leaf(value, ShardSpec(mesh, {2, 5, 3}, {Shard(1)})),
               u = leaf(other, ShardSpec(mesh, {3, 2}, {Replicate()}));
    at::Tensor plain = value.clone().requires_grad_(), plain_u = other.clone().requires_grad_();
    std::vector<at::Tensor> log;
    const auto run = [&](std::vector<Linear>& of, const at::Tensor& in, const at::Tensor& aside,
                         bool keeps) {
      {
        const at::Tensor unused = of[0](in);
        if (keeps) log.push_back(unused);
      }
      // Between what a rank keeps and what is gathered alike: backward has to reduce both.
      const at::Tensor z = is_sharded(aside) ? redistribute(aside, {Shard(0)}) : aside * 1;
      const at::Tensor loss = of[1](in).square().sum() + of[2](in).sin().sum() + z.square().sum();
      for (int times = 0; times < 2; ++times) {
        loss.backward({}, /*keep_graph=*/true);
        if (keeps) log.push_back(loss);
      }
      const at::Tensor after = of[0](in).exp().sum();  // behind a backward
      after.backward();
      return loss.detach() + after.detach();
    };
    const at::Tensor expected = run(twins, plain, plain_u, false);
    for (const bool by_one : {false, true}) {
      x.mutable_grad().reset();
      u.mutable_grad().reset();
      for (Linear& l : layers) l->zero_grad();
      const CommTraceScope trace(manager);
      const at::Tensor got = run(layers, x, u, by_one && manager.rank() == 0);
      const std::string calls = order_of(*trace);
      EXPECT_LT(difference(got, expected), 1e-11);
      EXPECT_LT(difference(x.grad(), plain.grad()), 1e-11);
      EXPECT_LT(difference(u.grad(), plain_u.grad()), 1e-11);
      for (std::size_t i = 0; i < layers.size(); ++i)
        EXPECT_LT(difference(layers[i]->weight.grad(), twins[i]->weight.grad()), 1e-11);
      EXPECT_EQ(manager.world().all_gather_bytes(calls), std::vector<std::string>(2, calls));
    }
  });
}

}  // namespace tessera::test::tensor_parallel_test
