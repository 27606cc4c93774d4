// Attention over a sharded sequence, Fourier transforms over sharded dims, and the policy on what
// moves by itself.

#include "support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::test {

namespace {

using Shape = std::vector<std::int64_t>;

}  // namespace

TEST(RingAttention, EqualsOneProcess) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow});
      Draw draw(20 + ranks);
      for (int i = 0; i < 60; ++i) {
        const auto mesh = manager.mesh(draw.axes(ranks));
        const std::int64_t batch = draw.between(1, 2), groups = draw.between(1, 2),
                           rows = draw.between(1, 9), columns = draw.between(1, 9),
                           width = draw.between(1, 4);
        const bool grouped = draw.chance(30);
        const std::int64_t heads = groups * (grouped ? 2 : 1);
        const Shape qs = {batch, heads, rows, width}, ks = {batch, groups, columns, width},
                    vs = {batch, groups, columns, draw.between(1, 4)};
        test::seed(i);
        std::vector<at::Tensor> values = {randn(qs, at::kDouble), randn(ks, at::kDouble),
                                          randn(vs, at::kDouble)};
        const int mask_kind = draw.below(4);  // none, causal, additive, boolean
        at::Tensor mask;
        if (mask_kind == 2)
          mask = randn(draw.chance(50) ? Shape{rows, columns} : Shape{batch, 1, rows, columns},
                       at::kDouble);
        if (mask_kind == 3)
          mask =
              test::rand(draw.chance(50) ? Shape{rows, columns} : Shape{batch, heads, 1, columns},
                         at::kDouble)
                  .gt(0.3);
        const auto f = [&](const std::vector<at::Tensor>& t) {
          return at::scaled_dot_product_attention(
              t[0], t[1], t[2], t.size() > 3 ? std::optional<at::Tensor>(t[3]) : std::nullopt, 0.0,
              mask_kind == 1, std::nullopt, grouped);
        };
        if (mask.defined()) values.push_back(mask);
        std::vector<at::Tensor> plain, x;
        const ShardSizes uneven = {{2, draw.sizes(rows, ranks)}},
                         uneven_keys = {{2, draw.sizes(columns, ranks)}};
        std::string where = concat("mask ", mask_kind, " grouped ", grouped);
        for (std::size_t j = 0; j < values.size(); ++j) {
          plain.push_back(values[j].clone());
          if (at::isFloatingType(values[j].scalar_type())) plain.back().requires_grad_(true);
          // Half of the time along the sequence on one axis, as it is meant; else anyhow.
          if (draw.chance(50) && j < 3 && mesh.layout().dims() == 1) {
            x.push_back(leaf(values[j], ShardSpec(mesh, values[j].sizes().vec(), {Shard(2)},
                                                  j == 0 ? uneven : uneven_keys)));
          } else if (j == 3 && draw.chance(30)) {
            x.push_back(plain.back().detach().clone().requires_grad_(plain.back().requires_grad()));
          } else {
            x.push_back(leaf(values[j], draw.spec(mesh, values[j].sizes().vec(), j < 3)));
          }
          where += is_sharded(x.back()) ? concat(" ", spec(x.back())) : " plain";
        }
        const at::Tensor expected = f(plain), along = randn(expected.sizes(), at::kDouble);
        (expected * along).sum().backward();
        const at::Tensor got = f(x);
        ASSERT_LT(difference(got, expected), 1e-10) << where;
        (got * along).sum().backward();
        for (std::size_t j = 0; j < x.size(); ++j) {
          if (!plain[j].requires_grad()) continue;
          ASSERT_TRUE(x[j].grad().defined()) << where;
          ASSERT_LT((whole(x[j].grad()) - plain[j].grad()).abs().max().item<double>(), 1e-10)
              << where << " gradient " << j;
        }
      }
    });
  }
}

TEST(RingAttention, NobodyHoldsTheWholeSequence) {
  on_threads(4, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"x", 4}});
    const Shape shape = {1, 2, 64, 8};
    const ShardSpec lies(mesh, shape, {Shard(2)}, {{2, {40, 0, 20, 4}}});
    const at::Tensor q = leaf(randn(shape), lies), k = leaf(randn(shape), lies),
                     v = leaf(randn(shape), lies);
    std::int64_t bytes = 0;
    {
      const CommTraceScope trace(manager);
      const at::Tensor y = at::scaled_dot_product_attention(q, k, v);
      EXPECT_EQ(spec(y), lies);
      for (const auto& e : trace->events()) {
        EXPECT_EQ(e.operation, "exchange");
        bytes += e.bytes;
      }
      y.sum().backward();
    }
    EXPECT_EQ(spec(k.grad()), lies);
    const at::Tensor total = at::full({1}, bytes, at::kLong);
    mesh.all().all_reduce(total);
    EXPECT_EQ(total.item<std::int64_t>(), 2 * 3 * 2 * 2 * 64 * 8 * 4)
        << "both sides count: each key and value goes to three other ranks";
    const auto y = at::scaled_dot_product_attention(q, k, v);
    const auto g = torch::autograd::grad({y.sum()}, {q}, {}, true, true)[0];
    EXPECT_THROW(torch::autograd::grad({(g * g).sum()}, {q}), ShardingError) << "no silent zero";
  });
}

TEST(RingAttention, BatchAndHeadsAreLocal) {
  on_threads(4, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"a", 2}, {"b", 2}});
    const Shape shape = {3, 5, 6, 4};
    const ShardSpec lies(mesh, shape, {Shard(0), Shard(1)});
    std::vector<at::Tensor> x;
    for (int i = 0; i < 3; ++i) x.push_back(leaf(randn(shape, at::kDouble), lies));
    const CommTraceScope trace(manager);
    at::scaled_dot_product_attention(x[0], x[1], x[2]).sum().backward();
    EXPECT_TRUE(trace->events().empty());
  });
}

TEST(RingAttention, MultiheadAttentionOverASequence) {
  on_threads(3, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"x", 3}});
    const auto make = [] {
      torch::nn::MultiheadAttention m(8, 2);
      m->to(at::kDouble);
      fill(*m, 3);
      return m;
    };
    auto expected = make(), net = make();
    const at::Tensor value = randn({7, 2, 8}, at::kDouble), along = randn({7, 2, 8}, at::kDouble);
    const at::Tensor plain = value.clone().requires_grad_(true);
    (std::get<0>(expected->forward(plain, plain, plain)) * along).sum().backward();
    distribute_module(*net, mesh);
    const at::Tensor x = leaf(value, ShardSpec(mesh, {7, 2, 8}, {Shard(0)}, {{0, {5, 0, 2}}}));
    (std::get<0>(net->forward(x, x, x)) * along).sum().backward();
    EXPECT_LT(difference(x.grad(), plain.grad()), 1e-11);
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_LT(difference(net->parameters()[i].grad(), expected->parameters()[i].grad()), 1e-11);
  });
}

TEST(Fourier, EqualsOneProcess) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow});
      Draw draw(320 + ranks);
      const std::vector<std::string> names = {"fft",   "ifft",  "rfft", "irfft",  "fft2",
                                              "ifft2", "rfft2", "fftn", "irfftn", "hfft"};
      for (int i = 0; i < 60; ++i) {
        const auto mesh = manager.mesh(draw.axes(ranks));
        const Shape shape = {draw.between(2, 5), draw.between(2, 6), draw.between(2, 5)};
        const std::string name = draw.of(names);
        const int dim = draw.below(3);
        const auto norm = draw.of(std::vector<std::string>{"forward", "backward", "ortho"});
        const bool complex = name == "fft" || name.find("ir") == 0 || name == "hfft" ||
                             (name != "rfft" && name != "rfft2" && draw.chance(50));
        test::seed(i);
        const at::Tensor value = randn(shape, complex ? at::kComplexDouble : at::kDouble);
        const auto f = [&](const at::Tensor& t) {
          if (name == "fft") return at::fft_fft(t, std::nullopt, dim, norm);
          if (name == "ifft") return at::fft_ifft(t, std::nullopt, dim, norm);
          if (name == "rfft") return at::fft_rfft(t, std::nullopt, dim, norm);
          if (name == "irfft") return at::fft_irfft(t, std::nullopt, dim, norm);
          if (name == "hfft") return at::fft_hfft(t, std::nullopt, dim, norm);
          if (name == "fft2") return at::fft_fft2(t, std::nullopt, {-2, -1}, norm);
          if (name == "ifft2") return at::fft_ifft2(t, std::nullopt, {0, 2}, norm);
          if (name == "rfft2") return at::fft_rfft2(t, std::nullopt, {0, 1}, norm);
          if (name == "fftn") return at::fft_fftn(t, std::nullopt, std::nullopt, norm);
          return at::fft_irfftn(t, std::nullopt, std::nullopt, norm);
        };
        const at::Tensor plain = value.clone().requires_grad_(true);
        const at::Tensor expected = f(plain);
        const ShardSpec lies = draw.spec(mesh, shape, false);
        const at::Tensor x = distribute_tensor(value, lies).detach().requires_grad_(true);
        const at::Tensor got = f(x);
        const std::string where = concat(name, " dim ", dim, " ", lies);
        const auto apart = [](const at::Tensor& a, const at::Tensor& b) {
          const at::Tensor p = whole(a);
          if (p.sizes() != b.sizes() || p.scalar_type() != b.scalar_type()) return 1e9;
          return b.numel() == 0 ? 0
                                : (p - b).abs().max().item<double>() /
                                      std::max(b.abs().max().item<double>(), 1e-30);
        };
        ASSERT_LT(apart(got, expected.detach()), 1e-10) << where;
        const at::Tensor along = randn(expected.sizes(), expected.scalar_type());
        const auto loss = [&](const at::Tensor& y) {
          return at::isComplexType(y.scalar_type()) ? at::view_as_real(y * along).sum()
                                                    : (y * along).sum();
        };
        loss(expected).backward();
        loss(got).backward();
        ASSERT_LT(apart(x.grad(), plain.grad()), 1e-10) << where << " gradient";
      }
    });
  }
}

TEST(Fourier, MovesPencils) {
  on_threads(4, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"x", 4}});
    const at::Tensor value = randn({8, 16}, at::kComplexDouble);
    const at::Tensor x = distribute_tensor(value, mesh, {Shard(0)});
    const CommTraceScope trace(manager);
    const at::Tensor y = at::fft_fft2(x);
    EXPECT_EQ(spec(y).placements()[0], Shard(1));
    const at::Tensor z = at::fft_ifft2(y);
    EXPECT_EQ(spec(z), spec(x)) << "there and back";
    std::string calls;
    for (const auto& e : trace->events()) calls += e.operation + " ";
    EXPECT_EQ(calls, "all_to_all all_to_all ");
    trace->clear();
    at::fft_fft(x, std::nullopt, 1);
    EXPECT_TRUE(trace->events().empty()) << "a whole dim is local";
    EXPECT_LT((full_tensor(z) - value).abs().max().item<double>(), 1e-12);
  });
}

TEST(Policy, NamesOperatorTensorsPlacementsAndBytes) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = distribute_tensor(randn({4, 6}, at::kDouble), mesh, {Shard(0)});
    set_policies(manager, {.redistribution = Policy::error});
    std::string why = "nothing was thrown";
    try {
      at::cumsum(x, 0);
    } catch (const ImplicitRedistributionError& e) {
      why = e.what();
    }
    for (const char* part :
         {"aten::cumsum", "self from [4, 6] x=Shard(0)[2, 2] to [4, 6] x=Replicate", "96 bytes",
          "Redistribute explicitly"})
      EXPECT_NE(why.find(part), std::string::npos) << why;
    EXPECT_NO_THROW(at::cumsum(redistribute(x, {Shard(1)}), 0))
        << "what is written is not implicit";
    EXPECT_NO_THROW(full_tensor(x.sum())) << "a partial value is reduced without asking";
  });
}

TEST(Policy, WarnsOnceForEachCallSite) {
  struct Counting final : c10::WarningHandler {
    void process(const c10::Warning& w) override {
      if (w.msg().find("aten::cumsum redistributes") != std::string::npos) ++count;
    }
    int count = 0;
  };
  on_threads(2, [](DistributedManager& manager) {
    Counting counting;
    const c10::WarningUtils::WarningHandlerGuard guard(&counting);
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = distribute_tensor(randn({4, 6}, at::kDouble), mesh, {Shard(0)});
    for (int i = 0; i < 5; ++i) at::cumsum(x, 0);
    EXPECT_EQ(counting.count, 1);
    at::cumsum(x, 0);
    EXPECT_EQ(counting.count, 2) << "another place";
    set_policies(manager, {.redistribution = Policy::allow});
    at::cumsum(x, 0);
    EXPECT_EQ(counting.count, 2);
  });
}

// What a user writes to be sure that a layer moves nothing.
TEST(Policy, ALayerThatMovesNothing) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    torch::nn::Linear layer(6, 4);
    distribute_module(*layer, mesh);
    const at::Tensor x = distribute_tensor(randn({5, 6}), mesh, {Shard(0)});
    const CommTraceScope trace(manager);
    torch::relu(layer(x));
    EXPECT_TRUE(trace->events().empty()) << trace->table();
  });
}

}  // namespace tessera::test
