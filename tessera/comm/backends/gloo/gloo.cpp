#include "tessera/comm/backends/gloo/gloo.h"

#include <ATen/ops/empty.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "tessera/base/hash.h"
#include "tessera/base/pinned.h"
#include "tessera/comm/backends/of_c10d.h"
#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/detail/store_meeting.h"
#include "tessera/comm/group/types.h"

namespace tessera {
namespace {

// Gloo writes to its sockets without MSG_NOSIGNAL: a peer that is gone would end this process by
// SIGPIPE (Python ignores it, a C++ program does not). The signal goes to the thread that writes,
// so it is blocked in this thread while it calls Gloo, and in those that Gloo starts meanwhile:
// they inherit the mask.
class HoldBrokenPipe : Pinned {
 public:
  HoldBrokenPipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~HoldBrokenPipe() {
    if (sigismember(&before_, SIGPIPE)) return;  // the caller blocks it
    sigset_t pending;
    sigpending(&pending);
    const timespec now{0, 0};
    if (sigismember(&pending, SIGPIPE)) sigtimedwait(&pipe_, nullptr, &now);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t pipe_, before_;
};

// Gloo's event loop retries at once while another thread holds a connection's lock. If it shares a
// core with that thread, as on a rank with one core, a loop that preempts a thread inside send()
// keeps the core until the scheduler's next tick, milliseconds later. As a batch thread it preempts
// no thread when it is woken, and gets its share of the core as before. A policy that the caller
// chose is kept.
std::shared_ptr<gloo::transport::Device> make_device(const std::string& address) {
  const auto make = [&] {
    const sched_param none{};
    if (sched_getscheduler(0) == SCHED_OTHER) sched_setscheduler(0, SCHED_BATCH, &none);
    return c10d::ProcessGroupGloo::createDeviceForHostname(address);
  };
  // The loop inherits the policy of the thread that makes it.
  return std::async(std::launch::async, make).get();
}

// libtorch before 2.15 records each collective in a map that all groups of the process share,
// without a lock (c10d::FlightRecorder). Ranks that are threads start theirs one after the other;
// to start one takes microseconds.
std::unique_lock<std::recursive_mutex> start_alone() {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
  static std::recursive_mutex recorder;
  return std::unique_lock(recorder);
#else
  return {};
#endif
}

// Gloo matches what ranks send by tags, and ends the process when a rank gets more than it expects.
// A tag that tells the calls apart leaves those that differ unmatched: no rank's memory is touched,
// and they wait until the difference is found. c10d counts the calls by a number of 32 bits, of
// which 8 are enough: a pair of ranks has few calls in progress at a time, and those of one tag
// match in order. The remaining 24 bits are a hash of the call.
class GlooBackend : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// Where the number that stands for the next call is left.
  std::uint64_t* signature() { return &signature_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto alone = begin("broadcast", tensors, options.rootRank);
    return c10d::ProcessGroupGloo::broadcast(tensors, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const auto alone = begin("all_reduce", tensors, options.reduceOp.op_);
    return c10d::ProcessGroupGloo::allreduce(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const auto alone = begin("reduce", tensors, options.rootRank * 256 + options.reduceOp.op_);
    return c10d::ProcessGroupGloo::reduce(tensors, options);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    const auto alone = begin("all_gather", inputs, 0);
    return c10d::ProcessGroupGloo::allgather(outputs, inputs, options);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    const auto alone = begin("all_gather", {input}, 0);
    return c10d::ProcessGroupGloo::_allgather_base(output, input, options);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    const auto alone = begin("gather", inputs, options.rootRank);
    return c10d::ProcessGroupGloo::gather(outputs, inputs, options);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override {
    const auto alone = begin("scatter", outputs, options.rootRank);
    return c10d::ProcessGroupGloo::scatter(outputs, inputs, options);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& to,
                        std::vector<std::int64_t>& from,
                        const c10d::AllToAllOptions& options) override {
    // With sizes, ranks may rightly hold different numbers of elements.
    const auto alone = begin("all_to_all", to.empty() ? Tensors{input} : Tensors{}, 0);
    return c10d::ProcessGroupGloo::alltoall_base(output, input, to, from, options);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    const auto alone = begin("barrier", {}, 0);
    return c10d::ProcessGroupGloo::barrier(options);
  }

  // Messages are written by the caller's thread, collectives by Gloo's own.
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    const HoldBrokenPipe hold;
    return c10d::ProcessGroupGloo::send(tensors, to, tag);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from,
                                      int tag) override {
    const HoldBrokenPipe hold;
    return c10d::ProcessGroupGloo::recv(tensors, from, tag);
  }

  void abort() override {
    // Closing connections wakes the peers' calls, but none that is blocked here. A receive whose
    // time limit runs out does: Gloo then signals an error to every pair of the context. A receive
    // on a connection that is broken already fails at once and signals nothing, so the next peer is
    // tried.
    for (int peer = 0; peer < getSize(); ++peer) {
      if (peer == getRank()) continue;
      std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
      try {
        recv(nothing, peer, kAbortTag)->wait(std::chrono::milliseconds(1));
      } catch (const std::exception& error) {
        if (std::string_view(error.what()).find("imed out") != std::string_view::npos) break;
      }
    }
    for (const auto& context : contexts_) context->closeConnections();
  }

 private:
  // The tag of no message: the group's own tags are smaller, or have bit 30 (call_card.cpp).
  static constexpr int kAbortTag = 0x7e55;

  std::unique_lock<std::recursive_mutex> begin(const char* operation, const Tensors& tensors,
                                               std::int64_t detail) {
    auto call = signature_;
    signature_ = 0;
    if (call == 0) {
      Hash hash;
      hash.text(operation).number(static_cast<std::uint64_t>(detail));
      for (const auto& t : tensors)
        hash.number(static_cast<std::uint64_t>(t.scalar_type()))
            .number(static_cast<std::uint64_t>(t.numel()));
      call = hash.value();
    }
    collectiveCounter_ = number_++ << 24 | static_cast<std::uint32_t>(call & 0xffffff);
    return start_alone();
  }

  std::uint64_t signature_ = 0;
  std::uint32_t number_ = 0;
};

}  // namespace

std::shared_ptr<detail::Transport> make_gloo_transport(const c10::intrusive_ptr<c10d::Store>& store,
                                                       int rank, int size,
                                                       std::chrono::milliseconds timeout,
                                                       const std::string& address) {
  const HoldBrokenPipe hold;
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(make_device(address));
  const auto backend = c10::make_intrusive<GlooBackend>(store, rank, size, std::move(options));
  // A rank that is connected may leave, which would end the connecting of the others.
  detail::agree_at_store(*store, "connected", size, 0, timeout);
  detail::Abilities can;
  can.reduce_scatters = detail::reduces_in_order;  // composed
  can.signs = true;
  // Its own limit starts when one of its threads takes up the call; the group's is the one that
  // counts, so that the error can name the missing ranks.
  can.slack = std::chrono::seconds(2);
  can.may_hang = true;
  return std::make_shared<detail::OfC10d>(backend, timeout, std::move(can), backend->signature());
}

}  // namespace tessera
