// Tensor-parallel plans: transformers of drawn shapes beside one process, and what they move.

#include <map>
#include <optional>

#include "call_order.h"
#include "support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/check_module.h"
#include "tessera/nn/tensor_parallel.h"

namespace tessera::test::tensor_parallel_test {

namespace {

struct Shape {
  std::int64_t width = 6, heads = 4, groups = 4, size = 2, hidden = 13, vocabulary = 11;
  std::int64_t length = 5, blocks = 2;
  bool fused = false, gated = false, bias = true, tied = false;
  // No norm before the head: the residual is Partial there, and so is its gradient.
  bool bare = false;
  double dropout = 0;
};

using torch::nn::Linear;
using torch::nn::LinearOptions;

Linear linear(std::int64_t in, std::int64_t out, bool bias) {
  return Linear(LinearOptions(in, out).bias(bias));
}

// `groups` heads of keys and values, each for heads / groups heads of queries.
struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const Shape& s) : shape(s) {
    const std::int64_t own = s.groups * s.size;
    if (s.fused) {
      qkv = register_module("qkv", linear(s.width, s.heads * s.size + 2 * own, s.bias));
    } else {
      query = register_module("query", linear(s.width, s.heads * s.size, s.bias));
      key = register_module("key", linear(s.width, own, s.bias));
      value = register_module("value", linear(s.width, own, s.bias));
    }
    out = register_module("out", linear(s.heads * s.size, s.width, s.bias));
  }
  at::Tensor forward(const at::Tensor& x) {
    const std::int64_t b = x.size(0), t = x.size(1), each = shape.heads / shape.groups * shape.size;
    at::Tensor q, k, v;
    if (shape.fused) {
      // of a group: its queries, its key, its value
      const at::Tensor all = qkv(x).unflatten(-1, {shape.groups, each + 2 * shape.size});
      q = all.narrow(-1, 0, each).reshape({b, t, shape.heads, shape.size});
      k = all.narrow(-1, each, shape.size);
      v = all.narrow(-1, each + shape.size, shape.size);
    } else {
      q = query(x).view({b, t, shape.heads, shape.size});
      k = key(x).view({b, t, shape.groups, shape.size});
      v = value(x).view({b, t, shape.groups, shape.size});
    }
    const at::Tensor y = at::scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), {}, 0.0, /*is_causal=*/true, {},
        /*enable_gqa=*/shape.heads != shape.groups);
    return out(y.transpose(1, 2).flatten(2));
  }
  Shape shape;
  Linear qkv = nullptr, query = nullptr, key = nullptr, value = nullptr, out = nullptr;
};
TORCH_MODULE(Attention);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const Shape& s) : dropout(s.dropout) {
    const torch::nn::LayerNormOptions norm({s.width});
    first = register_module("first", torch::nn::LayerNorm(norm));
    second = register_module("second", torch::nn::LayerNorm(norm));
    attention = register_module("attention", Attention(s));
    if (s.gated) gate = register_module("gate", linear(s.width, s.hidden, s.bias));
    up = register_module("up", linear(s.width, s.hidden, s.bias));
    down = register_module("down", linear(s.hidden, s.width, s.bias));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = x + at::dropout(attention(first(x)), dropout, is_training());
    const at::Tensor normal = second(y);
    const at::Tensor inner = gate ? at::silu(gate(normal)) * up(normal) : at::gelu(up(normal));
    return y + at::dropout(down(inner), dropout, is_training());
  }
  double dropout;
  torch::nn::LayerNorm first = nullptr, second = nullptr;
  Attention attention = nullptr;
  Linear gate = nullptr, up = nullptr, down = nullptr;
};
TORCH_MODULE(Block);

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const Shape& s) : shape(s) {
    embedding = register_module("embedding", torch::nn::Embedding(s.vocabulary, s.width));
    position = register_module("position", torch::nn::Embedding(s.length, s.width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < s.blocks; ++i) blocks->push_back(Block(s));
    if (!s.bare)
      norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({s.width})));
    if (!s.tied) head = register_module("head", linear(s.width, s.vocabulary, false));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = embedding(tokens) + position(at::arange(tokens.size(1)));
    x = at::dropout(x, shape.dropout, is_training());
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    if (norm) x = norm(x);
    return head ? head(x) : at::linear(x, embedding->weight);
  }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& next) {
    return at::cross_entropy_loss(forward(tokens).flatten(0, 1), next.flatten());
  }
  Shape shape;
  torch::nn::Embedding embedding = nullptr, position = nullptr;
  torch::nn::ModuleList blocks = nullptr;
  torch::nn::LayerNorm norm = nullptr;
  Linear head = nullptr;
};
TORCH_MODULE(Transformer);

LayerShardings layers_of(const Shape& s) {
  LayerShardings all{{"*.attention.out", row(s.groups)},
                     {"*.up", column()},
                     {"*.down", row()},
                     {"embedding", vocabulary()}};
  if (!s.tied) all.emplace_back("head", vocabulary());
  if (s.gated) all.emplace_back("*.gate", column());
  if (s.fused) {
    all.emplace_back("*.qkv", column(s.groups));
  } else {
    for (const char* name : {"*.query", "*.key", "*.value"})
      all.emplace_back(name, column(s.groups));
  }
  return all;
}

Transformer made(const Shape& s) {
  Transformer net(s);
  net->to(at::kDouble);
  fill(*net, 5);
  return net;
}

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

std::map<std::string, int> calls(const CommTrace& trace) {
  std::map<std::string, int> all;
  for (const CommSummary& s : trace.summary()) all[s.operation] += static_cast<int>(s.count);
  return all;
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

TEST(TensorParallelPlan, SaysWhatItDoes) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"tensor", 2}});
    Shape s;
    s.blocks = 1;
    s.fused = true;
    s.heads = s.groups = 3;
    auto net = made(s);
    const auto plan = tensor_parallel(*net, mesh, layers_of(s), {.sequence_dim = 1});
    const std::string text = plan.to_string();
    EXPECT_NE(text.find("tensor parallel over tensor, data sharded along dim 1 between layers"),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("blocks.0.attention.qkv.weight [18, 6]: column of 3 units, Shard(0) "
                        "[12, 6]"),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("blocks.0.attention.out.weight [6, 6]: row of 3 units, Shard(1) [4, 2]"),
              std::string::npos)
        << text;
    std::int64_t mine = 0;
    for (const auto& p : plan.parameters()) mine += p.elements[manager.rank()];
    std::int64_t held = 0;
    for (const auto& p : net->parameters()) held += to_local(p.detach()).numel();
    EXPECT_EQ(mine, held);
    // The rule of a plan serves a check of a module too.
    torch::nn::Sequential mlp(linear(6, 9, true), torch::nn::GELU(), linear(9, 6, true));
    mlp->to(at::kDouble);
    fill(*mlp, 2);
    const TensorParallelPlan of_mlp(*mlp, mesh, {{"0", column()}, {"2", row()}});
    const auto report = check_module(
        *mlp,
        [](torch::nn::Module& m, const std::vector<at::Tensor>& t) {
          return std::vector<at::Tensor>{dynamic_cast<torch::nn::SequentialImpl&>(m).forward(t[0])};
        },
        {randn({4, 6}, at::kDouble)}, mesh, of_mlp.rule(), {.placements = {{Replicate()}}});
    EXPECT_TRUE(report.safe()) << report.to_string();
  });
}

TEST(TensorParallelPlan, TheFirstPatternThatMatchesALayerOrItsParameterCounts) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"tensor", 2}});
    torch::nn::Sequential mlp(linear(6, 4, true), linear(4, 6, true));
    const auto placed = [&](const LayerShardings& layers) {
      std::vector<Placement> all;
      const TensorParallelPlan plan(*mlp, mesh, layers);
      for (const auto& p : plan.parameters()) all.push_back(p.placement.placements[0]);
      return all;
    };
    const std::vector<Placement> pair{Shard(0), Shard(0), Shard(1), Replicate()},
        columns{Shard(0), Shard(0), Shard(0), Shard(0)};
    EXPECT_EQ(placed({{"1", row()}, {"*", column()}}), pair);
    EXPECT_EQ(placed({{"*", column()}, {"1", row()}}), columns);
    EXPECT_EQ(placed({{"1.weight", sharded(1)}, {"1.bias", replicated()}, {"0", column()}}), pair);
  });
}

TEST(TensorParallelPlan, RefusesWhatDoesNotFitOnEveryRank) {
  on_ranks(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"tensor", 2}});
    const auto message = [&](const LayerShardings& layers,
                             const TensorParallelOptions& options = {}) -> std::string {
      Shape s;
      s.fused = true;
      auto net = made(s);
      net->register_parameter("scores", net->embedding->weight);
      try {
        tensor_parallel(*net, mesh, layers, options);
      } catch (const InvalidArgument& e) {
        EXPECT_FALSE(is_sharded(net->norm->weight)) << "nothing has changed";
        return e.what();
      }
      return "";
    };
    const auto expect = [](const std::string& text, const char* what) {
      EXPECT_NE(text.find(what), std::string::npos) << text;
    };
    expect(message({{"*.attentoin.*", column()}}), "has a name like [*.attentoin.*]");
    expect(message({{"*.qkv", column(7)}}), "do not divide into 7 units");
    expect(message({{"*.qkv", column(-1)}}), "do not divide");
    expect(message({{"norm", column()}}), "it knows layers of a weight [out, in]");
    expect(message({{"norm", sharded(0)}}), "names a parameter itself");
    expect(message({{"norm.weight", sharded(1)}}), "has no dim 1");
    expect(message({{"*.up", column()}}, {.axis = "model"}), "model");
    expect(message({{"*.up", column()}}, {.sequence_dim = -2}), "sequence_dim is -2");
    expect(message({{"*.up", column()}}, {.sharded_axis = "tensor"}), "give two axes");
    expect(message({{"embedding", vocabulary()}}), "are one tensor, and lie in two ways");
    expect(message({{"embedding", vocabulary()}, {"scores", sharded(1)}}), "lie in two ways");
    EXPECT_EQ(message({{"norm.weight", sharded(0)},
                       {"*.qkv", column(4)},
                       {"*.qkv", row()},
                       {"embedding", vocabulary()},
                       {"scores", sharded(0)}}),
              "");
    // What one rank asks for differs.
    Shape s;
    s.fused = true;
    auto net = made(s);
    EXPECT_THROW(tensor_parallel(*net, mesh, {{"*.qkv", column(manager.rank() == 0 ? 4 : 5)}}),
                 Error);
  });
}

}  // namespace tessera::test::tensor_parallel_test
