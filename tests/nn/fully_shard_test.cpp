// fully_shard: parameters gathered unit by unit, ahead of use, equal to one process.

#include "tessera/nn/fully_shard.h"

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>

#include "support.h"
#include "tessera/checkpoint/file.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/clip.h"
#include "tessera/nn/detail/flat_plan.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::test {

namespace {

using torch::nn::Linear;
using torch::nn::LinearOptions;
using torch::nn::Sequential;

// Residual blocks between two layers of the root's own; the first and the last may be tied, one
// block may be left out or called twice.
struct NetImpl : torch::nn::Module {
  struct Shape {
    std::int64_t in = 5, width = 7, hidden = 3;
    int blocks = 3;
    bool tied = false;
  };
  explicit NetImpl(Shape s) : shape(s) {
    first = register_module("first", Linear(s.in, s.width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < s.blocks; ++i) {
      blocks->push_back(Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({s.width})),
                                   Linear(s.width, s.hidden + i), torch::nn::GELU(),
                                   Linear(s.hidden + i, s.width)));
    }
    scale = register_parameter("scale", torch::ones({}));
    bias = register_parameter("bias", torch::zeros({s.in}));
    if (s.tied) {
      last = register_parameter("last", first->weight);
    } else {
      last = register_parameter("last", torch::zeros({s.width, s.in}));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = first->forward(x);
    for (std::size_t i = 0; i < blocks->size(); ++i) {
      if (static_cast<int>(i) == skip) continue;
      if (static_cast<int>(i) == throws) throw std::runtime_error("in the middle");
      auto block = blocks->ptr<torch::nn::SequentialImpl>(i);
      h = h + block->forward(h);
      if (static_cast<int>(i) == twice) h = h - block->forward(h) * scale;
    }
    return h.matmul(last) * scale + bias;
  }
  Shape shape;
  Linear first = nullptr;
  torch::nn::ModuleList blocks = nullptr;
  at::Tensor scale, bias, last;
  int skip = -1, twice = -1, throws = -1;
};
TORCH_MODULE(Net);

Net net_of(NetImpl::Shape shape, std::uint64_t seed = 11) {
  Net net(shape);
  net->to(at::kDouble);
  if (shape.tied) {
    // to() exchanges the data of each name
    net->last = net->first->weight;
  }
  fill(*net, seed);
  return net;
}

void expect_same(torch::nn::Module& got, torch::nn::Module& expected, const std::string& where,
                 bool gradients = true) {
  const auto a = got.named_parameters();
  for (const auto& item : expected.named_parameters()) {
    const at::Tensor p = a[item.key()];
    EXPECT_LT(difference(p, item.value(), 1e-3), 1e-10) << where << " " << item.key();
    if (!gradients) continue;
    ASSERT_EQ(p.grad().defined(), item.value().grad().defined()) << where << " " << item.key();
    if (!p.grad().defined()) continue;
    EXPECT_LT(difference(p.grad(), item.value().grad(), 1e-3), 1e-10)
        << where << " gradient of " << item.key();
    EXPECT_TRUE(spec(p.grad()) == spec(p)) << where << " " << item.key();
  }
}

// A tied parameter has two names.
std::vector<at::Tensor> once(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : module.parameters()) {
    if (std::none_of(all.begin(), all.end(), [&](const at::Tensor& q) { return q.is_same(p); }))
      all.push_back(p);
  }
  return all;
}

// As clip_gradients(): torch's own adds 1e-6 to the norm.
double clip_plainly(const std::vector<at::Tensor>& parameters, double most) {
  double sum = 0;
  for (const at::Tensor& p : parameters) {
    if (p.grad().defined()) sum += p.grad().square().sum().item<double>();
  }
  const double norm = std::sqrt(sum);
  for (const at::Tensor& p : parameters) {
    if (p.grad().defined() && norm > most) p.grad().mul_(most / norm);
  }
  return norm;
}

at::Tensor loss_of(const at::Tensor& y) { return y.square().mean() + y.sin().mean(); }

std::map<std::string, std::pair<int, std::int64_t>> calls_of(const CommTrace& trace) {
  std::map<std::string, std::pair<int, std::int64_t>> all;
  for (const CommSummary& s : trace.summary()) {
    all[s.operation].first += static_cast<int>(s.count);
    all[s.operation].second += s.bytes;
  }
  return all;
}

// Samples sharded over all axes, in sizes drawn.
at::Tensor sharded(Draw& draw, const at::Tensor& x, const DeviceMesh& mesh) {
  const int axes = mesh.layout().dims();
  return leaf(x,
              ShardSpec(mesh, x.sizes().vec(), std::vector<Placement>(axes, Shard(0)),
                        {{0, draw.sizes(x.size(0), mesh.layout().size())}}),
              false);
}

const std::vector<std::vector<Axis>>& meshes() {
  static const std::vector<std::vector<Axis>> all{
      {{"x", 1}},           {{"x", 2}},           {{"x", 3}},           {{"x", 4}},
      {{"r", 2}, {"x", 2}}, {{"x", 2}, {"r", 2}}, {{"r", 3}, {"x", 1}}, {{"x", 3}, {"r", 1}}};
  return all;
}

}  // namespace

TEST(FlatPlan, CutsBetweenRows) {
  Draw draw(5);
  for (int round = 0; round < 2000; ++round) {
    const int ranks = draw.between(1, 6);
    std::vector<detail::FlatRows> rows;
    for (int i = draw.between(1, 6); i > 0; --i)
      rows.push_back({draw.between(1, 40), draw.of<std::int64_t>({1, 1, 3, 4, 8, 16, 7})});
    const detail::FlatPlan plan = plan_flat(rows, ranks);
    ASSERT_EQ(plan.cuts.size(), static_cast<std::size_t>(ranks + 1));
    ASSERT_EQ(plan.cuts[0], 0);
    std::int64_t total = 0, end = 0, widest = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto [n, width] = rows[i];
      total += n * width;
      widest = std::max(widest, width);
      ASSERT_GE(plan.offset[i], end);
      end = plan.offset[i] + n * width;
      ASSERT_EQ(std::accumulate(plan.rows[i].begin(), plan.rows[i].end(), std::int64_t{0}), n);
      // Where each rank's rows begin is where its interval does, or the parameter.
      std::int64_t row = 0;
      for (int r = 0; r < ranks; ++r) {
        const std::int64_t kept = plan.rows[i][r], at = plan.offset[i] + row * width;
        ASSERT_GE(kept, 0);
        if (kept > 0) {
          ASSERT_GE(at, plan.cuts[r]);
          ASSERT_LE(at + kept * width, plan.cuts[r + 1]);
        }
        row += kept;
      }
    }
    ASSERT_LE(end, plan.numel());
    ASSERT_LE(plan.numel(), total + std::max<std::int64_t>(total / 16, ranks));
    for (const std::int64_t size : plan.sizes())
      EXPECT_LE(size, total / ranks + std::max<std::int64_t>(total / 16 / ranks, 1) + widest);
  }
  // A transformer's block: no padding, equal intervals.
  const auto plan = detail::plan_flat({{96, 32}, {96, 1}, {32, 32}, {32, 1}}, 4);
  EXPECT_EQ(plan.sizes(), (Sizes(4, plan.numel() / 4)));
}

TEST(FullyShard, TrainsLikeOneProcess) {
  for (const auto& axes : meshes()) {
    int ranks = 1;
    for (const Axis& a : axes) ranks *= a.size;
    on_threads(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::error});
      const auto mesh = manager.mesh(axes);
      Draw draw(17);
      for (int round = 0; round < 6; ++round) {
        const NetImpl::Shape shape{draw.between(1, 6), draw.between(4, 9), draw.between(1, 5),
                                   draw.between(1, 4), draw.chance(50)};
        Net net = net_of(shape), expected = net_of(shape);
        FullyShardOptions options{.reshard_after_forward = draw.chance(60),
                                  .prefetch = draw.below(3)};
        if (draw.chance(50)) options.axes = {"x"};
        if (draw.chance(40)) options.units = {"blocks.*", "first"};
        if (draw.chance(30)) options.reducer.bucket_bytes = options.reducer.first_bucket_bytes = 64;
        fully_shard(*net, mesh, options);
        expect_same(*net, *expected, "at first");
        // Where a gradient is all round-off, Adam makes a step of it unless eps is large.
        const auto adam = torch::optim::AdamWOptions(0.01).eps(1e-3);
        torch::optim::AdamW opt(once(*net), adam), expected_opt(once(*expected), adam);
        for (int step = 0; step < 5; ++step) {
          const std::string where = concat("round ", round, " on ", ranks, " step ", step);
          const bool twice = draw.chance(25), skipped = draw.chance(20);
          net->twice = expected->twice = twice ? 0 : -1;
          net->skip = expected->skip = skipped ? draw.below(shape.blocks) : -1;
          expected_opt.zero_grad();
          opt.zero_grad();
          const int parts = draw.between(1, 3);
          for (int part = 0; part < parts; ++part) {
            const at::Tensor x = randn({draw.between(1, 6), shape.in}, at::kDouble);
            const at::Tensor wanted = loss_of(expected->forward(x));
            wanted.backward();
            const std::optional<NoSync> scope =
                part + 1 < parts && step % 2 == 1 ? std::optional(no_sync(*net)) : std::nullopt;
            const at::Tensor loss = loss_of(net->forward(sharded(draw, x, mesh)));
            EXPECT_LT(difference(loss, wanted), 1e-10) << where;
            loss.backward();
          }
          expect_same(*net, *expected, where);
          const double norm = clip_gradients(net->parameters(), mesh.all(), {.max_norm = 0.3});
          EXPECT_NEAR(norm, clip_plainly(once(*expected), 0.3), 1e-9 * (1 + norm));
          expected_opt.step();
          opt.step();
          if (draw.chance(50)) {
            const at::NoGradGuard no_grad;
            const at::Tensor x = randn({3, shape.in}, at::kDouble);
            for (int again = draw.between(1, 2); again > 0; --again)
              EXPECT_LT(difference(net->forward(sharded(draw, x, mesh)), expected->forward(x)),
                        1e-10)
                  << where;
          }
        }
        expect_same(*net, *expected, concat("round ", round, " on ", ranks));
      }
    });
  }
}

TEST(FullyShard, GathersEachUnitOnceAndNothingElse) {
  on_threads(3, [](DistributedManager& manager) {
    constexpr int kBlocks = 4;
    const auto mesh = manager.mesh({{"x", 3}});
    Net net = net_of({.blocks = kBlocks});
    fully_shard(*net, mesh, {.units = {"blocks.*"}});
    const at::Tensor x = distribute_tensor(randn({6, 5}, at::kDouble), mesh, {Shard(0)});
    loss_of(net->forward(x)).backward();
    for (int step = 0; step < 2; ++step) {
      const CommTraceScope trace(manager);
      loss_of(net->forward(x)).backward();
      auto moved = calls_of(*trace);
      // Forward: the root's, the blocks', the root's again; backward goes on with it, and needs the
      // root's first layer no more: no input asks for a gradient.
      EXPECT_EQ(moved["all_gather"].first, kBlocks + 2 + kBlocks) << trace->table();
      EXPECT_EQ(moved["reduce_scatter"].first, kBlocks + 1) << trace->table();
    }
  });
}

namespace {

// Blocks of one size that live at a time, in the whole process.
class SizeCounter final : public at::Allocator {
 public:
  explicit SizeCounter(at::Allocator* under) : under_(under) {}
  at::DataPtr allocate(std::size_t n) override {
    at::DataPtr from = under_->allocate(n);
    if (n != watched) return from;
    const int now = ++live;
    int seen = most;
    while (now > seen && !most.compare_exchange_weak(seen, now)) {
    }
    void* data = from.get();
    return {data, new Held{std::move(from), this}, &release, at::kCPU};
  }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    default_copy_data(to, from, n);
  }
  std::atomic<std::size_t> watched = ~std::size_t{0};
  std::atomic<int> live = 0, most = 0;

 private:
  struct Held {
    at::DataPtr data;
    SizeCounter* of;
  };
  static void release(void* held) {
    auto* h = static_cast<Held*>(held);
    --h->of->live;
    delete h;
  }
  at::Allocator* under_;
};

}  // namespace

TEST(FullyShard, HoldsTwoGatheredUnitsWhateverTheDepth) {
  // Ranks share the process, so that what lives of all of them is counted.
  constexpr int kRanks = 2;
  constexpr std::int64_t kWidth = 64;
  SizeCounter allocator(c10::GetCPUAllocator());
  at::Allocator* before = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&allocator, 255);
  for (const bool reshard : {true, false}) {
    for (const int layers : {4, 7}) {
      on_threads(kRanks, [&](DistributedManager& manager) {
        const auto mesh = manager.mesh({{"x", kRanks}});
        Sequential net;
        for (int i = 0; i < layers; ++i) {
          net->push_back(Linear(kWidth, kWidth));
          net->push_back(torch::nn::Tanh());
        }
        net->to(at::kDouble);
        fully_shard(*net, mesh, {.reshard_after_forward = reshard});
        const at::Tensor x = leaf(randn({5, kWidth}, at::kDouble),
                                  ShardSpec(mesh, {5, kWidth}, {Shard(0)}, {{0, {3, 2}}}));
        const auto together = [&](const std::function<void()>& f) {
          mesh.all().barrier();
          if (manager.rank() == 0) f();
          mesh.all().barrier();
        };
        for (int step = 0; step < 3; ++step) {
          // The buffer of a weight and its bias, with its padding: nothing else has its size.
          together([&] {
            allocator.watched =
                detail::plan_flat({{kWidth, kWidth}, {kWidth, 1}}, kRanks).numel() * sizeof(double);
            allocator.most = 0;
          });
          const at::Tensor loss = net->forward(x).square().mean();
          const int kept = reshard ? 1 : layers;
          together([&] {
            EXPECT_EQ(allocator.live, kept * kRanks) << step;
            if (step > 0) {
              EXPECT_EQ(allocator.most, (reshard ? 2 : layers) * kRanks) << step;
            }
            allocator.most = 0;
          });
          loss.backward();
          together([&] {
            EXPECT_EQ(allocator.live, 0) << step;
            if (step > 0) {
              EXPECT_LE(allocator.most, (reshard ? 2 : 0) * kRanks) << step;
            }
            allocator.watched = ~std::size_t{0};
          });
          net->zero_grad();
        }
      });
    }
  }
  c10::SetCPUAllocator(before, 255);
}

TEST(FullyShard, LearnsFromEvaluationAlone) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    for (const bool tied : {false, true}) {
      Net net = net_of({.tied = tied}), expected = net_of({.tied = tied});
      fully_shard(*net, mesh);
      const at::NoGradGuard no_grad;
      const at::Tensor x = randn({5, 5}, at::kDouble);
      const at::Tensor mine = distribute_tensor(x, mesh, {Shard(0)}), y = expected->forward(x);
      for (int pass = 0; pass < 6; ++pass) EXPECT_LT(difference(net->forward(mine), y), 1e-11);
      const CommTraceScope trace(manager);
      net->forward(mine);
      std::vector<CommEvent> gathers;
      for (const CommEvent& e : trace->events()) {
        if (e.operation == "all_gather") gathers.push_back(e);
      }
      std::sort(gathers.begin(), gathers.end(),
                [](const auto& a, const auto& b) { return a.begin < b.begin; });
      // The root's first and last layers are one use where one forward goes into the next.
      ASSERT_GE(gathers.size(), 4u) << trace->table();
      EXPECT_LE(gathers.size(), 5u) << trace->table();
      int ahead = 0;
      for (std::size_t i = 1; i < gathers.size(); ++i)
        ahead += gathers[i].begin < gathers[i - 1].end;
      EXPECT_GE(ahead, 3) << "each starts before the one before it has been waited for";
    }
  });
}

TEST(FullyShard, TiedWeightsAreOneParameter) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const NetImpl::Shape shape{.in = 4, .width = 5, .blocks = 2, .tied = true};
    Net net = net_of(shape), expected = net_of(shape);
    fully_shard(*net, mesh);
    EXPECT_TRUE(net->last.is_same(net->first->weight));
    torch::optim::SGD opt(once(*net), 0.1), other(once(*expected), 0.1);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = randn({4, 4}, at::kDouble);
      opt.zero_grad();
      other.zero_grad();
      loss_of(net->forward(distribute_tensor(x, mesh, {Shard(0)}))).backward();
      loss_of(expected->forward(x)).backward();
      opt.step();
      other.step();
    }
    expect_same(*net, *expected, "tied");
  });
}

TEST(FullyShard, FrozenIgnoredAndUnusedParameters) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const NetImpl::Shape shape{.blocks = 4};
    Net net = net_of(shape), expected = net_of(shape);
    for (Net* n : {&net, &expected}) {
      (*n)->skip = 2;  // used by no rank
      for (auto& p : (*n)->blocks->ptr(1)->parameters()) p.set_requires_grad(false);
    }
    fully_shard(*net, mesh, {.ignore = {"bias"}});
    EXPECT_FALSE(is_sharded(net->bias));
    EXPECT_TRUE(spec(net->scale).is_replicated()) << "has no rows";
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      expected->zero_grad();
      const at::Tensor x = randn({2, 5}, at::kDouble);
      // One rank has no sample: it contributes zeros.
      loss_of(net->forward(distribute_tensor(x, mesh, {Shard(0)}, {{0, {1, 0, 1}}}))).backward();
      loss_of(expected->forward(x)).backward();
      EXPECT_LT(difference(net->bias.grad(), expected->bias.grad()), 1e-11);
      EXPECT_FALSE(net->blocks->ptr(1)->parameters()[1].grad().defined());
      EXPECT_FALSE(net->blocks->ptr(2)->parameters()[1].grad().defined());
      for (const auto& item : expected->named_parameters()) {
        if (item.key() != "bias" && item.value().grad().defined()) {
          EXPECT_LT(difference(net->named_parameters()[item.key()].grad(), item.value().grad()),
                    1e-11)
              << item.key();
        }
      }
    }
  });
}

TEST(FullyShard, TheFactorIsThatOfOneProcessOnAnyMesh) {
  // Plain, hybrid, and an axis of one rank over which nothing is sharded: equal gradients.
  for (const auto& axes : meshes()) {
    int ranks = 1;
    for (const Axis& a : axes) ranks *= a.size;
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh(axes);
      Net net = net_of({}), expected = net_of({});
      fully_shard(*net, mesh, {.axes = {"x"}});
      const at::Tensor x = randn({7, 5}, at::kDouble);
      Draw draw(3);
      for (int step = 0; step < 2; ++step) {
        net->zero_grad();
        loss_of(net->forward(sharded(draw, x, mesh))).backward();
      }
      loss_of(expected->forward(x)).backward();
      expect_same(*net, *expected, list(std::vector<int>{ranks}));
    });
  }
}

TEST(FullyShard, SecondDerivatives) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    Net net = net_of({}), expected = net_of({});
    fully_shard(*net, mesh);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      expected->zero_grad();
      const at::Tensor x = randn({5, 5}, at::kDouble);
      // A penalty on the gradient of the input.
      const auto penalty = [](Net& n, const at::Tensor& input) {
        const at::Tensor y = loss_of(n->forward(input));
        const at::Tensor g = torch::autograd::grad({y}, {input}, {}, true, true)[0];
        return y + g.square().sum();
      };
      const at::Tensor plain = x.clone().requires_grad_();
      const at::Tensor wanted = penalty(expected, plain);
      wanted.backward();
      const at::Tensor mine = leaf(x, ShardSpec(mesh, {5, 5}, {Shard(0)}, {{0, {2, 0, 3}}}));
      const at::Tensor got = penalty(net, mine);
      got.backward();
      EXPECT_LT(difference(got, wanted), 1e-11);
      EXPECT_LT(difference(mine.grad(), plain.grad()), 1e-10);
      expect_same(*net, *expected, concat("step ", step));
    }
  });
}

TEST(FullyShard, TwoMeshesAndNestedCallsInOneModel) {
  on_threads(4, [](DistributedManager& manager) {
    const auto flat = manager.mesh({{"x", 4}}), grid = manager.mesh({{"a", 2}, {"b", 2}});
    // A model of two parts, each on a mesh of its own over the same ranks.
    Net one = net_of({.blocks = 2}, 3), two = net_of({.blocks = 3}, 4);
    Net first = net_of({.blocks = 2}, 3), second = net_of({.blocks = 3}, 4);
    fully_shard(*one, flat);
    // A call for a part of it first: the second takes the rest.
    fully_shard(*two->blocks, grid, {.units = {"*"}, .axes = {"b"}});
    fully_shard(*two, grid);
    EXPECT_EQ(placements(two->blocks->ptr(0)->parameters()[2])[0], Replicate());
    EXPECT_EQ(placements(two->last)[0], Shard(0));
    for (int step = 0; step < 3; ++step) {
      for (Net* n : {&one, &two, &first, &second}) (*n)->zero_grad();
      const at::Tensor x = randn({6, 5}, at::kDouble);
      const at::Tensor wanted = second->forward(first->forward(x)).square().mean();
      wanted.backward();
      const at::Tensor middle = one->forward(distribute_tensor(x, flat, {Shard(0)}));
      const at::Tensor there = from_local(
          to_local(middle),
          ShardSpec(grid, {6, 5}, {Shard(0), Shard(0)}, {{0, spec(middle).sizes().at(0)}}));
      const at::Tensor loss = two->forward(there).square().mean();
      EXPECT_LT(difference(loss, wanted), 1e-11);
      loss.backward();
      expect_same(*one, *first, concat("first, step ", step));
      expect_same(*two, *second, concat("second, step ", step));
    }
  });
}

namespace {

// Backward of the value throws, once.
struct Failing : torch::autograd::Function<Failing> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("in backward");
  }
};

// Saves its input alone, and runs the body again in backward.
struct Recomputed : torch::autograd::Function<Recomputed> {
  using Body = std::function<at::Tensor(const at::Tensor&)>;
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const Body& body) {
    ctx->save_for_backward({x});
    bodies().push_back(body);
    ctx->saved_data["body"] = static_cast<std::int64_t>(bodies().size() - 1);
    return body(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& g) {
    const at::AutoGradMode grad(true);
    const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
    bodies()[ctx->saved_data["body"].toInt()](x).backward(g[0]);
    return {x.grad(), at::Tensor()};
  }
  static std::vector<Body>& bodies() {
    static thread_local std::vector<Body> all;
    return all;
  }
};

}  // namespace

TEST(FullyShard, GoesOnAfterExceptions) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Net net = net_of({.blocks = 4}), expected = net_of({.blocks = 4});
    fully_shard(*net, mesh);
    for (int step = 0; step < 8; ++step) {
      const at::Tensor x = randn({4, 5}, at::kDouble);
      const at::Tensor mine = distribute_tensor(x, mesh, {Shard(0)});
      if (step % 4 == 1) {
        net->throws = 2;
        EXPECT_THROW(net->forward(mine), std::runtime_error);
        net->throws = -1;
      } else if (step % 4 == 2) {
        const at::Tensor h = net->blocks->ptr<torch::nn::SequentialImpl>(3)->forward(
            Failing::apply(net->first->forward(mine)));
        EXPECT_THROW(h.square().mean().backward(), std::runtime_error);
      }
      // What was gathered before is not what is used after: parameters have changed since.
      const at::NoGradGuard no_grad;
      for (const auto& p : net->parameters()) p.mul_(1.01);
      for (const auto& p : expected->parameters()) p.mul_(1.01);
      const at::AutoGradMode grad(true);
      net->zero_grad();
      expected->zero_grad();
      loss_of(net->forward(mine)).backward();
      loss_of(expected->forward(x)).backward();
      expect_same(*net, *expected, concat("step ", step));
    }
  });
}

TEST(FullyShard, RecomputesActivations) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    Net net = net_of({}), expected = net_of({});
    fully_shard(*net, mesh);
    for (int step = 0; step < 3; ++step) {
      const auto run = [](Net& n, const at::Tensor& x) {
        at::Tensor h = n->first->forward(x);
        for (std::size_t i = 0; i < n->blocks->size(); ++i) {
          auto block = n->blocks->ptr<torch::nn::SequentialImpl>(i);
          h = Recomputed::apply(
              h, Recomputed::Body([block](const at::Tensor& y) { return block->forward(y); }));
        }
        return loss_of(h.matmul(n->last));
      };
      net->zero_grad();
      expected->zero_grad();
      const at::Tensor x = randn({5, 5}, at::kDouble);
      run(net, distribute_tensor(x, mesh, {Shard(0)})).backward();
      run(expected, x).backward();
      Recomputed::bodies().clear();
      for (const auto& item : expected->named_parameters()) {
        if (!item.value().grad().defined()) continue;
        EXPECT_LT(difference(net->named_parameters()[item.key()].grad(), item.value().grad()),
                  1e-11)
            << item.key();
      }
    }
  });
}

TEST(FullyShard, SeesWhatIsWrittenToParameters) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    for (const bool reshard : {true, false}) {
      Net net = net_of({.blocks = 1}), expected = net_of({.blocks = 1});
      fully_shard(*net, mesh, {.units = {"first"}, .reshard_after_forward = reshard});
      const at::Tensor x = randn({5, 5}, at::kDouble);
      const at::Tensor mine = distribute_tensor(x, mesh, {Shard(0)});
      const auto compare = [&](const std::string& what) {
        EXPECT_LT(difference(net->forward(mine), expected->forward(x)), 1e-11) << what;
      };
      for (int step = 0; step < 2; ++step) {
        {
          const at::NoGradGuard no_grad;
          compare("at first");
          for (const auto& p : net->parameters()) p.add_(0.1);
          for (const auto& p : expected->parameters()) p.add_(0.1);
          compare("in place");
          for (auto& p : net->parameters()) p.data().mul_(0.9);
          for (auto& p : expected->parameters()) p.data().mul_(0.9);
          compare("through .data");
        }
        // Forwards without a backward, as of a validation that forgot no_grad.
        compare("with gradients");
        const at::NoGradGuard no_grad;
        for (const auto& p : net->parameters()) to_local(p.detach()).mul_(0.5);
        for (const auto& p : expected->parameters()) p.mul_(0.5);
        release_parameters(*net);
        compare("through locals");
        const at::AutoGradMode grad(true);
        loss_of(net->forward(mine)).backward();
      }
    }
  });
}

TEST(FullyShard, OneUnitSeesWhatIsWritten) {
  // What is used last is what is used first, and nothing tells where one forward ends.
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Linear net(4, 3), expected(4, 3);
    net->to(at::kDouble);
    expected->to(at::kDouble);
    fill(*net, 3);
    fill(*expected, 3);
    fully_shard(*net, mesh);
    const at::Tensor x = randn({5, 4}, at::kDouble);
    const at::Tensor mine = distribute_tensor(x, mesh, {Shard(0)});
    const auto halve = [](torch::nn::Module& m, bool locals) {
      const at::NoGradGuard no_grad;
      for (const auto& p : m.parameters()) (locals ? to_local(p.detach()) : p).mul_(0.5);
    };
    for (int step = 0; step < 6; ++step) {
      const bool trained = step >= 2;
      const at::Tensor wanted = expected->forward(x), got = net->forward(mine);
      EXPECT_LT(difference(got, wanted), 1e-11) << step;
      if (trained && step % 2 == 0) {
        net->zero_grad();
        expected->zero_grad();
        wanted.square().mean().backward();
        got.square().mean().backward();
        expect_same(*net, *expected, concat("step ", step));
      }
      // Past the operators, as an optimizer of the user's own may: after a backward.
      halve(*net, trained && step % 2 == 0);
      halve(*expected, false);
    }
  });
}

TEST(FullyShard, SavesAndLoadsOnAnyMesh) {
  const std::string path = concat(::testing::TempDir(), "fully_shard.safetensors");
  const NetImpl::Shape shape{.tied = true};
  on_threads(3, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    Net net = net_of(shape);
    fully_shard(*net, mesh);
    save(*net, mesh, path);
  });
  on_threads(4, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"r", 2}, {"x", 2}});
    Net net = net_of(shape, 5), expected = net_of(shape);
    fully_shard(*net, mesh, {.units = {"blocks.1"}, .axes = {"x"}});
    const at::Tensor x = randn({6, 5}, at::kDouble);
    const at::Tensor mine = distribute_tensor(x, mesh, {Shard(0), Shard(0)});
    net->forward(mine);
    load(*net, mesh, path);
    EXPECT_LT(difference(net->forward(mine), expected->forward(x)), 1e-11);
    expect_same(*net, *expected, "loaded", false);
  });
  std::remove(path.c_str());
}

TEST(FullyShard, GathersByHand) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Net net = net_of({}), expected = net_of({});
    EXPECT_THROW(gather_parameters(*net), InvalidArgument);
    fully_shard(*net, mesh);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      expected->zero_grad();
      const CommTraceScope trace(manager);
      gather_parameters(*net);
      std::vector<at::Tensor> losses;
      // Several micro-batches, forward and backward in turn.
      for (int part = 0; part < 3; ++part) {
        const at::Tensor x = randn({4, 5}, at::kDouble);
        const std::optional<NoSync> scope = part < 2 ? std::optional(no_sync(*net)) : std::nullopt;
        loss_of(net->forward(distribute_tensor(x, mesh, {Shard(0)}))).backward();
        loss_of(expected->forward(x)).backward();
      }
      release_parameters(*net);
      EXPECT_EQ(calls_of(*trace)["all_gather"].first, 4) << trace->table();
      expect_same(*net, *expected, concat("step ", step));
      const at::NoGradGuard no_grad;
      for (const auto& p : net->parameters()) p.mul_(1.1);
      for (const auto& p : expected->parameters()) p.mul_(1.1);
    }
  });
}

TEST(FullyShard, RefusesWhatCannotBe) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Net net = net_of({});
    EXPECT_THROW(fully_shard(*net, mesh, {.units = {"blocks.9"}}), InvalidArgument);
    EXPECT_THROW(fully_shard(*net, mesh, {.axes = {"y"}}), InvalidArgument);
    EXPECT_THROW(fully_shard(*net, mesh, {.ignore = {"nothing"}}), InvalidArgument);
    EXPECT_THROW(fully_shard(*net, mesh, {.prefetch = -1}), InvalidArgument);
    // Ranks that ask for different things are told, all of them.
    EXPECT_THROW(fully_shard(*net, mesh, {.prefetch = manager.rank()}), MismatchError);
    FullyShardOptions differs;
    differs.reducer.learn_order = manager.rank() == 0;
    EXPECT_THROW(fully_shard(*net, mesh, differs), MismatchError);
    EXPECT_FALSE(is_sharded(net->last)) << "nothing has changed";
    net->forward(randn({2, 5}, at::kDouble)).sum().backward();
    EXPECT_THROW(fully_shard(*net, mesh), ShardingError);
    net->zero_grad();
    fully_shard(*net, mesh);
    fully_shard(*net, mesh);  // nothing is left to do
  });
}

TEST(FullyShard, RanksThatUseOtherParametersAreTold) {
  // What one rank alone leaves out: an error on all, and no hang.
  EXPECT_THROW(run_threads(2,
                           [](DistributedManager& manager) {
                             at::set_num_threads(1);
                             manager.world().set_check_level(CheckLevel::collective);
                             const auto mesh = manager.mesh({{"x", 2}});
                             mesh.all().set_check_level(CheckLevel::collective);
                             Net net = net_of({});
                             fully_shard(*net, mesh);
                             net->skip = manager.rank() == 0 ? 1 : -1;
                             const at::Tensor x =
                                 distribute_tensor(at::ones({4, 5}, at::kDouble), mesh, {Shard(0)});
                             loss_of(net->forward(x)).backward();
                           },
                           {.timeout = std::chrono::seconds(20)}),
               Error);
}

}  // namespace tessera::test
