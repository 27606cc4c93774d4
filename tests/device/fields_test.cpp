// Sharded tensors on the stand-in device: drawn shapes and placements, forward and backward, beside
// plain ones on the CPU.

#include <set>

#include "device.h"
#include "support.h"
#include "tessera/ops/attention/neighborhood.h"
#include "tessera/ops/halo/halo.h"
#include "transport.h"

namespace tessera::test {
namespace {

using stand_in::on_devices;
using stand_in::take_faults;
using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

at::Tensor here(const at::Tensor& t) { return whole(t).cpu(); }

// With --gtest_repeat each round draws other numbers.
constexpr std::uint64_t kSeeds = 1;
std::uint64_t round_of_tests() {
  static std::uint64_t one = 0;
  return one++;
}

// How often the hosts of all ranks wait for their devices in forward and backward, when it is not
// the first time.
std::int64_t waits_of(const DeviceMesh& mesh, const Tensors& inputs, const Function& f) {
  const Group all = mesh.manager().world();
  const auto run = [&] {
    const at::Tensor made = f(inputs);
    const at::Tensor total = (made * made).sum();
    if (total.requires_grad()) total.backward();
  };
  run();
  all.barrier();
  const std::int64_t before = stand_in::counters().waits;
  all.barrier();
  run();
  all.barrier();
  const std::int64_t after = stand_in::counters().waits;
  all.barrier();
  return after - before;
}

// The value and the gradients of `f` of these global tensors, the first `sharded` of them sharded
// as drawn.
void compare(const std::string& what, Draw& draw, const DeviceMesh& mesh, const Tensors& inputs,
             std::size_t sharded, const Function& f) {
  stand_in::set_place(what.c_str());
  Tensors plain, there;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool wants = at::isFloatingType(inputs[i].scalar_type());
    plain.push_back(inputs[i].clone().requires_grad_(wants));
    const at::Tensor own = inputs[i].to(mesh.manager().device());
    const std::vector<std::int64_t> shape = inputs[i].sizes().vec();
    ShardSpec spec = ShardSpec::replicated(mesh, shape);
    const int last = static_cast<int>(shape.size()) - 1;
    if (i < sharded) spec = draw.spec(mesh, shape, false);
    // Attention over neighbours takes no sharded channels.
    while (what == "neighborhood_attention" && spec.is_sharded(last))
      spec = draw.spec(mesh, shape, false);
    there.push_back(distribute_tensor(own, spec).detach().requires_grad_(wants));
  }
  const at::Tensor expected = f(plain), got = f(there);
  ASSERT_EQ(got.device(), mesh.manager().device()) << what;
  EXPECT_LT(difference(here(got), expected.detach()), 1e-10) << what;
  const at::Tensor weights = at::arange(expected.numel(), at::kDouble).sin().view(expected.sizes());
  (expected * weights).sum().backward();
  (got * weights.to(got.device())).sum().backward();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_EQ(plain[i].grad().defined(), there[i].grad().defined()) << what << ", input " << i;
    if (plain[i].grad().defined()) {
      EXPECT_LT(difference(here(there[i].grad()), plain[i].grad(), 1e-3), 1e-10)
          << what << ", input " << i;
    }
  }
  // What is moved by the values of indices needs them on the host.
  const std::set<std::string> by_values{"gather", "index_select", "scatter_add", "writes"};
  if (!by_values.contains(what)) {
    Tensors alone;
    for (const at::Tensor& t : plain)
      alone.push_back(t.detach().to(got.device()).requires_grad_(t.requires_grad()));
    EXPECT_LE(waits_of(mesh, there, f), waits_of(mesh, alone, f)) << what << ": waits of the host";
  }
  stand_in::set_place("");
}

at::Tensor random(const std::vector<std::int64_t>& shape) { return randn(shape, at::kDouble); }

// What a field goes through in a model: convolutions, pooling, norms, attention.
void compare_fields(Draw& draw, const DeviceMesh& mesh) {
  const std::int64_t h = draw.between(6, 11), w = draw.between(6, 9), n = draw.between(1, 2);
  const int stride = draw.between(1, 2);
  compare("conv2d", draw, mesh, {random({n, 3, h, w}), random({4, 3, 3, 3}), random({4})}, 1,
          [&](const Tensors& t) { return at::conv2d(t[0], t[1], t[2], stride, 1); });
  compare("conv_transpose2d", draw, mesh, {random({n, 3, h, w}), random({3, 2, 3, 3})}, 1,
          [&](const Tensors& t) { return at::conv_transpose2d(t[0], t[1], {}, 2, 1, 1); });
  compare("max_pool2d", draw, mesh, {random({n, 2, h, w})}, 1,
          [&](const Tensors& t) { return at::max_pool2d(t[0], 3, stride, 1); });
  compare("avg_pool2d", draw, mesh, {random({n, 2, h, w})}, 1,
          [&](const Tensors& t) { return at::avg_pool2d(t[0], 2, 2); });
  compare("interpolate", draw, mesh, {random({n, 2, h, w})}, 1,
          [&](const Tensors& t) { return at::upsample_bilinear2d(t[0], {2 * h, w + 3}, false); });
  compare("pad", draw, mesh, {random({n, 2, h, w})}, 1,
          [&](const Tensors& t) { return at::reflection_pad2d(t[0], {2, 1, 1, 2}); });
  compare("group_norm", draw, mesh, {random({n, 4, h, w}), random({4}), random({4})}, 1,
          [&](const Tensors& t) { return at::group_norm(t[0], 2, t[1], t[2]); });
  compare("batch_norm", draw, mesh, {random({3, 4, h}), random({4}), random({4})}, 1,
          [&](const Tensors& t) {
            return at::batch_norm(t[0], t[1], t[2], {}, {}, true, 0.1, 1e-5, false);
          });
  compare("layer_norm", draw, mesh, {random({n, h, 6}), random({6}), random({6})}, 1,
          [&](const Tensors& t) { return at::layer_norm(t[0], {6}, t[1], t[2]); });
  compare("attention", draw, mesh,
          {random({n, 2, h, 4}), random({n, 2, w, 4}), random({n, 2, w, 4})}, 3,
          [&](const Tensors& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2]); });
  const Tensors fields{random({n, h, w, 2, 4}), random({n, h, w, 2, 4}), random({n, h, w, 2, 4})};
  compare("neighborhood_attention", draw, mesh, fields, 3, [&](const Tensors& t) {
    return neighborhood_attention_2d(t[0], t[1], t[2], {3, 3}, {1, 2});
  });
  compare("fft", draw, mesh, {random({n, h, w})}, 1, [&](const Tensors& t) {
    return at::fft_irfft2(at::fft_rfft2(t[0]) * 0.5, std::vector<std::int64_t>{h, w});
  });
}

// What is not a field: products, reductions, indices, scans, joins, writes, losses.
void compare_others(Draw& draw, const DeviceMesh& mesh) {
  const std::int64_t a = draw.between(2, 6), b = draw.between(3, 5), c = draw.between(2, 4);
  const at::Tensor labels = randint(b, {a}), rows = randint(a, {5});
  compare("mm", draw, mesh, {random({a, b}), random({b, c})}, 2,
          [](const Tensors& t) { return at::gelu(t[0].mm(t[1])); });
  compare("linear", draw, mesh, {random({a, b}), random({c, b}), random({c})}, 3,
          [](const Tensors& t) { return at::linear(t[0], t[1], t[2]); });
  compare("softmax", draw, mesh, {random({a, b})}, 1,
          [](const Tensors& t) { return t[0].softmax(0) + t[0].log_softmax(1); });
  compare("cross_entropy", draw, mesh, {random({a, b}), labels}, 2,
          [](const Tensors& t) { return at::cross_entropy_loss(t[0], t[1]); });
  compare("embedding", draw, mesh, {random({a, b}), rows}, 2,
          [](const Tensors& t) { return at::embedding(t[0], t[1]); });
  compare("index_select", draw, mesh, {random({a, b}), rows}, 1,
          [](const Tensors& t) { return t[0].index_select(0, t[1]); });
  compare("gather", draw, mesh, {random({a, b}), randint(a, {c, b})}, 2,
          [](const Tensors& t) { return t[0].gather(0, t[1]); });
  compare("scatter_add", draw, mesh, {random({a, b}), randint(a, {c, b}), random({c, b})}, 3,
          [](const Tensors& t) { return t[0].scatter_add(0, t[1], t[2]); });
  compare("cumsum", draw, mesh, {random({a, b})}, 1,
          [](const Tensors& t) { return t[0].cumsum(0).mul(t[0].cumprod(1)); });
  compare("sort", draw, mesh, {random({a, b})}, 1, [](const Tensors& t) {
    return std::get<0>(t[0].sort(0)) + std::get<0>(t[0].topk(2, 1)).sum();
  });
  compare("statistics", draw, mesh, {random({a, b})}, 1, [](const Tensors& t) {
    return t[0].std(0) + t[0].amax(0) + t[0].norm() + t[0].logsumexp({0}) +
           std::get<0>(t[0].median(0));
  });
  compare("cat", draw, mesh, {random({a, b}), random({c, b})}, 2,
          [](const Tensors& t) { return at::cat({t[0], t[1]}).flip(0).roll(1, 0); });
  compare("views", draw, mesh, {random({a, b, c})}, 1,
          [](const Tensors& t) { return t[0].transpose(0, 2).reshape({-1}).narrow(0, 1, 3); });
  compare("writes", draw, mesh, {random({a, b}), random({b})}, 2, [](const Tensors& t) {
    at::Tensor x = t[0] * 2;
    x.select(0, 1).copy_(t[1]);
    x.slice(1, 0, 2).mul_(3);
    x.masked_fill_(x > 2, 0.5);
    return x;
  });
  compare("einsum", draw, mesh, {random({a, b}), random({b, c}), random({a, c})}, 3,
          [](const Tensors& t) { return at::einsum("ij,jk,ik->i", {t[0], t[1], t[2]}); });
}

void on_meshes(std::uint64_t seeds, const std::function<void(Draw&, const DeviceMesh&)>& body) {
  const std::uint64_t first = round_of_tests() * 100 + 1;
  for (std::uint64_t seed = first; seed < first + seeds; ++seed)
    for (const int ranks : {1, 2, 3}) {
      stand_in::reseed(seed);
      on_devices(ranks, [&](DistributedManager& manager) {
        at::set_num_threads(1);
        test::seed(seed);
        Draw draw(seed * 10 + static_cast<std::uint64_t>(ranks));
        const DeviceMesh mesh = manager.mesh(draw.mesh(ranks));
        set_policies(manager, {.redistribution = Policy::allow});
        body(draw, mesh);
      });
      EXPECT_EQ(take_faults(), "") << "seed " << seed << ", " << ranks << " ranks";
    }
}

}  // namespace

TEST(DeviceTensor, RedistributesAsOnTheCpu) {
  on_meshes(4 * kSeeds, [](Draw& draw, const DeviceMesh& mesh) {
    const at::Tensor value = random({draw.between(1, 7), draw.between(1, 5)});
    at::Tensor t = distribute_tensor(value.to(mesh.manager().device()),
                                     draw.spec(mesh, value.sizes().vec(), false));
    for (int i = 0; i < 5; ++i) {
      t = redistribute(t, draw.spec(mesh, value.sizes().vec(), false));
      EXPECT_EQ(t.device(), mesh.manager().device());
    }
    EXPECT_EQ(difference(here(t), value), 0);
  });
}

TEST(DeviceTensor, FieldsAreWhatTheyAreOnTheCpu) { on_meshes(kSeeds, compare_fields); }
TEST(DeviceTensor, OthersAreWhatTheyAreOnTheCpu) { on_meshes(kSeeds, compare_others); }

}  // namespace tessera::test
