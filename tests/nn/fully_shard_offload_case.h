#pragma once
// Training with shards in host memory, compared with one process: for any device.

#include "fully_shard_case.h"

namespace tessera::test {

inline at::Tensor on_host(const at::Tensor& t) { return whole(t).cpu(); }

// Parameters, gradients and what the optimizer has made lie in host memory, and show the device.
inline void expect_offloaded(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                             c10::Device device, const std::string& where) {
  const auto check = [&](const at::Tensor& t, const char* what) {
    EXPECT_EQ(t.device(), device) << where << " " << what;
    EXPECT_TRUE(to_local(t.detach()).is_cpu()) << where << " " << what;
  };
  for (const at::Tensor& p : module.parameters()) {
    check(p, "parameter");
    if (p.grad().defined()) check(p.grad(), "gradient");
  }
  for (const auto& [of, state] : optimizer.state()) {
    const auto& adam = static_cast<const torch::optim::AdamWParamState&>(*state);
    check(adam.exp_avg(), "moment");
    check(adam.exp_avg_sq(), "moment");
  }
  for (const at::Tensor& b : module.buffers())
    EXPECT_EQ(to_local(b.detach()).device(), device) << where;
}

inline void expect_same_on_host(torch::nn::Module& got, torch::nn::Module& expected,
                                const std::string& where, double bound = 1e-10) {
  const auto all = got.named_parameters();
  for (const auto& item : expected.named_parameters()) {
    const at::Tensor p = all[item.key()];
    EXPECT_LT(difference(on_host(p), on_host(item.value()), 1e-3), bound)
        << where << " " << item.key();
    ASSERT_EQ(p.grad().defined(), item.value().grad().defined()) << where << " " << item.key();
    if (!p.grad().defined()) continue;
    EXPECT_TRUE(spec(p.grad()) == spec(p)) << where << " " << item.key();
    EXPECT_LT(difference(on_host(p.grad()), on_host(item.value().grad()), 1e-3), bound)
        << where << " gradient of " << item.key();
  }
}

inline at::Tensor sharded_on(c10::Device device, Draw& draw, const at::Tensor& x,
                             const DeviceMesh& mesh) {
  const at::Tensor here = sharded(draw, x, mesh);
  return from_local(to_local(here).to(device), spec(here));
}

// `rounds` models, options and steps, as `draw` says.
inline void train_offloaded(Draw& draw, int rounds, c10::Device device,
                            const std::function<DeviceMesh()>& make_mesh) {
  for (int round = 0; round < rounds; ++round) {
    const DeviceMesh mesh = make_mesh();
    const NetImpl::Shape shape{draw.between(1, 6), draw.between(4, 9), draw.between(1, 5),
                               draw.between(1, 4), draw.chance(50)};
    Net net = net_of(shape), expected = net_of(shape);
    for (Net* n : {&net, &expected}) (*n)->register_buffer("mask", torch::ones({2}, at::kDouble));
    const int frozen = draw.chance(30) ? draw.below(shape.blocks) : -1;
    if (frozen >= 0) {
      for (Net* n : {&net, &expected})
        for (auto& p : (*n)->blocks->ptr(frozen)->parameters()) p.set_requires_grad(false);
    }
    FullyShardOptions options{.prefetch = draw.below(3)};
    options.offload = {.to_host = true, .device = device};
    if (draw.chance(40)) options.units = {"blocks.*", "first"};
    const auto& axes = mesh.mesh().axes();
    if (draw.chance(40)) options.axes = {axes.back().name};
    if (draw.chance(30)) {
      options.reshard_after_forward = false;
    } else if (draw.chance(40)) {
      options.reshard_axes = {axes.back().name};
    }
    if (draw.chance(30)) options.reducer.bucket_bytes = options.reducer.first_bucket_bytes = 64;
    fully_shard(*net, mesh, options);
    expect_same_on_host(*net, *expected, "at first");
    const auto adam = torch::optim::AdamWOptions(0.01).eps(1e-3);
    torch::optim::AdamW opt(once(*net), adam), expected_opt(once(*expected), adam);
    for (int step = 0; step < 4; ++step) {
      const std::string where =
          concat("round ", round, " on ", mesh.mesh().to_string(), " step ", step);
      net->twice = expected->twice = draw.chance(25) ? 0 : -1;
      net->skip = expected->skip = draw.chance(20) ? draw.below(shape.blocks) : -1;
      const bool penalty = draw.chance(25);
      opt.zero_grad();
      expected_opt.zero_grad();
      const int parts = draw.between(1, 3);
      for (int part = 0; part < parts; ++part) {
        const at::Tensor x = randn({draw.between(1, 6), shape.in}, at::kDouble);
        at::Tensor wanted = loss_of(expected->forward(x));
        if (penalty) wanted = wanted + 0.1 * expected->last.square().sum();
        wanted.backward();
        const std::optional<NoSync> scope =
            part + 1 < parts && step % 2 == 1 ? std::optional(no_sync(*net)) : std::nullopt;
        at::Tensor loss = loss_of(net->forward(sharded_on(device, draw, x, mesh)));
        if (penalty) loss = loss + 0.1 * net->last.square().sum();
        EXPECT_LT(difference(on_host(loss), wanted.detach()), 1e-10) << where;
        loss.backward();
      }
      expect_same_on_host(*net, *expected, where);
      const double norm = clip_gradients(net->parameters(), mesh.all(), {.max_norm = 0.3});
      EXPECT_NEAR(norm, clip_plainly(once(*expected), 0.3), 1e-9 * (1 + norm)) << where;
      expected_opt.step();
      opt.step();
      expect_offloaded(*net, opt, device, where);
      if (draw.chance(50)) {
        const at::NoGradGuard no_grad;
        const at::Tensor x = randn({3, shape.in}, at::kDouble);
        EXPECT_LT(difference(on_host(net->forward(sharded_on(device, draw, x, mesh))),
                             expected->forward(x)),
                  1e-10)
            << where;
      }
    }
    expect_same_on_host(*net, *expected, concat("round ", round));
  }
}

}  // namespace tessera::test
