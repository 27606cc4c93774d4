// Complete networks on fields sharded in space: losses, every parameter's gradient and running
// statistics are those of one process.

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <unistd.h>

#include <filesystem>

#include "fields.h"
#include "networks.h"
#include "tessera/checkpoint/file.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/distributed_data_parallel.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::networks_test {

namespace {

// Recomputes a module's forward in backward instead of keeping what it saved.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  using Context = torch::autograd::AutogradContext;
  using Call = std::function<at::Tensor(const at::Tensor&)>;
  struct Held : torch::CustomClassHolder {
    explicit Held(Call c) : call(std::move(c)) {}
    Call call;
  };
  static at::Tensor forward(Context* ctx, const at::Tensor& x, const Call& call) {
    ctx->save_for_backward({x});
    ctx->saved_data["call"] = c10::IValue::make_capsule(c10::make_intrusive<Held>(call));
    const at::NoGradGuard no_grad;
    return call(x);
  }
  static torch::autograd::variable_list backward(Context* ctx,
                                                 const torch::autograd::variable_list& g) {
    const auto held = c10::static_intrusive_pointer_cast<Held>(ctx->saved_data["call"].toCapsule());
    const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_(true);
    const at::AutoGradMode enabled(true);
    held->call(x).backward(g[0]);
    return {x.grad(), at::Tensor()};
  }
};

// What an operator does to shards of space: output `o` belongs to the shard that holds the input
// `o * stride + centre` (docs/halo.md).
struct Window {
  std::int64_t stride, centre;
};

// How a network's output is sharded, which follows from how its input is.
struct Output {
  std::vector<Window> windows = {};  // one after the other
  std::int64_t enlarged = 1;         // then
  /// Mean over space: each rank has its share of it.
  bool pooled = false;
};
const Output kOfUNet = {.windows = {{2, 0}}, .enlarged = 2},
             kOfResidualField = {.windows = {{2, 0}, {2, 0}, {2, 0}}},
             kOfResidual = {.pooled = true}, kOfConvNext = {.windows = {{4, 1}, {2, 0}}},
             kOfNeighborhood = {.windows = {{2, 0}}};

struct How {
  Output output = {};
  /// error: nothing may be redistributed on the way.
  Policy moves = Policy::allow;
  bool checkpointed = false, accumulated = false, autocast = false;
  /// On other layouts than those that the table in docs/halo.md counts.
  bool again = false;
  HaloPolicy halos = {};
  std::function<ModuleRule(const DeviceMesh&)> parameters = {};  // default: replicated
};

struct Outcome {
  at::Tensor loss, output, input_gradient;
  std::vector<at::Tensor> gradients;
  std::optional<ShardSpec> spec;  // of the output, before its value is asked for
};

template <class Net>
Outcome run(Net& net, const at::Tensor& x, const How& how) {
  Outcome o;
  if (how.autocast) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  }
  for (int step = 0; step < (how.accumulated ? 2 : 1); ++step) {
    const at::Tensor in = step ? x * 0.5 : x;
    o.output = how.checkpointed
                   ? Checkpoint::apply(in, [&](const at::Tensor& t) { return net->forward(t); })
                   : net->forward(in);
    if (is_sharded(o.output)) o.spec = spec(o.output);
    o.loss = o.output.to(at::kDouble).square().mean();
    o.loss.backward();
  }
  if (how.autocast) {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  o.input_gradient = x.grad();
  for (const auto& p : net->parameters()) o.gradients.push_back(p.grad());
  return o;
}

const Shape kShape = {4, 3, 16, 24};
struct Layout {
  std::vector<Axis> axes;
  std::vector<Placement> placements;
  ShardSizes sizes;
  Shape shape = kShape;
};

const std::vector<Layout> kLayouts = {
    {{{"domain", 3}}, {Shard(2)}, {{2, {5, 0, 11}}}},
    {{{"domain", 3}}, {Shard(3)}, {{3, {1, 20, 3}}}},
    {{{"y", 2}, {"x", 2}}, {Shard(2), Shard(3)}, {{2, {7, 9}}, {3, {13, 11}}}},
    {{{"data", 2}, {"domain", 2}}, {Shard(0), Shard(2)}, {{0, {1, 3}}, {2, {6, 10}}}},
};
// Twice the halves of these shards are the shards.
const std::vector<Layout> kEven = {
    {{{"domain", 3}}, {Shard(2)}, {{2, {6, 2, 8}}}},
    {{{"domain", 3}}, {Shard(3)}, {{3, {2, 18, 4}}}},
    {{{"y", 2}, {"x", 2}}, {Shard(2), Shard(3)}, {{2, {6, 10}}, {3, {14, 10}}}},
    {{{"data", 2}, {"domain", 2}}, {Shard(0), Shard(2)}, {{0, {1, 3}}, {2, {6, 10}}}}};
// And three times their thirds.
const std::vector<Layout> kInSixes = {
    {{{"domain", 3}}, {Shard(2)}, {{2, {6, 0, 12}}}, {4, 3, 18, 24}},
    {{{"domain", 3}}, {Shard(3)}, {{3, {6, 12, 6}}}, {4, 3, 18, 24}},
    {{{"y", 2}, {"x", 2}}, {Shard(2), Shard(3)}, {{2, {6, 12}}, {3, {18, 6}}}, {4, 3, 18, 24}},
    {{{"data", 2}, {"domain", 2}},
     {Shard(0), Shard(2)},
     {{0, {1, 3}}, {2, {12, 6}}},
     {4, 3, 18, 24}}};

ShardSpec spec_of_output(const DeviceMesh& mesh, const Layout& layout, const Output& output,
                         const Shape& shape) {
  std::vector<Placement> placements = layout.placements;
  ShardSizes all;
  for (auto [dim, sizes] : layout.sizes) {
    if (dim > 0 && output.pooled) continue;
    std::int64_t from = 0, end = 0;
    for (std::int64_t& size : sizes) {
      end += size;
      std::int64_t to = end;  // the end of this shard in the output
      for (const Window& w : dim > 0 ? output.windows : std::vector<Window>())
        to = std::max<std::int64_t>(0, (to - w.centre + w.stride - 1) / w.stride);
      if (dim > 0) to = std::min(to * output.enlarged, shape[dim]);
      size = to - from;
      from = to;
    }
    all[dim] = sizes;
  }
  for (Placement& p : placements) {
    if (output.pooled && !p.is_shard(0)) p = Partial();
  }
  return ShardSpec(mesh, shape, placements, all);
}

// As the parameters lie.
void expect_placed_gradients(const torch::nn::Module& net, const std::string& where) {
  for (const auto& p : net.named_parameters())
    EXPECT_EQ(spec(p.value().grad()), spec(p.value())) << p.key() << " of " << where;
}

template <class Make>
void compare(const char* name, Make make, const Layout& layout, const How& how = {}) {
  on_ranks(ranks_of(layout.axes), [&](DistributedManager& manager) {
    set_policies(manager, {.redistribution = how.moves});
    set_halo_policy(manager, how.halos);
    const auto mesh = manager.mesh(mapped(layout.axes));
    const ShardSpec field(mesh, layout.shape, layout.placements, layout.sizes);
    if (Coverage::instance().noting()) {
      if (how.again) return;
      return Coverage::instance().note(concat("network: ", name), field,
                                       {"samples", "channels", "space", "space"}, false,
                                       manager.rank());
    }
    auto expected_net = make(), net = make();
    const at::ScalarType type = how.autocast ? at::kFloat : at::kDouble;
    // Two orders of the same bfloat16 sums differ by their rounding.
    const double tolerance = how.autocast ? 0.05 : 1e-10;
    for (auto* one : {&expected_net, &net}) {
      (*one)->to(type);
      fill(**one, 7);
    }
    const at::Tensor value = randn(layout.shape, type);
    const Outcome expected = run(expected_net, value.clone().requires_grad_(true), how);
    distribute_module(*net, mesh, how.parameters ? how.parameters(mesh) : ModuleRule{});
    const Outcome got = run(net, leaf(value, field), how);
    const std::string where = concat(name, " on ", field);
    ASSERT_TRUE(got.spec) << where;
    EXPECT_EQ(*got.spec, spec_of_output(mesh, layout, how.output, expected.output.sizes().vec()))
        << where;
    EXPECT_EQ(spec(got.input_gradient), field) << where;
    expect_placed_gradients(*net, where);
    set_policies(manager, {.redistribution = Policy::allow});
    EXPECT_LT(difference(got.loss, expected.loss), tolerance) << name;
    EXPECT_LT(difference(got.output, expected.output), tolerance) << name;
    EXPECT_LT(difference(got.input_gradient, expected.input_gradient), tolerance) << name;
    // Of a convolution before a norm the bias has no gradient but round-off: compared with the
    // largest of all.
    double largest = 0;
    for (const auto& g : expected.gradients)
      largest = std::max(largest, g.abs().max().template item<double>());
    const auto names = net->named_parameters();
    for (std::size_t i = 0; i < got.gradients.size(); ++i) {
      const double off =
          (whole(got.gradients[i]) - expected.gradients[i]).abs().max().template item<double>();
      EXPECT_LT(off, tolerance * largest) << name << " " << names[i].key();
    }
    const auto buffers = net->buffers(), expected_buffers = expected_net->buffers();
    for (std::size_t i = 0; i < buffers.size(); ++i)
      EXPECT_LT(difference(buffers[i], expected_buffers[i]), tolerance) << name << " buffer " << i;
  });
}

class Networks : public ::testing::TestWithParam<int> {};

// Where a shard has an odd number of rows, cat must redistribute one of its fields: what was halved
// and doubled again (up) has an even number of them, what it meets (a) has not.
TEST_P(Networks, UNet) {
  compare("U-Net", [] { return UNet(); }, kLayouts[GetParam()], {.output = kOfUNet});
}
// For shards whose pooled halves are the halves of the shards nothing is redistributed: not by the
// norms either, whose groups are divided among ranks.
TEST_P(Networks, UNetWithoutRedistribution) {
  compare("U-Net, no redistribution", [] { return UNet(); }, kEven[GetParam()],
          {.output = kOfUNet, .moves = Policy::error, .again = true});
}
// Where each halving divides the shards, patches of four rows too.
TEST_P(Networks, BlocksWithoutRedistribution) {
  const std::vector<Layout> even = {
      {{{"domain", 3}}, {Shard(2)}, {{2, {8, 0, 8}}}},
      {{{"domain", 3}}, {Shard(3)}, {{3, {4, 16, 4}}}},
      {{{"y", 2}, {"x", 2}}, {Shard(2), Shard(3)}, {{2, {8, 8}}, {3, {16, 8}}}},
      {{{"data", 2}, {"domain", 2}}, {Shard(0), Shard(2)}, {{0, {1, 3}}, {2, {8, 8}}}}};
  compare("residual field, no redistribution", [] { return Residual(false); }, even[GetParam()],
          {.output = kOfResidualField, .moves = Policy::error, .again = true});
  compare("ConvNeXt block, no redistribution", [] { return ConvNext(); }, even[GetParam()],
          {.output = kOfConvNext, .moves = Policy::error, .again = true});
}
// These keep uneven shards uneven: windows and norms move halos and statistics alone.
TEST_P(Networks, ResidualStemAndBlocks) {
  compare("residual stem and blocks", [] { return Residual(); }, kLayouts[GetParam()],
          {.output = kOfResidual, .moves = Policy::error});
  compare("residual field", [] { return Residual(false); }, kLayouts[GetParam()],
          {.output = kOfResidualField, .moves = Policy::error, .again = true});
}
TEST_P(Networks, ConvNextBlock) {
  compare("ConvNeXt block", [] { return ConvNext(); }, kLayouts[GetParam()],
          {.output = kOfConvNext, .moves = Policy::error});
}
TEST_P(Networks, NeighborhoodBlock) {
  compare("block of neighbourhood attention", [] { return Neighborhood(); }, kLayouts[GetParam()],
          {.output = kOfNeighborhood, .moves = Policy::error});
  compare("block of neighbourhood attention, interior first", [] { return Neighborhood(); },
          kLayouts[GetParam()],
          {.output = kOfNeighborhood,
           .moves = Policy::error,
           .halos = {.order = HaloPolicy::Order::interior_first}});
}
// The fields that cat joins come from a half and from a third of the resolution, which are sharded
// as the field is only where two and three divide its shards, and at times by chance, as in the
// first layout and the last: elsewhere cat must redistribute them.
TEST_P(Networks, Decoder) {
  const bool alike = GetParam() == 0 || GetParam() == 3;
  compare("decoder: unpooling, pixels of channels, interpolation", [] { return Decoder(); },
          kLayouts[GetParam()],
          {.output = kOfUNet, .moves = alike ? Policy::error : Policy::allow});
  compare("decoder, no redistribution", [] { return Decoder(); }, kInSixes[GetParam()],
          {.output = kOfUNet, .moves = Policy::error, .again = true});
}

// Every parameter sharded unevenly over the first axis, be it one of the field or of the data:
// gathered where it is used.
ModuleRule fully_sharded(const DeviceMesh& mesh) {
  const int parts = mesh.mesh().axes()[0].size;
  return [axes = mesh.mesh().axes().size(), parts](
             const std::string&, const at::Tensor& t) -> std::optional<ParameterPlacement> {
    if (t.dim() == 0) return std::nullopt;
    std::vector<Placement> placements(axes);
    placements[0] = Shard(0);
    Sizes sizes(parts, 0);
    sizes[0] = (t.size(0) + 1) / 2;
    sizes[parts - 1] += t.size(0) - sizes[0];
    return ParameterPlacement{placements, {{0, sizes}}};
  };
}
// As for the U-Net of whole parameters, cat redistributes where shards are odd, and nothing does
// where they are even: parameters are gathered by their placement.
TEST_P(Networks, FullyShardedUNet) {
  compare("U-Net, fully sharded parameters", [] { return UNet(); }, kLayouts[GetParam()],
          {.output = kOfUNet, .parameters = fully_sharded});
  compare("U-Net, fully sharded parameters, no redistribution", [] { return UNet(); },
          kEven[GetParam()],
          {.output = kOfUNet, .moves = Policy::error, .again = true, .parameters = fully_sharded});
}
TEST_P(Networks, FullyShardedResidual) {
  compare("residual blocks, fully sharded parameters", [] { return Residual(); },
          kLayouts[GetParam()],
          {.output = kOfResidual, .moves = Policy::error, .parameters = fully_sharded});
}

// On the layouts of the U-Net, for the same reason; and without redistribution.
void compare_unets(const char* name, int layout, How how) {
  how.output = kOfUNet;
  compare(name, [] { return UNet(); }, kLayouts[layout], how);
  how.moves = Policy::error;
  how.again = true;
  compare(name, [] { return UNet(); }, kEven[layout], how);
}
TEST_P(Networks, UNetCheckpointed) {
  compare_unets("U-Net, checkpointed", GetParam(), {.checkpointed = true});
}
TEST_P(Networks, UNetWithAccumulatedGradients) {
  compare_unets("U-Net, gradients accumulated", GetParam(), {.accumulated = true});
}
TEST_P(Networks, UNetUnderAutocast) {
  compare_unets("U-Net, autocast to bfloat16", GetParam(), {.autocast = true});
}

// Replicas of a domain: each has samples of its own, and their gradients are averaged after their
// domains have summed theirs.
TEST(ReplicatedDomains, TrainLikeOneProcessUnderDistributedDataParallel) {
  on_ranks(4, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh({{"data", 2}, {"domain", 2}});
    const int replica = mesh.coordinate()[0];
    const DeviceMesh domain(mesh.mesh().submesh({"domain"}, manager.rank()), manager);
    ConvNext net, expected;
    for (auto* one : {&net, &expected}) {
      (*one)->to(at::kDouble);
      fill(**one, 7);
    }
    distribute_module(*net, domain);
    DistributedDataParallel ddp(net, mesh.group("data"));
    torch::optim::AdamW opt(net->parameters(), 0.01), expected_opt(expected->parameters(), 0.01);
    for (int step = 0; step < 3; ++step) {
      // three samples for the first replica, one for the other
      const at::Tensor x = randn(kShape, at::kDouble);
      expected_opt.zero_grad();
      const at::Tensor expected_loss = expected(x).square().mean();
      expected_loss.backward();
      const at::Tensor mine = replica == 0 ? x.narrow(0, 0, 3) : x.narrow(0, 3, 1);
      const at::Tensor cut = distribute_tensor(mine, domain, {Shard(2)}, {{2, {5, 11}}});
      opt.zero_grad();
      const at::Tensor y = ddp(cut);
      EXPECT_EQ(spec(y), ShardSpec(domain, {mine.size(0), 8, 2, 3}, {Shard(2)}, {{2, {1, 1}}}));
      ddp.mean_loss(full_tensor(y.square().mean()), static_cast<double>(mine.size(0))).backward();
      expect_placed_gradients(*net, concat("step ", step));
      const auto names = expected->named_parameters();
      for (const auto& item : net->named_parameters())
        EXPECT_LT(difference(item.value().grad(), names[item.key()].grad()), 1e-9)
            << item.key() << " in step " << step;
      opt.step();
      expected_opt.step();
    }
    const auto names = expected->named_parameters();
    for (const auto& item : net->named_parameters())
      EXPECT_LT(difference(item.value(), names[item.key()]), 1e-9) << item.key();
  });
}

// Trained on one mesh with sharded parameters, saved, loaded on meshes of other axes and shards,
// and trained on: the steps of one process.
TEST(TrainedDomains, MoveToOtherMeshesByAFile) {
  const auto path = std::filesystem::path(::testing::TempDir()) /
                    concat("tessera_networks_", ::getpid(), ".safetensors");
  on_ranks(4, [&](DistributedManager& manager) {
    UNet expected;
    expected->to(at::kDouble);
    fill(*expected, 7);
    torch::optim::SGD expected_opt(expected->parameters(), 0.1);
    const std::vector<Layout> layouts = {
        kLayouts[3], kLayouts[2], {{{"domain", 4}}, {Shard(2)}, {{2, {2, 8, 0, 6}}}}};
    for (std::size_t stage = 0; stage < layouts.size(); ++stage) {
      const Layout& layout = layouts[stage];
      const auto mesh = manager.mesh(mapped(layout.axes));
      const ShardSpec field(mesh, kShape, layout.placements, layout.sizes);
      // Between odd shards cat must redistribute.
      set_policies(manager, {.redistribution = stage == 1 ? Policy::allow : Policy::error});
      UNet net;
      net->to(at::kDouble);
      fill(*net, stage == 0 ? 7 : 100);  // what it has later comes from the file
      distribute_module(*net, mesh, stage == 1 ? ModuleRule{} : fully_sharded(mesh));
      if (stage > 0) load(*net, mesh, path);
      torch::optim::SGD opt(net->parameters(), 0.1);
      for (int step = 0; step < 2; ++step) {
        const at::Tensor x = randn(kShape, at::kDouble);
        for (auto* one : {&opt, &expected_opt}) one->zero_grad();
        const at::Tensor y = net(leaf(x, field, false));
        EXPECT_EQ(spec(y), spec_of_output(mesh, layout, kOfUNet, {4, 2, 16, 24}));
        const at::Tensor loss = y.square().mean();
        const at::Tensor expected_loss = expected(x).square().mean();
        loss.backward();
        expected_loss.backward();
        expect_placed_gradients(*net, concat("stage ", stage));
        EXPECT_LT(difference(loss, expected_loss), 1e-10) << "stage " << stage << " step " << step;
        for (auto* one : {&opt, &expected_opt}) one->step();
      }
      save(*net, mesh, path);
      const auto tensors = load(mesh, path);
      auto all = expected->named_parameters();
      for (const auto& buffer : expected->named_buffers()) all.insert(buffer.key(), buffer.value());
      ASSERT_EQ(tensors.size(), all.size());
      for (const auto& [name, value] : tensors)
        EXPECT_LT(difference(value, all[name]), 1e-9) << name << " after stage " << stage;
    }
  });
  std::filesystem::remove(path);
}

INSTANTIATE_TEST_SUITE_P(Layouts, Networks, ::testing::Range(0, 4));

}  // namespace

}  // namespace tessera::test::networks_test
