#include "tessera/comm/backends/gloo/gloo.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <exception>
#include <future>
#include <memory>
#include <string_view>

#include "tessera/base/text.h"
#include "tessera/comm/group/types.h"

namespace tessera {
namespace {

// Gloo writes to its sockets without MSG_NOSIGNAL: a peer that is gone would end this process by
// SIGPIPE (Python ignores it, a C++ program does not). The signal goes to the thread that writes,
// so it is held back in this one while it calls Gloo, and in those that Gloo starts meanwhile: they
// inherit the mask.
class HoldBrokenPipe {
 public:
  HoldBrokenPipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~HoldBrokenPipe() {
    if (sigismember(&before_, SIGPIPE)) return;  // the caller's business
    sigset_t pending;
    sigpending(&pending);
    const timespec now{0, 0};
    if (sigismember(&pending, SIGPIPE)) sigtimedwait(&pipe_, nullptr, &now);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  HoldBrokenPipe(const HoldBrokenPipe&) = delete;
  HoldBrokenPipe& operator=(const HoldBrokenPipe&) = delete;

 private:
  sigset_t pipe_, before_;
};

// Gloo's event loop retries at once while another thread holds a connection's lock. Where it shares
// a core with that thread, which is the case for a rank on one core, a loop that preempts a thread
// inside send() keeps the core until the scheduler's next tick, milliseconds later. As a batch
// thread it preempts nobody when it is woken, and gets its share of the core as before. A policy
// that the caller chose is left alone.
std::shared_ptr<gloo::transport::Device> make_device(const std::string& address) {
  const auto make = [&] {
    const sched_param none{};
    if (sched_getscheduler(0) == SCHED_OTHER) sched_setscheduler(0, SCHED_BATCH, &none);
    return c10d::ProcessGroupGloo::createDeviceForHostname(address);
  };
  // The loop inherits the policy of the thread that makes it.
  return std::async(std::launch::async, make).get();
}

class GlooBackend : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;

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
    // Closing connections wakes the peers' calls, but none that is blocked here. A receive that
    // runs out does: Gloo then signals an error to every pair of the context. One on a connection
    // that is broken already fails at once and signals nothing, so the next peer is tried.
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
  static constexpr int kAbortTag = 0x7e55;  // of no message: the group's own tags are small
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout,
                                                    const std::string& address) {
  const HoldBrokenPipe hold;
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(make_device(address));
  return c10::make_intrusive<GlooBackend>(store, rank, size, std::move(options));
}

}  // namespace tessera
