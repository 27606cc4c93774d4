// Making sharded tensors, and leaving them: gradients' placements, requests, other meshes, files,
// pictures, and what must refuse.

#include <torch/serialize.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "support.h"
#include "tessera/checkpoint/file.h"
#include "tessera/comm/group/trace.h"
#include "tessera/comm/group/values.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::test::leave_test {

namespace {

std::string temporary(const std::string& name) {
  return (std::filesystem::temp_directory_path() / concat("tessera_", ::getpid(), "_", name))
      .string();
}

struct Removed {
  std::string path;
  ~Removed() { std::filesystem::remove(path); }
};

std::string message(const std::function<void()>& f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "nothing was thrown";
}

}  // namespace

TEST(Gradient, PlacementsAreInferredOrChosen) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor value = randn({5, 4}, at::kDouble), weight = randn({5, 4}, at::kDouble);
    const ShardSpec rows(mesh, {5, 4}, {Shard(0)}, {{0, {4, 1}}});
    {
      const at::Tensor x = leaf(value, rows);
      (full_tensor(x) * weight).sum().backward();
      EXPECT_EQ(spec(x.grad()), rows) << "of full_tensor: the tensor's own";
      EXPECT_EQ(difference(x.grad(), weight), 0);
    }
    {
      // Each rank's loss is a summand: the gradient is that of their sum.
      const at::Tensor x = leaf(value, rows);
      (full_tensor(x, std::vector<Placement>{Partial()}) * weight * (manager.rank() + 1))
          .sum()
          .backward();
      EXPECT_LT(difference(x.grad(), weight * 3), 1e-14);
      EXPECT_THROW(full_tensor(x, std::vector<Placement>{Shard(0)}), InvalidArgument);
    }
    {
      const at::Tensor x = leaf(value, rows);
      redistribute(x, {Replicate()}, {}, std::vector<Placement>{Replicate()})
          .mul(distribute_tensor(weight, mesh, {Replicate()}))
          .sum()
          .backward();
      EXPECT_TRUE(spec(x.grad()).is_replicated()) << "as chosen";
      EXPECT_EQ(difference(x.grad(), weight), 0);
    }
    {
      const at::Tensor x = leaf(value, ShardSpec::replicated(mesh, {5, 4}));
      const at::Tensor mine = to_local(x, std::vector<Placement>{Partial()});
      (mine * weight * (manager.rank() + 1)).sum().backward();
      EXPECT_LT(difference(x.grad(), weight * 3), 1e-14)
          << "to_local of a replicated value used differently by each rank";
    }
    {
      const at::Tensor x = leaf(value, rows);
      const at::Tensor g =
          torch::autograd::grad({full_tensor(x).pow(3).sum()}, {x}, {}, true, true)[0];
      g.sum().backward();
      EXPECT_LT(difference(x.grad(), value * 6), 1e-13) << "twice";
    }
  });
}

TEST(Redistribute, ResultsHaveMemoryOfTheirOwn) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = distribute_tensor(at::ones({4}), mesh, {Replicate()});
    redistribute(x, {Shard(0)}).mul_(5);
    EXPECT_EQ(difference(x, at::ones({4})), 0);
  });
}

TEST(FullTensor, HasMemoryOfItsOwnWhateverThePlacement) {
  for (const int ranks : {1, 2}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", ranks}});
      std::vector<ShardSpec> specs{{mesh, {4}, {Replicate()}}, {mesh, {4}, {Shard(0)}}};
      // The first rank has everything.
      if (ranks == 2) specs.push_back({mesh, {4}, {Shard(0)}, {{0, {4, 0}}}});
      for (const ShardSpec& spec : specs) {
        const at::Tensor x = leaf(at::ones({4}, at::kDouble), spec);
        full_tensor(x.detach()).mul_(5);
        EXPECT_EQ(difference(x.detach(), at::ones({4}, at::kDouble)), 0) << spec;
        // What backward needs of the value is the value that it was.
        const at::Tensor y = full_tensor(x);
        const at::Tensor loss = (y * y).sum();
        {
          const at::NoGradGuard no_grad;
          x.add_(1);
        }
        loss.backward();
        EXPECT_EQ(difference(x.grad(), at::full({4}, 2.0, at::kDouble)), 0) << spec;
      }
    });
  }
}

TEST(Redistribute, Asynchronous) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Draw draw(40 + ranks);
      for (int i = 0; i < 40; ++i) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
        const std::vector<std::int64_t> shape = {draw.between(0, 5), draw.between(1, 4)};
        test::seed(i);
        const at::Tensor value = randn(shape, at::kDouble), weight = randn(shape, at::kDouble);
        const ShardSpec from = draw.spec(mesh, shape), to = draw.spec(mesh, shape),
                        third = draw.spec(mesh, shape);
        const at::Tensor x = leaf(value, from);
        Pending<at::Tensor> a = start_redistribute(x, to), b = start_redistribute(x, third);
        const at::Tensor y = a.wait(), z = b.wait();
        EXPECT_TRUE(a.done());
        ASSERT_EQ(spec(y), to);
        ASSERT_LT(difference(y, value), 1e-14);
        ASSERT_LT(difference(z, value), 1e-14);
        EXPECT_TRUE(a.wait().is_same(y)) << "waited for again";
        (full_tensor(y) * weight).sum().backward();
        ASSERT_LT(difference(x.grad(), weight), 1e-14);
      }
    });
  }
}

TEST(Redistribute, SaysWhatItWillDo) {
  on_threads(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"a", 2}, {"b", 2}});
    const auto calls = explain_redistribution(ShardSpec(mesh, {4, 8}, {Partial(), Shard(1)}),
                                              ShardSpec(mesh, {4, 8}, {Shard(0), Replicate()}));
    ASSERT_EQ(calls.size(), 2u);
    EXPECT_EQ(calls[0].operation, "reduce_scatter");
    EXPECT_EQ(calls[0].axes, std::vector<std::string>{"a"});
    EXPECT_EQ(calls[0].received, 8);
    EXPECT_EQ(calls[1].operation, "all_gather");
    EXPECT_EQ(calls[1].axes, std::vector<std::string>{"b"});
    EXPECT_EQ(calls[1].received, 8);
  });
}

TEST(OtherMesh, SameRanksOtherOrderDifferentiable) {
  for (const int ranks : {2, 3, 4}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      Draw draw(60 + ranks);
      std::vector<int> order(ranks);
      for (int r = 0; r < ranks; ++r) order[r] = ranks - 1 - r;
      const auto from = manager.mesh(draw.mesh(ranks));
      const auto to = manager.mesh(Mesh({{"y", ranks}}, order));
      for (int i = 0; i < 30; ++i) {
        const std::vector<std::int64_t> shape = {draw.between(0, 6), draw.between(1, 5)};
        test::seed(i);
        const at::Tensor value = randn(shape, at::kDouble), weight = randn(shape, at::kDouble);
        const ShardSpec there = draw.spec(to, shape, false);
        const at::Tensor x = leaf(value, draw.spec(from, shape));
        const at::Tensor y = redistribute(x, from, to, there.placements(), there.sizes());
        ASSERT_EQ(spec(y), there);
        ASSERT_LT(difference(y, value), 1e-14);
        (full_tensor(y) * weight).sum().backward();
        ASSERT_LT(difference(x.grad(), weight), 1e-14);
      }
    });
  }
}

TEST(OtherMesh, OtherRanks) {
  on_threads(4, [](DistributedManager& manager) {
    Draw draw(9);
    const auto from = manager.mesh(Mesh({{"x", 2}}, {2, 0}));
    for (const auto& members :
         {std::vector<int>{1, 3}, std::vector<int>{0, 1, 3}, std::vector<int>{3}}) {
      const auto to = manager.mesh(Mesh({{"y", static_cast<int>(members.size())}}, members));
      if (!from.contains_me() && !to.contains_me()) continue;
      for (int i = 0; i < 20; ++i) {
        const std::vector<std::int64_t> shape = {draw.between(0, 6), draw.between(1, 5)};
        test::seed(i);
        const at::Tensor value = randn(shape, at::kDouble);
        const Sizes a = draw.sizes(shape[0], 2),
                    b = draw.sizes(shape[1], static_cast<int>(members.size()));
        const at::Tensor x = from.contains_me()
                                 ? distribute_tensor(value, from, {Shard(0)}, {{0, a}})
                                 : at::Tensor();
        const at::Tensor y = redistribute(x, from, to, {Shard(1)}, {{1, b}});
        ASSERT_EQ(y.defined(), to.contains_me());
        if (y.defined()) {
          ASSERT_EQ(difference(y, value), 0);
        }
      }
      const at::Tensor x =
          from.contains_me() ? leaf(at::ones({4}), ShardSpec(from, {4}, {Shard(0)})) : at::Tensor();
      EXPECT_THROW(redistribute(x, from, to, {Replicate()}), ShardingError) << "on every rank";
      EXPECT_THROW(redistribute(at::ones({4}), from, to, {Replicate()}), InvalidArgument)
          << "on every rank";
    }
  });
}

TEST(Factories, RandomNumbersDoNotDependOnThePlacement) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    for (const bool normal : {false, true}) {
      manual_seed(manager, 5);
      const at::Tensor a =
          normal ? randn(ShardSpec(mesh, {7, 2}, {Shard(0)}, {{0, {5, 0, 2}}}))
                 : tessera::rand(ShardSpec(mesh, {7, 2}, {Shard(0)}, {{0, {5, 0, 2}}}));
      manual_seed(manager, 5);
      const at::Tensor b = normal ? randn(ShardSpec::replicated(mesh, {7, 2}))
                                  : tessera::rand(ShardSpec::replicated(mesh, {7, 2}));
      EXPECT_EQ(difference(a, full_tensor(b)), 0);
      EXPECT_GT(full_tensor(a).std().item<double>(), 0.1);
    }
    const ShardSpec seven(mesh, {7}, {Shard(0)}, {{0, {5, 0, 2}}});
    EXPECT_LT(
        difference(arange(seven, 2.0, 0.5, at::kDouble), at::arange(2.0, 5.5, 0.5, at::kDouble)),
        1e-15);
    EXPECT_EQ(difference(arange(seven, 3, -2), at::arange(3, -11, -2)), 0);
    EXPECT_TRUE(tessera::rand(seven, at::TensorOptions(at::kFloat).requires_grad(true)).is_leaf());
  });
}

TEST(Files, WhatOneMeshSavesLoadsOnAnother) {
  const Removed file{temporary("state.safetensors")};
  const auto make = [] {
    torch::nn::Sequential net(torch::nn::Linear(6, 5), torch::nn::BatchNorm1d(5),
                              torch::nn::Linear(5, 3));
    fill(*net, 11);
    return net;
  };
  on_threads(4, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"a", 2}, {"b", 2}});
    auto net = make();
    distribute_module(
        *net, mesh,
        [](const std::string& name, const at::Tensor&) -> std::optional<ParameterPlacement> {
          if (name == "0.weight")
            return ParameterPlacement{{Shard(0), Shard(1)}, {{0, {4, 1}}, {1, {0, 6}}}};
          return std::nullopt;
        });
    seed(0);
    // moves the running statistics
    net->forward(distribute_tensor(randn({8, 6}), mesh, {Shard(0), Replicate()}));
    save(*net, mesh, file.path);
  });
  auto plain = make();
  plain->forward([&] {
    seed(0);
    return randn({8, 6});
  }());
  for (const int ranks : {1, 3}) {
    on_threads(ranks, [&](DistributedManager& manager) {
      const auto mesh = manager.mesh({{"x", ranks}});
      auto net = make();
      fill(*net, 99);
      distribute_module(
          *net, mesh,
          [](const std::string& name, const at::Tensor& t) -> std::optional<ParameterPlacement> {
            if (t.dim() == 2 && name.ends_with("weight")) return ParameterPlacement{{Shard(1)}};
            return std::nullopt;
          });
      load(*net, mesh, file.path);
      for (const auto& p : plain->named_parameters())
        EXPECT_EQ(difference(net->named_parameters()[p.key()], p.value()), 0) << p.key();
      for (const auto& b : plain->named_buffers())
        EXPECT_LT(difference(net->named_buffers()[b.key()], b.value()), 1e-6) << b.key();
      auto undistributed = make();
      fill(*undistributed, 98);
      load(*undistributed, mesh, file.path);
      EXPECT_EQ(difference(undistributed->parameters()[0], plain->parameters()[0]), 0);
      torch::nn::Sequential other(torch::nn::Linear(6, 4));
      fill(*other, 1);
      const at::Tensor before = other->parameters()[0].detach().clone();
      const std::string why = message([&] { load(*other, mesh, file.path); });
      EXPECT_NE(why.find("'0.weight' has shape [4, 6], in the file [5, 6]"), std::string::npos)
          << why;
      EXPECT_NE(why.find("'2.bias' is in the file alone"), std::string::npos) << why;
      EXPECT_EQ(difference(other->parameters()[0], before), 0);
    });
  }
}

TEST(Files, EveryDtypeAndPlacement) {
  const Removed file{temporary("dtypes.safetensors")};
  on_threads(3, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    Draw draw(3);
    NamedTensors all;
    std::vector<at::Tensor> values;
    for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
                             at::kShort, at::kChar, at::kByte, at::kBool}) {
      for (const auto& shape : {std::vector<std::int64_t>{}, std::vector<std::int64_t>{0, 3},
                                std::vector<std::int64_t>{4, 5}}) {
        const at::Tensor value = randn(shape).mul(3).abs().to(dtype);
        values.push_back(value);
        all.emplace_back(
            concat("name \"", all.size(), "\" \n"),
            distribute_tensor(value, draw.spec(mesh, shape, at::isFloatingType(dtype))));
      }
    }
    values.push_back(at::arange(3));
    all.emplace_back("plain", values.back());
    save(all, mesh, file.path);
    const NamedTensors loaded =
        load(mesh, file.path, [](const std::string& name) -> std::optional<ParameterPlacement> {
          return name == "plain" ? std::optional(ParameterPlacement{{Shard(0)}, {{0, {0, 1, 2}}}})
                                 : std::nullopt;
        });
    ASSERT_EQ(loaded.size(), all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(loaded[i].first, all[i].first);
      EXPECT_LT(difference(loaded[i].second, values[i]), 1e-2) << i;
      if (!at::isFloatingType(values[i].scalar_type())) {
        EXPECT_EQ(difference(loaded[i].second, values[i]), 0) << i;
      }
    }
    EXPECT_THROW(
        save({{"z", distribute_tensor(at::zeros({2}, at::kComplexDouble), mesh, {Replicate()})}},
             mesh, file.path),
        InvalidArgument);
    const at::Tensor one = distribute_tensor(randn({4, 5}), mesh, {Shard(1)});
    const at::Tensor before = full_tensor(one);
    save(one, file.path);
    EXPECT_EQ(difference(load(file.path, ShardSpec(mesh, {4, 5}, {Shard(0)})), before), 0);
    EXPECT_THROW(load(file.path, ShardSpec(mesh, {5, 4}, {Shard(0)})), InvalidArgument);
  });
}

TEST(Files, MistakesAreReportedOnEveryRankAndLeaveNothingBehind) {
  const Removed file{temporary("broken.safetensors")};
  on_threads(2, [&](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor x = distribute_tensor(at::ones({8}), mesh, {Shard(0)});
    EXPECT_THROW(load(mesh, temporary("absent")), Error);
    EXPECT_THROW(save(x, "/nonexistent/folder/x.safetensors"), Error);
    const auto with = [&](const std::string& bytes) {
      if (manager.rank() == 0) std::ofstream(file.path, std::ios::binary) << bytes;
      return message([&] { load(mesh, file.path); });
    };
    const auto headed = [](const std::string& json) {
      std::string out;
      for (int i = 0; i < 8; ++i) out += static_cast<char>(json.size() >> 8 * i & 0xff);
      return out + json;
    };
    for (const std::string& bytes :
         {std::string(), std::string("short"), std::string(8, '\x7f'), headed("{"), headed("[]"),
          headed(R"({"a":1})"),
          headed(R"({"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}})") + "1234",
          headed(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})") + "1234",
          headed(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})"),
          headed(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})") + "12345678",
          headed(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8",)"
                 R"("shape":[1],"data_offsets":[0,1]}})") +
              "1"}) {
      const std::string why = with(bytes);
      EXPECT_NE(why.find("load: "), std::string::npos) << why << " for " << bytes;
    }
    EXPECT_EQ(with(headed(R"({ "__metadata__":{"format":"pt"}, "\u00e9" :)"
                          R"( {"dtype":"U8", "shape":[1], "data_offsets":[0,1]} })") +
                   "1"),
              "nothing was thrown");
    for (const auto& entry :
         std::filesystem::directory_iterator(std::filesystem::path(file.path).parent_path()))
      EXPECT_NE(entry.path().string().find(file.path + ".tmp-"), 0u) << entry.path();
  });
}

TEST(Pictures, TextAndSvg) {
  on_threads(4, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"data", 2}, {"domain", 2}});
    EXPECT_EQ(visualize_sharding(
                  ShardSpec(mesh, {4, 7}, {Shard(0), Shard(1)}, {{0, {3, 1}}, {1, {5, 2}}})),
              "[4, 7] data=Shard(0)[3, 1] domain=Shard(1)[5, 2]\n"
              "dim 0 | dim 1 0..4 | dim 1 5..6\n"
              "0..2  | 0          | 1\n"
              "3..3  | 2          | 3\n");
    EXPECT_EQ(visualize_sharding(ShardSpec(mesh, {4}, {Partial(), Shard(0)}, {{0, {4, 0}}})),
              "[4] data=Partial(sum) domain=Shard(0)[4, 0]\n"
              "dim 0 |\n"
              "0..3  | 0,2\n"
              "ranks along data hold values to reduce: Partial(sum). Nothing on rank 1,3.\n");
    const std::string svg = visualize_sharding_svg(
        ShardSpec(mesh, {4, 7}, {Shard(0), Shard(1)}, {{0, {3, 1}}, {1, {5, 2}}}));
    EXPECT_EQ(svg.find("<svg "), 0u);
    std::size_t cells = 0;
    for (std::size_t at = svg.find("hsl("); at != std::string::npos; at = svg.find("hsl(", at + 1))
      ++cells;
    EXPECT_EQ(cells, 4u);
    EXPECT_NO_THROW(visualize_sharding_svg(ShardSpec(mesh, {}, {Replicate(), Replicate()})));
    EXPECT_NO_THROW(visualize_sharding(ShardSpec(mesh, {0, 2, 3}, {Shard(0), Shard(2)})));
  });
}

// What reads memory, resizes, or writes where a rank has no shard: the right thing, or a refusal
// that says what to do.
// A spec, a tensor or memory that is not there is an error, not a crash.
TEST(Refuse, WhatIsNotThere) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    const ShardSpec none, rows(mesh, {4, 3}, {Shard(0)});
    const at::Tensor value = at::ones({4, 3}), part = at::ones({2, 3}),
                     sharded = distribute_tensor(value, rows);
    double memory[6] = {};
    const std::vector<std::function<void()>> calls = {
        [&] { (void)none.mesh(); },
        [&] { (void)none.shape(); },
        [&] { (void)none.has_partial(); },
        [&] { none.with_placements({Replicate()}); },
        [&] { distribute_tensor(value, none); },
        [&] { from_local(part, none); },
        [&] { from_blob(memory, none, at::kDouble); },
        [&] { redistribute(sharded, none); },
        [&] { explain_redistribution(none, rows); },
        [&] { explain_redistribution(rows, none); },
        [&] { visualize_sharding(none); },
        [&] { tessera::empty(none); },
        [&] { tessera::zeros(none); },
        [&] { tessera::full(none, 1); },
        [&] { tessera::arange(none); },
        [&] { tessera::randn(none); },
        [&] { ShardSpec(mesh, {-4}, {Replicate()}); },
        [&] { from_blob(nullptr, rows, at::kDouble); },
        [&] { from_local(at::Tensor(), rows); },
        [&] { distribute_tensor(at::Tensor(), mesh, {Shard(0)}); },
        [&] { distribute_tensor(sharded, mesh, {Shard(0)}); },
        [&] { distribute_tensor(sharded, rows); },
        [&] { tessera::print(at::Tensor()); },
        [&] { value_bytes(c10::List<at::Tensor>({sharded})); },  // no memory of its own
    };
    for (std::size_t i = 0; i < calls.size(); ++i) EXPECT_THROW(calls[i](), InvalidArgument) << i;
    EXPECT_EQ(from_blob(nullptr, ShardSpec(mesh, {0}, {Shard(0)}), at::kDouble).numel(), 0);
  });
}

// The root alone has the tensor, and alone sees what is wrong with it.
TEST(Refuse, ToScatterWhatTheRootDoesNotHave) {
  on_threads(3, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 3}});
    const at::Tensor value = randn({4, 3}), sharded = distribute_tensor(value, mesh, {Shard(0)});
    for (const at::Tensor& wrong : {at::Tensor(), sharded, value.to_sparse()}) {
      EXPECT_THROW(scatter(manager.rank() == 1 ? wrong : at::Tensor(), mesh, {Shard(0)}, {}, 1),
                   Error);
      const at::Tensor got =
          scatter(manager.rank() == 1 ? value : at::Tensor(), mesh, {Shard(0)}, {}, 1);
      EXPECT_EQ(difference(got, value), 0) << "the next one works";
    }
  });
}

TEST(Refuse, OrDoTheRightThing) {
  on_threads(2, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"x", 2}});
    const at::Tensor value = randn({4, 3}, at::kDouble);
    const auto rows = [&] {
      return distribute_tensor(value.clone(), mesh, {Shard(0)}, {{0, {3, 1}}});
    };
    EXPECT_NE(message([&] { rows().data_ptr<double>(); }).find("tessera::to_local"),
              std::string::npos);
    std::ostringstream out;
    EXPECT_NE(message([&] { torch::save(rows(), out); }).find("tessera::save"), std::string::npos)
        << message([&] { torch::save(rows(), out); });
    // What was distributed in place has libtorch's own tensors.
    torch::nn::Linear net(3, 2);
    distribute_module(*net, mesh);
    for (const at::Tensor& p : net->parameters())
      EXPECT_NE(message([&] { torch::save(p, out); }).find("tessera::save"), std::string::npos)
          << message([&] { torch::save(p, out); });
    EXPECT_NE(message([&] { torch::save(net, out); }).find("tessera::save"), std::string::npos)
        << message([&] { torch::save(net, out); });
    EXPECT_NE(message([&] { out << rows(); }).find("tessera::print"), std::string::npos);
    // Scalars, wherever they lie.
    EXPECT_NEAR(rows().sum().item<double>(), value.sum().item<double>(), 1e-12)
        << "a partial scalar";
    EXPECT_EQ(rows().max().item<double>(), value.max().item<double>());
    EXPECT_NEAR(distribute_tensor(value.slice(0, 0, 1).slice(1, 0, 1).clone(), mesh, {Shard(0)})
                    .item<double>(),
                value[0][0].item<double>(), 0);
    // As plain libtorch does it, or refused where said: never something else.
    struct Write {
      const char* name;
      std::function<void(at::Tensor)> write;
      // Resizes a shard, or replaces its memory.
      bool refused = false;
    };
    const std::vector<Write> writes = {
        {"a row by its number", [](at::Tensor t) { t[3] = 7.0; }},
        {"in place to a row", [](at::Tensor t) { t[0].mul_(2); }},
        {"to rows of several shards", [](at::Tensor t) { t.slice(0, 1, 4).fill_(5); }},
        {"to a box", [](at::Tensor t) { t.slice(0, 2, 4).slice(1, 0, 2).mul_(-1); }},
        {"to narrowed columns", [](at::Tensor t) { t.narrow(1, 1, 1).fill_(2); }},
        {"a column from a tensor",
         [](at::Tensor t) { t.select(1, 0).copy_(at::ones({4}, at::kDouble)); }},
        {"to the transpose", [](at::Tensor t) { t.t().add_(1); }},
        {"to another view", [](at::Tensor t) { t.view({2, 6}).mul_(3); }},
        {"with a dim more", [](at::Tensor t) { t.unsqueeze(0).zero_(); }},
        {"a number at a slice",
         [](at::Tensor t) { t.index_put_({torch::indexing::Slice(1, 3)}, 4.0); }},
        {"rows at indices",
         [](at::Tensor t) { t.index_put_({at::arange(2)}, at::ones({2, 3}, at::kDouble)); }},
        {"resized to less", [](at::Tensor t) { t.resize_({2, 3}); }, true},
        {"resized to more", [](at::Tensor t) { t.resize_({5, 5}).zero_(); }, true},
        {"transposed in place", [](at::Tensor t) { t.t_(); }},
        {"transposed in place, then written", [](at::Tensor t) { t.transpose_(0, 1).mul_(2); }},
        {"given a dim in place, then written", [](at::Tensor t) { t.unsqueeze_(1).add_(1); }},
        {"set to other memory", [](at::Tensor t) { t.set_(at::zeros({2}, at::kDouble)); }, true},
        {"out= of what is read", [](at::Tensor t) { at::add_out(t, t, t); }},
        {"out= of another shape",
         [](at::Tensor t) { at::sum_out(t, t * 1, at::IntArrayRef({0})); }},
    };
    for (const Write& w : writes) {
      const at::Tensor plain = value.clone(), x = rows();
      w.write(plain);
      if (w.refused) {
        const std::string why = message([&] { w.write(x); });
        EXPECT_NE(why.find("redistribute"), std::string::npos) << w.name << ": " << why;
        EXPECT_EQ(difference(x, value), 0) << w.name << ": refused, and written";
      } else {
        EXPECT_NO_THROW(w.write(x)) << w.name;
        EXPECT_LT(difference(x, plain), 1e-14) << w.name;
      }
    }
  });
}

}  // namespace tessera::test::leave_test
