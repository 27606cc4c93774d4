// What keeps a field sharded where it could have been gathered, and values that only special
// numbers show.

#include <limits>

#include "support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::kept_cuts_test {
namespace {

using OfTensor = std::function<at::Tensor(const at::Tensor&)>;

// `f` of a field whose dim `dim` has these shards, beside `f` of the plain one, with the gradient.
at::Tensor same_as_plain(const DeviceMesh& mesh, const at::Tensor& value, int dim,
                         const Sizes& sizes, const OfTensor& f) {
  const at::Tensor plain = value.clone().requires_grad_(true);
  const at::Tensor x =
      leaf(value, ShardSpec(mesh, value.sizes().vec(), {Shard(dim)}, {{dim, sizes}}));
  const at::Tensor expected = f(plain), got = f(x);
  EXPECT_LT(difference(got, expected), 1e-12) << list(sizes);
  const at::Tensor along = at::arange(expected.numel(), at::kDouble).cos().view(expected.sizes());
  (expected * along).sum().backward();
  (got * along).sum().backward();
  EXPECT_LT(difference(x.grad(), plain.grad(), 1), 1e-12) << "gradient, " << list(sizes);
  return got;
}

Sizes shards(const at::Tensor& t, int dim) {
  return spec(t).is_sharded(dim) ? spec(t).dim(dim).partition.sizes() : Sizes();
}

std::int64_t events(const CommTrace& trace, const std::string& operation) {
  const auto all = trace.events();
  return std::ranges::count_if(all, [&](const CommEvent& e) { return e.operation == operation; });
}

}  // namespace

TEST(KeptCuts, WindowsOfRowsWhoseNearestBoundariesLeaveOneRank) {
  const at::Tensor value = at::arange(384, at::kDouble).sin().view({1, 8, 8, 6});
  const OfTensor windows = [](const at::Tensor& t) { return t.view({1, 2, 4, 2, 4, 6}); };
  on_threads(2, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"x", 2}});
    for (const Sizes& sizes : {Sizes{6, 2}, Sizes{7, 1}, Sizes{1, 7}, Sizes{5, 3}, Sizes{4, 4}})
      EXPECT_EQ(shards(same_as_plain(mesh, value, 1, sizes, windows), 1), (Sizes{1, 1}));
  });
  on_threads(3, [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"x", 3}});
    EXPECT_EQ(shards(same_as_plain(mesh, value, 1, {6, 1, 1}, windows), 1), (Sizes{1, 1, 0}));
    EXPECT_EQ(shards(same_as_plain(mesh, value, 1, {1, 1, 6}, windows), 1), (Sizes{0, 1, 1}));
    const at::Tensor rows = at::arange(24, at::kDouble).view({12, 2});
    EXPECT_EQ(shards(same_as_plain(mesh, rows, 0, {10, 1, 1},
                                   [](const at::Tensor& t) { return t.view({6, 2, 2}); }),
                     0),
              (Sizes{4, 1, 1}));
  });
}

TEST(KeptCuts, WindowsAlongASharedDimThatDoNotOverlap) {
  const auto unfolded = [](std::int64_t size, std::int64_t step) -> OfTensor {
    return [=](const at::Tensor& t) { return t.unfold(1, size, step); };
  };
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor value = at::arange(150, at::kDouble).sin().view({2, 25, 3});
    {
      const CommTraceScope trace(manager);
      const at::Tensor x = distribute_tensor(value.narrow(1, 0, 24).clone(), mesh, {Shard(1)});
      EXPECT_EQ(shards(x.unfold(1, 4, 4), 1), (Sizes{3, 3}));
      EXPECT_TRUE(trace->events().empty()) << trace->table();
    }
    set_policies(manager, {.redistribution = Policy::allow});
    for (const Sizes& sizes : {Sizes{13, 12}, Sizes{24, 1}, Sizes{3, 22}})
      for (const std::int64_t size : {1, 3, 4}) {
        const Sizes windows = shards(same_as_plain(mesh, value, 1, sizes, unfolded(size, 4)), 1);
        ASSERT_EQ(windows.size(), 2u) << list(sizes);
        EXPECT_GT(std::min(windows[0], windows[1]), 0) << list(sizes);
      }
    EXPECT_EQ(shards(same_as_plain(mesh, value, 1, {13, 12}, unfolded(5, 4)), 1), Sizes())
        << "these overlap";
    const at::Tensor plain = value.clone(),
                     x = leaf(value, ShardSpec(mesh, {2, 25, 3}, {Shard(1)}, {{1, {13, 12}}}),
                              false);
    plain.unfold(1, 3, 4).mul_(-2);
    x.unfold(1, 3, 4).mul_(-2);
    EXPECT_EQ(difference(x, plain), 0) << "what is written to the windows";
  });
  on_threads(3, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    set_policies(manager, {.redistribution = Policy::allow});
    const at::Tensor value = at::arange(24, at::kDouble).sin().view({1, 24});
    for (const Sizes& sizes : {Sizes{8, 8, 8}, Sizes{24, 0, 0}, Sizes{0, 5, 19}, Sizes{11, 12, 1}})
      for (const std::int64_t step : {3, 4, 11})
        for (const std::int64_t size : {1, 3}) {
          same_as_plain(mesh, value, 1, sizes, unfolded(size, step));
          // Its gradient is sharded as the windows are.
          same_as_plain(mesh, value, 1, sizes,
                        [=](const at::Tensor& t) { return unfolded(size, step)(t).sin(); });
        }
  });
}

TEST(KeptCuts, CausalConvolutionsKeepTheirRows) {
  const at::Tensor weight = at::arange(6, at::kDouble).cos().view({1, 1, 6}).narrow(2, 0, 3) * 0.5;
  const auto padded = [&](int layers, std::int64_t dilation) -> OfTensor {
    return [=](at::Tensor t) {
      for (int i = 0; i < layers; ++i)
        t = t + at::conv1d(at::constant_pad_nd(t, {2 * dilation, 0}), weight, {}, {1},
                           at::IntArrayRef{0}, {dilation})
                    .tanh();
      return t;
    };
  };
  const auto truncated = [&](int layers, std::int64_t dilation) -> OfTensor {
    return [=](at::Tensor t) {
      for (int i = 0; i < layers; ++i)
        t = at::conv1d(t, weight, {}, {1}, at::IntArrayRef{2 * dilation}, {dilation})
                .slice(2, 0, t.size(2))
                .tanh();
      return t;
    };
  };
  const at::Tensor value = at::arange(48, at::kDouble).sin().view({1, 1, 48});
  on_threads(3, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const Sizes even{16, 16, 16};
    EXPECT_EQ(shards(same_as_plain(mesh, value, 2, even, padded(12, 1)), 2), even);
    EXPECT_EQ(shards(same_as_plain(mesh, value, 2, even, truncated(12, 1)), 2), even);
    set_policies(manager, {.redistribution = Policy::allow});
    const Sizes uneven{30, 0, 18};
    EXPECT_EQ(shards(same_as_plain(mesh, value, 2, uneven, truncated(3, 2)), 2), uneven);
    same_as_plain(mesh, value, 2, uneven, padded(3, 2));
    same_as_plain(mesh, value, 2, {48, 0, 0}, truncated(2, 1));
  });
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor half = value.narrow(2, 0, 24).clone();
    EXPECT_EQ(shards(same_as_plain(mesh, half, 2, {12, 12}, padded(2, 8)), 2), (Sizes{12, 12}));
    EXPECT_EQ(shards(same_as_plain(mesh, half, 2, {12, 12}, truncated(2, 8)), 2), (Sizes{12, 12}));
    EXPECT_EQ(shards(at::conv1d(distribute_tensor(half, mesh, {Shard(2)}), weight), 2),
              (Sizes{11, 11}))
        << "a convolution that pads nothing takes from both sides";
  });
}

TEST(KeptCuts, AStridedViewThatLeavesTheShardedDimAlone) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow});
    const at::Tensor value = at::arange(864, at::kDouble).sin().view({9, 3, 4, 8});
    const OfTensor chunks = [](const at::Tensor& t) {
      return t.as_strided({9, 5, 4, 8}, {96, 16, 8, 1});
    };
    EXPECT_EQ(shards(same_as_plain(mesh, value, 0, {6, 3}, chunks), 0), (Sizes{6, 3}));
    same_as_plain(mesh, value, 0, {9, 0}, chunks);
    EXPECT_EQ(shards(same_as_plain(mesh, value, 0, {6, 3},
                                   [](const at::Tensor& t) {
                                     return t.as_strided({4, 9, 8}, {8, 96, 1}, 32);
                                   }),
                     1),
              (Sizes{6, 3}));
    const at::Tensor x = distribute_tensor(value, mesh, {Shard(0)});
    EXPECT_THROW(x.as_strided({9, 6, 5, 8}, {96, 16, 8, 1}), ShardingError) << "into the next row";
    EXPECT_THROW(x.as_strided({8, 3, 4, 8}, {96, 32, 8, 1}), ShardingError) << "of fewer rows";
  });
}

TEST(KeptCuts, APooledFieldMeetsAParameterShardedInRows) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    torch::nn::Linear plain(64, 10), layer(64, 10);
    plain->to(at::kDouble);
    layer->to(at::kDouble);
    fill(*plain, 3);
    fill(*layer, 3);
    distribute_module(*layer, mesh, {{"weight", {{Shard(1)}, {}}}});
    const at::Tensor value = randn({4, 64, 8}, at::kDouble);
    const at::Tensor field = distribute_tensor(value, mesh, {Shard(2)});
    set_policies(manager, {.redistribution = Policy::error});
    const at::Tensor expected = plain(value.mean(2));
    {
      const CommTraceScope trace(manager);
      const at::Tensor pooled = field.mean(2), got = layer(pooled);
      EXPECT_EQ(events(*trace, "all_gather"), 0) << trace->table();
      EXPECT_EQ(events(*trace, "reduce_scatter"), 1) << trace->table();
      std::int64_t bytes = 0;
      for (const CommEvent& e : trace->events()) bytes += e.bytes;
      EXPECT_LE(bytes, 4 * 64 * 8) << "the pooled field, not the weight";
      EXPECT_LT(difference(got, expected), 1e-12);
      got.square().sum().backward();
    }
    expected.square().sum().backward();
    EXPECT_LT(difference(layer->weight.grad(), plain->weight.grad()), 1e-12);
    EXPECT_LT(difference(layer->bias.grad(), plain->bias.grad()), 1e-12);
    torch::nn::Linear small(2, 2);
    distribute_module(*small, mesh, {{"weight", {{Shard(1)}, {}}}});
    const at::Tensor many = distribute_tensor(randn({64, 2, 4}), mesh, {Shard(2)}).sum(2);
    EXPECT_THROW(small(many), ImplicitRedistributionError) << "here the weight is less";
  });
}

TEST(KeptCuts, FusedStepsReduceWhatIsPartial) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor value = randn({6, 3}), slope = randn({6, 3}), state = randn({6, 3});
    const auto step = [](at::Tensor p, at::Tensor g, at::Tensor m) {
      at::_fused_sgd_({p}, {g}, {m}, 0.1, 0.9, 0.5, 0, false, false, false);
      return p;
    };
    const at::Tensor expected = step(value.clone(), slope.clone(), state.clone());
    for (const Placement& p : {Placement(Shard(0)), Placement(Replicate())}) {
      const at::Tensor g = from_local(slope / 2, ShardSpec(mesh, {6, 3}, {Partial()}));
      const at::Tensor got = step(distribute_tensor(value.clone(), mesh, {p}), g,
                                  distribute_tensor(state.clone(), mesh, {p}));
      EXPECT_LT(difference(got, expected), 1e-6);
      EXPECT_EQ(placements(got)[0], p);
      EXPECT_LT(difference(g, slope), 1e-6);
    }
  });
}

TEST(KeptCuts, FakeQuantizationIsElementByElement) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow});
    const at::Tensor value = randn({6, 5}) * 40;
    const at::Tensor scale = rand({6}) + 0.5, zero = at::arange(6, at::kInt);
    const std::vector<OfTensor> all = {
        [](const at::Tensor& t) { return at::fake_quantize_per_tensor_affine(t, 0.7, 3, -64, 63); },
        [&](const at::Tensor& t) {
          return at::fake_quantize_per_channel_affine(t, scale, zero, 0, -64, 63);
        }};
    for (const auto& f : all)
      for (const int d : {0, 1}) {
        const at::Tensor plain = value.clone().requires_grad_(true),
                         x = leaf(value, ShardSpec(mesh, {6, 5}, {Shard(d)}));
        const at::Tensor expected = f(plain), got = f(x);
        EXPECT_EQ(difference(got, expected), 0);
        EXPECT_TRUE(spec(got).is_sharded(d));
        expected.sum().backward();
        got.sum().backward();
        EXPECT_EQ(difference(x.grad(), plain.grad()), 0);
      }
  });
}

TEST(KeptCuts, AListBehindANumberStaysSharded) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor a = randn({6, 3}, at::kDouble), b = randn({4}, at::kDouble);
    const at::Tensor x = distribute_tensor(a, mesh, {Shard(0)}),
                     y = distribute_tensor(b, mesh, {Replicate()});
    const auto got = at::_foreach_pow(2.5, at::TensorList{x, y}),
               expected = at::_foreach_pow(2.5, at::TensorList{a, b});
    ASSERT_EQ(got.size(), 2u);
    for (std::size_t i = 0; i < 2; ++i) EXPECT_LT(difference(got[i], expected[i]), 1e-14);
    EXPECT_TRUE(spec(got[0]).is_sharded(0));
  });
}

TEST(SpecialValues, APartialSumKeepsTheSignOfZero) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow});
    const at::Tensor value = at::tensor({-0.0, 1.0, -0.0, 0.0, -0.0, 2.0, 0.0, -0.0}).view({4, 2});
    const at::Tensor at = at::tensor({3, 0, 2, 1}), rows = at::tensor({0, 3, 2, 1}).view({2, 2});
    const std::vector<std::pair<const char*, OfTensor>> all = {
        {"index_select", [&](const at::Tensor& t) { return t.index_select(0, at); }},
        {"gather", [&](const at::Tensor& t) { return t.gather(0, rows); }},
        {"index", [&](const at::Tensor& t) { return t.index({at}); }},
        {"embedding", [&](const at::Tensor& t) { return at::embedding(t, at); }}};
    for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16, at::kComplexDouble})
      for (const Sizes& sizes : {Sizes{2, 2}, Sizes{4, 0}}) {
        const at::Tensor plain = value.to(type);
        const at::Tensor x = leaf(plain, ShardSpec(mesh, {4, 2}, {Shard(0)}, {{0, sizes}}), false);
        const auto signs = [](const at::Tensor& t) {
          const at::Tensor all = whole(t);
          return at::signbit(all.is_complex() ? at::view_as_real(all).select(-1, 0) : all);
        };
        for (const auto& [name, f] : all)
          EXPECT_TRUE(signs(f(x)).equal(signs(f(plain)))) << name << ' ' << type;
        EXPECT_TRUE(signs(redistribute(x, {Partial()})).equal(signs(plain))) << type;
        EXPECT_TRUE(signs(scatter(plain, mesh, {Partial()})).equal(signs(plain))) << type;
      }
    const at::Tensor whole_numbers = at::arange(4);
    const at::Tensor n = distribute_tensor(whole_numbers, mesh, {Shard(0)});
    EXPECT_TRUE(whole(n.index_select(0, at)).equal(whole_numbers.index_select(0, at)));
  });
}

TEST(SpecialValues, TheRootOfAVarianceBeyondItsDtype) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor value = randn({6, 3}) * 1e30;
    const at::Tensor x = leaf(value, ShardSpec(mesh, {6, 3}, {Shard(0)}, {{0, {4, 2}}}), false);
    EXPECT_LT(difference(x.std(0), value.std(0)), 1e-6);
    EXPECT_LT(difference(std::get<0>(at::std_mean(x, 0)), value.std(0)), 1e-6);
    EXPECT_LT(difference(x.std(), value.std()), 1e-6);
    EXPECT_TRUE(whole(x.var(0)).isinf().all().item<bool>()) << "as on one process";
  });
}

TEST(SpecialValues, BatchNormOfAFieldWhoseStridesMayBeReadInTwoWays) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor value = at::empty_strided({1, 3, 5, 1}, {15, 1, 3, 1}, at::kDouble)
                                 .copy_(randn({1, 3, 5, 1}, at::kDouble));
    const at::Tensor along = randn({1, 3, 5, 1}, at::kDouble);
    const auto gradient = [&](at::Tensor x) {
      const at::Tensor y = at::batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5, false);
      (y * along).sum().backward();
      return x.grad();
    };
    const at::Tensor expected = gradient(value.contiguous().requires_grad_(true));
    for (const Placement& p : {Placement(Replicate()), Placement(Shard(1)), Placement(Shard(2))})
      EXPECT_LT(difference(gradient(leaf(value, ShardSpec(mesh, {1, 3, 5, 1}, {p}))), expected),
                1e-12)
          << p;
  });
}

TEST(SpecialValues, AttentionWithoutAGradient) {
  struct Nothing : torch::autograd::Function<Nothing> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& t) {
      return t.clone();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   const torch::autograd::variable_list&) {
      return {at::Tensor()};
    }
  };
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow});
    const at::Tensor value = randn({3, 2, 6, 4});
    for (const Placement& p :
         {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1)), Placement(Shard(2))}) {
      const at::Tensor q = distribute_tensor(value, mesh, {p}).detach().requires_grad_(true);
      const at::Tensor y = at::scaled_dot_product_attention(q, q, q);
      EXPECT_NO_THROW(Nothing::apply(y).sum().backward()) << p;
      if (!p.is_shard(2)) {
        EXPECT_FALSE(q.grad().defined()) << p;
      }
    }
    const at::Tensor one =
        distribute_tensor(randn({1, 2, 6, 4}), mesh, {Shard(0)}).detach().requires_grad_(true);
    EXPECT_NO_THROW(
        Nothing::apply(at::scaled_dot_product_attention(one, one, one)).sum().backward())
        << "a rank without samples";
  });
}

TEST(SpecialValues, ResultsWithoutStridesAreRefused) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    for (const Placement& p : {Placement(Replicate()), Placement(Shard(0))}) {
      const at::Tensor x = distribute_tensor(randn({4, 3}), mesh, {p});
      EXPECT_THROW(x.to_sparse(), ShardingError);
      EXPECT_THROW(x.to_sparse_csr(), ShardingError);
      if (at::hasMKLDNN()) {
        EXPECT_THROW(x.to_mkldnn(), ShardingError);
      }
      EXPECT_THROW(at::_nested_tensor_from_tensor_list({x, x}), ShardingError);
      const at::Tensor at = at::arange(4).view({1, 4});
      EXPECT_THROW(at::sparse_coo_tensor(at, x), ShardingError);
    }
  });
}

// What is written to its local reaches neither the view nor the base.
TEST(KeptCuts, TheLocalOfAGatheredViewIsACopy) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    set_policies(manager, {.redistribution = Policy::allow});
    const at::Tensor value = randn({4, 3}, at::kDouble);
    const at::Tensor x = distribute_tensor(value, mesh, {Shard(0)}), row = x[1];
    to_local(row).fill_(-1);
    EXPECT_EQ(difference(row, value[1]), 0);
    EXPECT_EQ(difference(x, value), 0);
  });
}

TEST(KeptCuts, AGatheredViewIsTakenAgainWhereItsBaseChanged) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor value = randn({4, 3}, at::kDouble);
    const auto program = [](const at::Tensor& x) {
      const at::Tensor row = x[1], diagonal = x.diagonal(), below = row.narrow(0, 1, 2);
      x.variable_data().mul_(2);
      at::Tensor sum = row + diagonal * 3;
      row.mul_(0.5);
      sum = sum + diagonal.sin() + row;
      x.detach().add_(1);
      below.add_(5);
      at::_foreach_mul_(at::TensorList{row, diagonal}, 2);
      return at::cat({sum, row, diagonal, below, x.flatten()});
    };
    const at::Tensor x = distribute_tensor(value.clone(), mesh, {Shard(0)});
    set_policies(manager, {.redistribution = Policy::allow});
    EXPECT_LT(difference(program(x), program(value.clone())), 1e-12);
  });
}

}  // namespace tessera::test::kept_cuts_test
