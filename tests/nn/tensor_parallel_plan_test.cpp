// Tensor-parallel plans: what they say of a module, which pattern counts, and what they refuse.

#include <string>
#include <vector>

#include "tessera/nn/check_module.h"
#include "transformer.h"

namespace tessera::test::tensor_parallel_test {

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
