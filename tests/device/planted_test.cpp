// Faults that are planted, each of which must be found, whatever order of streams is drawn. Each is
// also made rightly, and must then give no complaint.

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdio>
#include <map>
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

/// A fault that may be planted in a few lines of a program.
struct Fault {
  const char* kind;
  std::string what;
  /// Makes the lines, with the fault or rightly, and says whether something complained.
  std::function<bool(bool planted)> complains;
};
using Faults = std::vector<Fault>;

enum class Left { nothing, event, block, event_back };

// Two streams: one makes, the other uses, the first goes on.
bool hand_over(const std::function<at::Tensor(at::Tensor&)>& use, Left left) {
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
  return !take_faults().empty();
}

void plant_events(Faults& all) {
  const std::pair<const char*, Left> ways[] = {{"is not recorded", Left::event},
                                               {"is not waited for", Left::block},
                                               {"back is not waited for", Left::event_back}};
  for (const auto& [what, use] : uses())
    for (const auto& [way, left] : ways)
      all.push_back(
          {"an event", concat("an event ", way, "; the other stream ", what),
           [use, left](bool planted) { return hand_over(use, planted ? left : Left::nothing); }});
}

// Memory is let go while another stream uses it.
void plant_record_stream(Faults& all) {
  for (const auto& [what, use] : uses())
    all.push_back({"`record_stream`", concat("no record_stream; the other stream ", what),
                   [use](bool planted) {
                     const c10::Stream main = streams().getStream(kDevice);
                     const c10::Stream side = streams().getStreamFromGlobalPool(kDevice);
                     {
                       at::Tensor t = at::ones({8}, kThere);
                       c10::Event made(kDevice.type());
                       made.record(main);
                       const c10::StreamGuard on(side);
                       made.block(side);
                       use(t);
                       if (!planted) t.record_stream(side);
                     }
                     const at::Tensor next = at::full({8}, 7, kThere);  // may get the same memory
                     streams().synchronizeStream(side);
                     streams().synchronizeStream(main);
                     return !take_faults().empty();
                   }});
}

// A call on two ranks of which the tensor is used before it is waited for.
using Start = std::function<Request(const Group&, const at::Tensor&)>;
bool used_early(const Start& start, const std::function<at::Tensor(at::Tensor&)>& use,
                bool planted) {
  bool complained = false;
  on_devices(2, [&](DistributedManager& manager) {
    at::Tensor t = at::ones({8}, at::TensorOptions(manager.device()));
    auto request = start(manager.world(), t);
    if (!planted) request.wait();
    use(t);
    request.wait();
    manager.world().barrier();
    streams().synchronizeStream(streams().getStream(manager.device()));
    manager.world().barrier();
    if (manager.rank() == 0) complained = !take_faults().empty();
    manager.world().barrier();
  });
  return complained;
}

void plant_waits(Faults& all) {
  const Start all_reduce = [](const Group& group, const at::Tensor& t) {
    return group.started().all_reduce(t);
  };
  for (const auto& [what, use] : uses())
    all.push_back({"a wait for a collective", concat("all_reduce is not waited for: it ", what),
                   [=, use = use](bool planted) { return used_early(all_reduce, use, planted); }});
  const std::pair<const char*, Start> others[] = {
      {"broadcast",
       [](const Group& group, const at::Tensor& t) { return group.started().broadcast(t, 0); }},
      {"all_gather",
       [](const Group& group, const at::Tensor& t) {
         return group.started().all_gather(t, at::ones({4}, t.options()));
       }},
      {"reduce_scatter",
       [](const Group& group, const at::Tensor& t) {
         return group.started().reduce_scatter(t, at::ones({16}, t.options()));
       }},
      {"all_to_all",
       [](const Group& group, const at::Tensor& t) {
         return group.started().all_to_all(t, at::ones({8}, t.options()));
       }},
      {"receive", [](const Group& group, const at::Tensor& t) {
         const int other = 1 - group.rank();
         return group.started().exchange({{Message::Kind::send, at::ones({8}, t.options()), other},
                                          {Message::Kind::receive, t, other}});
       }}};
  for (const auto& [call, start] : others)
    all.push_back({"a wait for a collective", concat(call, " is not waited for"),
                   [start = start](bool planted) {
                     return used_early(start, [](at::Tensor& t) { return t * 2; }, planted);
                   }});
}

// Copies between host and device that are used before they are over.
void plant_early_hosts(Faults& all) {
  const auto main = [] { return streams().getStream(kDevice); };
  all.push_back(
      {"a wait of the host", "the host reads what a copy has not written", [=](bool planted) {
         stand_in::reseed(1, 1000);
         const stand_in::HeldBack held;
         const at::Tensor t = at::ones({6}, kThere);
         at::Tensor here = at::zeros({6}, at::TensorOptions().pinned_memory(true));
         here.copy_(t, /*non_blocking=*/true);
         if (!planted) streams().synchronizeStream(main());
         const bool right = here.eq(1).all().item<bool>();
         streams().synchronizeStream(main());
         return !right;
       }});
  all.push_back(
      {"a wait of the host", "the host writes what a copy has not read", [=](bool planted) {
         stand_in::reseed(1, 1000);
         const stand_in::HeldBack held;
         at::Tensor here = at::ones({6}).pin_memory();
         const at::Tensor t = here.to(kDevice, /*non_blocking=*/true);
         if (!planted) streams().synchronizeStream(main());
         here.fill_(5);
         return !t.cpu().eq(1).all().item<bool>();
       }});
}

// Copies that shall not block, of memory that makes them.
void plant_unpinned(Faults& all) {
  for (const bool there : {true, false})
    all.push_back({"pinned memory", there ? "to the device" : "from the device", [=](bool planted) {
                     at::Tensor here = at::ones({6}), t = at::ones({6}, kThere);
                     if (!planted) here = here.pin_memory();
                     const auto before = counters().unpinned.load();
                     there ? t.copy_(here, /*non_blocking=*/true)
                           : here.copy_(t, /*non_blocking=*/true);
                     streams().synchronizeStream(streams().getStream(kDevice));
                     return counters().unpinned != before;
                   }});
}

void plant_missing_copies(Faults& all) {
  using Call = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;
  const std::pair<const char*, Call> calls[] = {
      {"add", [](const auto& t, const auto& x) { return t + x; }},
      {"cat", [](const auto& t, const auto& x) { return at::cat({t, x}); }},
      {"where", [](const auto& t, const auto& x) { return at::where(x > 0, t, t); }},
      {"addcmul_", [](const auto& t, const auto& x) { return t.clone().addcmul_(t, x); }},
  };
  for (const auto& [what, call] : calls)
    for (const bool far : {false, true})
      all.push_back({"a copy", concat(what, far ? " of two devices" : " with host memory"),
                     [=, call = call](bool planted) {
                       const at::Tensor t = at::ones({6}, kThere);
                       at::Tensor x = at::ones({6});
                       if (far) x = x.to(stand_in::device(1));
                       if (!planted) x = x.to(kDevice);
                       try {
                         call(t, x);
                         return false;
                       } catch (const c10::Error&) {
                         return true;
                       }
                     }});
}

/// Host code that ends the program; its right form copies first.
const std::vector<std::pair<const char*, std::function<void(const at::Tensor&)>>>& host_reads() {
  static const std::vector<std::pair<const char*, std::function<void(const at::Tensor&)>>> all{
      {"sums",
       [](const at::Tensor& t) {
         const float* data = t.const_data_ptr<float>();
         at::ones({6}).add_(std::accumulate(data, data + 6, 0.0F));
       }},
      {"fills", [](const at::Tensor& t) { std::fill_n(t.mutable_data_ptr<float>(), 6, 0.0F); }},
      {"wraps and sums",
       [](const at::Tensor& t) { at::from_blob(t.mutable_data_ptr(), {6}).sum().item<float>(); }},
      {"wraps and copies",
       [](const at::Tensor& t) { at::zeros({6}).copy_(at::from_blob(t.mutable_data_ptr(), {6})); }},
  };
  return all;
}

// The numbers of docs/gpu.md, printed: docs.devices compares them.
TEST(Planted, EachIsFoundAndItsRightFormIsNot) {
  Faults all;
  plant_events(all);
  plant_record_stream(all);
  plant_waits(all);
  plant_early_hosts(all);
  plant_unpinned(all);
  plant_missing_copies(all);
  std::map<std::string, int> found{{"a host read", static_cast<int>(host_reads().size())}};
  for (const Fault& fault : all) {
    for (const std::uint64_t seed : {1, 2, 3}) {
      stand_in::reseed(seed);
      EXPECT_TRUE(fault.complains(true)) << fault.what << ", order " << seed;
      stand_in::reseed(seed);
      EXPECT_FALSE(fault.complains(false)) << "rightly: " << fault.what << ", order " << seed;
    }
    ++found[fault.kind];
  }
  int sum = 0;
  for (const auto& [kind, number] : found) {
    std::printf("| %s | %d |\n", kind.c_str(), number);
    sum += number;
  }
  EXPECT_GE(sum, 50);
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

TEST(PlantedDeathTest, HostReadsEndTheProgram) {
  const at::Tensor t = at::ones({6}, kThere);
  for (const auto& [what, read] : host_reads()) {
    EXPECT_DEATH(read(t), "a host read or write of memory of the stand-in device") << what;
    read(t.cpu());
  }
}

}  // namespace tessera::test
