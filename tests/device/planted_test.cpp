// Faults that are planted, each of which must be found, whatever order of streams is drawn. Each is
// also made rightly, and must then give no complaint.

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>

#include "device.h"
#include "tessera/base/text.h"
#include "transport.h"

namespace tessera::test {

using stand_in::counters;
using stand_in::kDevice;
using stand_in::on_devices;
using stand_in::take_faults;

const at::TensorOptions kThere = at::TensorOptions(kDevice);

c10::impl::VirtualGuardImpl streams() { return c10::impl::VirtualGuardImpl(kDevice.type()); }

// What another stream does with memory that the first one made.
const std::vector<std::pair<const char*, std::function<at::Tensor(at::Tensor&)>>>& uses() {
  static const std::vector<std::pair<const char*, std::function<at::Tensor(at::Tensor&)>>> all{
      {"reads", [](at::Tensor& t) { return t * 2; }},
      {"reduces", [](at::Tensor& t) { return t.sum(); }},
      {"writes", [](at::Tensor& t) { return t.add_(1); }},
      {"fills", [](at::Tensor& t) { return t.zero_(); }},
      {"copies", [](at::Tensor& t) { return t.clone(); }},
      {"reads a slice", [](at::Tensor& t) { return t.narrow(0, 2, 5) + 1; }},
      {"writes a slice", [](at::Tensor& t) { return t.narrow(0, 2, 5).mul_(3); }},
  };
  return all;
}

enum class Left { nothing, event, block, event_back };

// Two streams: one makes, the other uses, the first goes on.
void hand_over(const std::function<at::Tensor(at::Tensor&)>& use, Left left) {
  const c10::Stream main = streams().getStream(kDevice);
  const c10::Stream side = streams().getStreamFromGlobalPool(kDevice);
  at::Tensor t = at::ones({8}, kThere);
  c10::Event made(kDevice.type()), used(kDevice.type());
  if (left != Left::event) made.record(main);
  {
    const c10::StreamGuard on(side);
    if (left != Left::block && left != Left::event) made.block(side);
    const at::Tensor result = use(t);
    used.record(side);
  }
  if (left != Left::event_back) used.block(main);
  t.add_(1);
  streams().synchronizeStream(main);
  streams().synchronizeStream(side);
}

TEST(Planted, MissingEventsAreFound) {
  int found = 0;
  for (const std::uint64_t seed : {1, 2, 3})
    for (const auto& [what, use] : uses())
      for (const Left left : {Left::nothing, Left::event, Left::block, Left::event_back}) {
        stand_in::reseed(seed);
        hand_over(use, left);
        const std::string faults = take_faults();
        EXPECT_EQ(faults.empty(), left == Left::nothing)
            << what << ", left out " << static_cast<int>(left) << ": " << faults;
        found += !faults.empty();
      }
  EXPECT_EQ(found, 3 * 3 * static_cast<int>(uses().size()));
}

TEST(Planted, AMissingRecordStreamIsFound) {
  for (const bool recorded : {true, false})
    for (const auto& [what, use] : uses()) {
      const c10::Stream main = streams().getStream(kDevice);
      const c10::Stream side = streams().getStreamFromGlobalPool(kDevice);
      {
        at::Tensor t = at::ones({8}, kThere);
        c10::Event made(kDevice.type());
        made.record(main);
        const c10::StreamGuard on(side);
        made.block(side);
        use(t);
        if (recorded) t.record_stream(side);
      }
      const at::Tensor next = at::full({8}, 7, kThere);  // may get the same memory
      streams().synchronizeStream(side);
      streams().synchronizeStream(main);
      EXPECT_EQ(take_faults().empty(), recorded) << what;
    }
}

TEST(Planted, AMissingWaitForACollectiveIsFound) {
  for (const auto& [what, use] : uses())
    for (const bool waits : {true, false})
      on_devices(2, [&](DistributedManager& manager) {
        at::Tensor t = at::ones({8}, at::TensorOptions(manager.device()));
        auto request = manager.world().started().all_reduce(t);
        if (waits) request.wait();
        use(t);
        request.wait();
        manager.world().barrier();
        streams().synchronizeStream(streams().getStream(manager.device()));
        manager.world().barrier();
        if (manager.rank() == 0) {
          EXPECT_EQ(take_faults().empty(), waits) << what;
        }
        manager.world().barrier();
      });
}

TEST(Planted, AHostThatReadsTooEarlyGetsNoValue) {
  for (const bool waits : {true, false}) {
    stand_in::reseed(1, 1000);
    const stand_in::HeldBack held;
    const at::Tensor t = at::ones({6}, kThere);
    at::Tensor here = at::zeros({6}, at::TensorOptions().pinned_memory(true));
    here.copy_(t, /*non_blocking=*/true);
    if (waits) streams().synchronizeStream(streams().getStream(kDevice));
    EXPECT_EQ(here.eq(1).all().item<bool>(), waits);
    streams().synchronizeStream(streams().getStream(kDevice));
  }
}

TEST(Planted, AHostThatWritesTooEarlyIsSeen) {
  for (const bool waits : {true, false}) {
    stand_in::reseed(1, 1000);
    const stand_in::HeldBack held;
    at::Tensor here = at::ones({6}).pin_memory();
    const at::Tensor t = here.to(kDevice, /*non_blocking=*/true);
    if (waits) streams().synchronizeStream(streams().getStream(kDevice));
    here.fill_(5);
    EXPECT_EQ(t.cpu().eq(1).all().item<bool>(), waits);
  }
}

TEST(Planted, CopiesOfMemoryThatIsNotPinnedAreCounted) {
  for (const bool pinned : {true, false}) {
    const auto before = counters().unpinned.load();
    at::Tensor here = at::ones({6});
    if (pinned) here = here.pin_memory();
    const at::Tensor t = here.to(kDevice, /*non_blocking=*/true);
    here.copy_(t, /*non_blocking=*/true);
    EXPECT_EQ(counters().unpinned - before, pinned ? 0 : 2);
  }
}

TEST(Planted, WaitsOfTheHostAreCounted) {
  const at::Tensor t = at::ones({6}, kThere);
  const std::vector<std::pair<const char*, std::function<void()>>> all{
      {"item", [&] { t.sum().item(); }},
      {"cpu", [&] { t.cpu(); }},
      {"to a device", [&] { at::ones({3}).to(kDevice); }},
      {"nonzero", [&] { t.nonzero(); }},
      {"mask", [&] { t.masked_select(t > 0); }},
      {"equal", [&] { at::equal(t, t); }},
      {"synchronize", [&] { streams().synchronizeStream(streams().getStream(kDevice)); }},
  };
  for (const auto& [what, make] : all) {
    const auto before = counters().waits.load();
    make();
    EXPECT_EQ(counters().waits - before, 1) << what;
  }
  const auto before = counters().waits.load();
  at::Tensor u = (t + 1).mul_(2).sum() * t.mean();
  u = at::where(u > 0, u, at::zeros_like(u));
  EXPECT_EQ(counters().waits, before);
}

TEST(Planted, TensorsOnTheWrongDeviceAreRefused) {
  const at::Tensor t = at::ones({6}, kThere), other = at::ones({6}),
                   far = at::ones({6}, kThere.device(stand_in::device(1)));
  for (const at::Tensor& x : {other, far}) {
    EXPECT_ANY_THROW(t + x);
    EXPECT_ANY_THROW(at::cat({t, x}));
    EXPECT_ANY_THROW(at::where(x > 0, t, t));
    EXPECT_ANY_THROW(t.clone().addcmul_(t, x));
  }
}

TEST(PlantedDeathTest, HostReadsEndTheProgram) {
  const at::Tensor t = at::ones({6}, kThere);
  const char* text = "a host read or write of memory of the stand-in device";
  EXPECT_DEATH(at::ones({6}).add_(
                   std::accumulate(t.const_data_ptr<float>(), t.const_data_ptr<float>() + 6, 0.0F)),
               text);
  EXPECT_DEATH(std::fill_n(t.mutable_data_ptr<float>(), 6, 0.0F), text);
  EXPECT_DEATH(at::from_blob(t.mutable_data_ptr(), {6}).sum().item<float>(), text);
  EXPECT_DEATH(at::zeros({6}).copy_(at::from_blob(t.mutable_data_ptr(), {6})), text);
}

}  // namespace tessera::test
