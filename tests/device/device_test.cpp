// The stand-in device itself: its operators beside the CPU's, its order, its memory.

#include "device.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "transport.h"

namespace tessera::test {

using stand_in::counters;
using stand_in::kDevice;
using stand_in::take_faults;

const at::TensorOptions kHere = at::TensorOptions(kDevice);

TEST(Device, DiffersFromTheCpu) {
  const at::Tensor a = at::ones({2}).to(kDevice);
  EXPECT_TRUE(at::isnan(at::empty({3}, kHere)).cpu().all().item<bool>());
  EXPECT_ANY_THROW(a + at::ones({2}));
  EXPECT_TRUE((a + 1).cpu().equal(at::full({2}, 2.0F)));
  EXPECT_EQ(at::empty({3}, kHere.device(stand_in::device(2))).device().index(), 2);
  EXPECT_EQ(take_faults(), "");
}

TEST(DeviceDeathTest, EndsWhereTheHostReadsItsMemory) {
  GTEST_FLAG_SET(death_test_style, "fast");
  const at::Tensor a = at::ones({2}, kHere);
  EXPECT_DEATH(static_cast<void>(*static_cast<volatile const float*>(a.const_data_ptr<float>())),
               "a host read or write of memory of the stand-in device");
  EXPECT_DEATH(*static_cast<volatile float*>(a.mutable_data_ptr<float>()) = 1,
               "a host read or write of memory of the stand-in device");
}

// The same calls on both devices, forward and backward.
void expect_same(const char* name, const std::vector<at::Tensor>& inputs,
                 const std::function<at::Tensor(const std::vector<at::Tensor>&)>& f) {
  stand_in::set_place(name);
  std::vector<at::Tensor> results[2], gradients[2];
  for (const int there : {0, 1}) {
    std::vector<at::Tensor> own;
    for (const at::Tensor& t : inputs)
      own.push_back(t.to(there ? kDevice : at::kCPU, t.scalar_type(), false, /*copy=*/true)
                        .requires_grad_(t.is_floating_point()));
    const at::Tensor made = f(own);
    if (made.requires_grad()) (made * made).sum().backward();
    results[there].push_back(made.detach().cpu());
    for (const at::Tensor& t : own)
      gradients[there].push_back(t.grad().defined() ? t.grad().cpu() : at::Tensor());
  }
  EXPECT_TRUE(at::allclose(results[1][0], results[0][0], 1e-10, 1e-12, true)) << name;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_EQ(gradients[0][i].defined(), gradients[1][i].defined()) << name;
    if (!gradients[0][i].defined()) continue;
    EXPECT_TRUE(at::allclose(gradients[1][i], gradients[0][i], 1e-10, 1e-12, true)) << name;
  }
  EXPECT_EQ(take_faults(), "") << name;
}

TEST(Device, OperatorsGiveWhatTheCpuGives) {
  using In = const std::vector<at::Tensor>&;
  const auto draw = [](at::IntArrayRef s) { return at::randn(s, at::kDouble); };
  const at::Tensor index = at::tensor({2, 0, 1, 2}, at::kLong);
  for (const std::uint64_t seed : {1, 2, 3}) {
    stand_in::reseed(seed);
    torch::manual_seed(static_cast<std::int64_t>(seed));
    expect_same("add", {draw({3, 4}), draw({4})}, [](In x) { return x[0] + 2 * x[1]; });
    expect_same("mm", {draw({3, 4}), draw({4, 2})}, [](In x) { return x[0].mm(x[1]).relu(); });
    expect_same("conv2d", {draw({2, 3, 6, 5}), draw({4, 3, 3, 3}), draw({4})},
                [](In x) { return at::conv2d(x[0], x[1], x[2], 1, 1); });
    expect_same("layer_norm", {draw({3, 4}), draw({4}), draw({4})},
                [](In x) { return at::layer_norm(x[0], {4}, x[1], x[2]); });
    expect_same("batch_norm", {draw({5, 3}), draw({3}), draw({3})}, [](In x) {
      return at::batch_norm(x[0], x[1], x[2], {}, {}, true, 0.1, 1e-5, false);
    });
    expect_same("index", {draw({3, 4}), index}, [](In x) { return x[0].index({x[1]}); });
    expect_same("mask", {draw({3, 4})}, [](In x) { return x[0].index({x[0] > 0}); });
    expect_same("index_put", {draw({3, 4}), draw({4, 4}), index},
                [](In x) { return x[0].clone().index_put({x[2]}, x[1], true); });
    expect_same("softmax", {draw({3, 4})}, [](In x) { return x[0].t().softmax(0); });
    expect_same("attention", {draw({2, 2, 3, 4}), draw({2, 2, 5, 4}), draw({2, 2, 5, 4})},
                [](In x) { return at::scaled_dot_product_attention(x[0], x[1], x[2]); });
    expect_same("cat", {draw({3, 4}), draw({2, 4})}, [](In x) { return at::cat({x[0], x[1]}); });
    expect_same("slices", {draw({5, 4})}, [](In x) {
      at::Tensor y = x[0].clone();
      y.slice(0, 1, 3).mul_(2);
      y.select(1, 2).add_(y.select(1, 0));
      return y.flip(0).transpose(0, 1).contiguous();
    });
    expect_same("fft", {draw({4, 6})}, [](In x) { return at::fft_irfft(at::fft_rfft(x[0]) * 2); });
    expect_same("max_pool", {draw({1, 2, 6, 6})},
                [](In x) { return at::max_pool2d(x[0], 3, 2, 1); });
    expect_same("embedding", {draw({3, 4}), index}, [](In x) { return at::embedding(x[0], x[1]); });
    expect_same("cross_entropy", {draw({4, 3}), index},
                [](In x) { return at::cross_entropy_loss(x[0], x[1]); });
    expect_same("sort", {draw({7})}, [](In x) { return std::get<0>(x[0].sort()).cumsum(0); });
    expect_same("out", {draw({3, 4})}, [](In x) {
      at::Tensor out = at::empty({0}, x[0].options());
      at::mul_out(out, x[0].detach(), x[0].detach());
      return out + x[0];
    });
    expect_same("foreach", {draw({3}), draw({4})}, [](In x) {
      const auto all = at::_foreach_mul({x[0], x[1]}, 2.0);
      return all[0].sum() + all[1].sum();
    });
  }
}

TEST(Device, StreamsAreLateAndEventsOrderThem) {
  const c10::impl::VirtualGuardImpl guard(kDevice.type());
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    stand_in::reseed(seed, 1000);
    const c10::Stream side = guard.getStreamFromGlobalPool(kDevice);
    at::Tensor a = at::zeros({64}, kHere);
    for (int i = 0; i < 30; ++i) a.add_(1);
    c10::Event event(kDevice.type()), back(kDevice.type());
    event.record(guard.getStream(kDevice));
    at::Tensor b;
    {
      const c10::StreamGuard on(side);
      event.block(side);
      b = a * 2;
      back.record(side);
    }
    back.block(guard.getStream(kDevice));
    b.record_stream(guard.getStream(kDevice));
    EXPECT_TRUE((b + 1).cpu().eq(61).all().item<bool>()) << seed;
    EXPECT_EQ(take_faults(), "") << seed;
  }
}

TEST(Device, MemoryIsHandedOnAtOnceAndHoldsNaN) {
  const void* first = nullptr;
  {
    const at::Tensor a = at::ones({100}, kHere);
    first = a.const_data_ptr();
  }
  const at::Tensor b = at::empty({100}, kHere);
  EXPECT_EQ(b.const_data_ptr(), first);
  EXPECT_TRUE(b.isnan().all().item<bool>());
}

TEST(Device, PinnedCopiesAreLate) {
  const at::Tensor pinned = at::ones({5}).pin_memory();
  EXPECT_TRUE(pinned.is_pinned());
  const auto waits = counters().waits.load();
  const stand_in::HeldBack held;
  at::Tensor a = pinned.to(kDevice, /*non_blocking=*/true);
  at::Tensor back = at::empty({5}, at::TensorOptions().pinned_memory(true));
  back.copy_(a + 1, /*non_blocking=*/true);
  EXPECT_TRUE(back.isnan().all().item<bool>()) << "too early";
  EXPECT_EQ(counters().waits, waits);
  c10::impl::VirtualGuardImpl(kDevice.type())
      .synchronizeStream(c10::impl::VirtualGuardImpl(kDevice.type()).getStream(kDevice));
  EXPECT_TRUE(back.eq(2).all().item<bool>());
  EXPECT_EQ(take_faults(), "");
}

TEST(Device, ModelsTrainAsOnTheCpu) {
  std::vector<at::Tensor> losses;
  for (const int there : {0, 1}) {
    torch::manual_seed(3);
    torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::GELU(), torch::nn::Linear(8, 2));
    net->to(at::kDouble);
    const at::Tensor x = at::randn({5, 6}, at::kDouble);
    if (there) net->to(kDevice);
    torch::optim::AdamW opt(net->parameters(), 0.01);
    at::Tensor loss;
    for (int step = 0; step < 4; ++step) {
      opt.zero_grad();
      loss = net->forward(x.to(there ? kDevice : at::kCPU)).square().mean();
      loss.backward();
      opt.step();
    }
    losses.push_back(loss.detach().cpu());
  }
  EXPECT_TRUE(at::allclose(losses[1], losses[0], 1e-10));
  EXPECT_EQ(take_faults(), "");
}

}  // namespace tessera::test
