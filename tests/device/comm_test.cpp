// Collectives on the stand-in device beside the same on the CPU, on ranks that are threads.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "device.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/of_c10d.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/group/group.h"
#include "transport.h"

namespace tessera::test {

using stand_in::counters;
using stand_in::on_devices;
using stand_in::take_faults;

at::Tensor numbers(int seed, int rank, at::IntArrayRef shape, at::ScalarType dtype) {
  std::int64_t n = 1;
  for (const auto d : shape) n *= d;
  return at::arange(n, at::kDouble)
      .mul(7 + seed)
      .add(11 * rank)
      .fmod(7)
      .sub(3)
      .reshape(shape)
      .to(dtype);
}

// Calls `make` with the CPU's tensors and with the device's, and compares what it returns.
void expect_same(DistributedManager& manager, const std::string& what,
                 const std::function<at::Tensor(c10::Device)>& make) {
  const at::Tensor expected = make(at::kCPU), got = make(manager.device());
  ASSERT_EQ(got.device(), manager.device()) << what;
  EXPECT_TRUE(at::equal(got.cpu(), expected)) << what << "\n" << got.cpu() << expected;
}

TEST(DeviceComm, CollectivesGiveWhatTheCpuGives) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    stand_in::reseed(seed);
    for (const int ranks : {1, 2, 3})
      on_devices(ranks, [&](DistributedManager& manager) {
        const Group group = manager.world();
        const int me = manager.rank();
        Sizes sizes;
        for (int r = 0; r < ranks; ++r) sizes.push_back(r == 1 ? 0 : r + 2);
        std::int64_t all = 0;
        for (const auto n : sizes) all += n;
        for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kLong, at::kBool})
          for (const auto& op : {ReduceOp::sum, ReduceOp::max, ReduceOp::product}) {
            if (dtype == at::kBool && op.kind != ReduceOp::Kind::max) continue;
            const auto where = concat(c10::toString(dtype), " ", ranks, " ranks, seed ", seed);
            expect_same(manager, "all_reduce " + where, [&](c10::Device on) {
              at::Tensor t = numbers(1, me, {3, 4}, dtype).to(on);
              group.all_reduce(t, op);
              return t;
            });
            expect_same(manager, "reduce_scatter " + where, [&](c10::Device on) {
              const at::Tensor in = numbers(2, me, {all, 2}, dtype).to(on);
              at::Tensor out = at::empty({sizes[me], 2}, in.options());
              group.reduce_scatter(out, in, op, sizes);
              return out;
            });
            expect_same(manager, "started " + where, [&](c10::Device on) {
              at::Tensor t = numbers(1, me, {4, 3}, dtype).to(on).t();
              auto request = group.started().all_reduce(t, op);
              at::Tensor other = at::full({50, 50}, 2, at::TensorOptions(on).dtype(at::kDouble));
              for (int i = 0; i < 3; ++i) other = other.mm(other).clamp(-1, 1);
              request.wait();
              return t + other.sum().to(dtype);
            });
          }
        expect_same(manager, "all_gather", [&](c10::Device on) {
          const at::Tensor in = numbers(3, me, {sizes[me], 2}, at::kFloat).to(on);
          at::Tensor out = at::empty({all, 2}, in.options());
          group.all_gather(out, in, sizes);
          return out;
        });
        expect_same(manager, "broadcast", [&](c10::Device on) {
          at::Tensor t = numbers(4, me, {5}, at::kFloat).to(on);
          group.broadcast(t, ranks - 1);
          return t;
        });
        expect_same(manager, "exchange", [&](c10::Device on) {
          const at::Tensor to = numbers(5, me, {3}, at::kFloat).to(on);
          at::Tensor from = at::zeros({3}, to.options());
          if (ranks > 1)
            group.exchange({{Message::Kind::send, to, (me + 1) % ranks},
                            {Message::Kind::receive, from, (me + ranks - 1) % ranks}});
          return from;
        });
      });
    EXPECT_EQ(take_faults(), "") << seed;
  }
}

TEST(DeviceComm, AWaitBlocksTheStreamAndNotTheHost) {
  on_devices(2, [&](DistributedManager& manager) {
    const Group group = manager.world();
    at::Tensor t = at::ones({64}, at::TensorOptions(manager.device()));
    const at::Tensor seen = at::zeros({1});  // of the host, whose messages are beside the device's
    group.barrier();
    const auto before = counters().waits.load();
    if (manager.rank() == 0) {
      // The other rank has not made its call: the host goes on all the same.
      group.all_reduce(t);
      t.mul_(2);
      EXPECT_EQ(counters().waits, before);
      group.send(seen, 1);
      group.barrier();
      EXPECT_TRUE(t.cpu().eq(4).all().item<bool>());
    } else {
      group.receive(seen, 0);
      group.all_reduce(t);
      group.barrier();
    }
  });
  EXPECT_EQ(take_faults(), "");
}

// Ranks whose tensors are on devices of two types are not in one call.
TEST(DeviceComm, TheSignOfACallTellsDevicesApart) {
  class TakesAll : public c10d::Backend {
   public:
    TakesAll() : c10d::Backend(0, 2) {}
    const std::string getBackendName() const override { return "takes all"; }
    c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>&,
                                             const c10d::BroadcastOptions&) override {
      return {};  // nothing is left to wait for
    }
  };
  on_devices(1, [](DistributedManager& manager) {
    std::uint64_t sign = 0;
    detail::GroupSpec spec;
    spec.name = "signed";
    spec.ranks = {0, 1};
    spec.timeout = std::chrono::seconds(20);
    spec.watch = std::make_shared<detail::GroupWatch>(spec.name, spec.ranks, 0, nullptr);
    const auto state = std::make_shared<detail::GroupState>(spec);
    for (const c10::Device on : {c10::Device(at::kCPU), manager.device()})
      state->set_endpoint(
          on, std::make_shared<detail::OfC10d>(c10::make_intrusive<TakesAll>(), spec.timeout,
                                               detail::Abilities(), &sign));
    const Group group(state);
    const auto sign_on = [&](c10::Device on) {
      group.broadcast(at::ones({4}, at::TensorOptions(on)), 0);
      return sign;
    };
    const std::uint64_t here = sign_on(at::kCPU), there = sign_on(manager.device());
    EXPECT_NE(here, there);
    EXPECT_EQ(here, sign_on(at::kCPU)) << "of the next call too";
  });
  EXPECT_EQ(take_faults(), "");
}

}  // namespace tessera::test
