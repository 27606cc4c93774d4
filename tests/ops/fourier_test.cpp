// Fourier transforms over sharded dims.

#include "support.h"
#include "tessera/comm/group/trace.h"
#include "tessera/tensor/policy.h"

namespace tessera::test::fourier_test {

namespace {

using Shape = std::vector<std::int64_t>;

}  // namespace

TEST(Fourier, EqualsOneProcess) {
  for (const int ranks : {1, 2, 3, 4}) {
    on_ranks(ranks, [&](DistributedManager& manager) {
      set_policies(manager, {.redistribution = Policy::allow});
      Draw draw(320 + ranks);
      const std::vector<std::string> names = {"fft",   "ifft",  "rfft", "irfft",  "fft2",
                                              "ifft2", "rfft2", "fftn", "irfftn", "hfft"};
      for (int i = 0; i < 60; ++i) {
        const auto mesh = manager.mesh(draw.mesh(ranks));
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

TEST(Fourier, ShortTimesWithWindowsAndCenters) {
  on_ranks(2, [](DistributedManager& manager) {
    set_policies(manager, {.redistribution = Policy::allow});
    const auto mesh = manager.mesh({{"x", 2}});
    test::seed(5);
    const at::Tensor batch = randn({3, 24}, at::kDouble), window = randn({5}, at::kDouble);
    for (const at::Tensor& signal : {batch, batch[0]})
      for (const bool center : {false, true})
        for (const bool given : {false, true})
          for (int cut = 0; cut < signal.dim(); ++cut) {
            // a window of 5 in the middle of 8: one element more behind it than before it
            const auto f = [&](const at::Tensor& t) {
              return at::view_as_real(
                  at::stft(t, 8, 3, 5, given ? std::optional<at::Tensor>(window) : std::nullopt,
                           center, "reflect", false, true, true));
            };
            const at::Tensor plain = signal.clone().requires_grad_(true);
            const at::Tensor x =
                distribute_tensor(signal, mesh, {Shard(cut)}).detach().requires_grad_(true);
            const at::Tensor expected = f(plain), got = f(x);
            ASSERT_TRUE(at::allclose(whole(got), expected.detach(), 1e-12, 1e-12))
                << signal.dim() << " dims, cut along " << cut << ", center " << center;
            expected.square().sum().backward();
            got.square().sum().backward();
            ASSERT_TRUE(at::allclose(whole(x.grad()), plain.grad(), 1e-12, 1e-12));
          }
  });
}

TEST(Fourier, MovesPencils) {
  on_ranks(4, [](DistributedManager& manager) {
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

}  // namespace tessera::test::fourier_test
