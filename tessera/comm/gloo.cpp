#include "tessera/comm/gloo.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <exception>
#include <string_view>

#include "tessera/base/text.h"
#include "tessera/comm/types.h"

namespace tessera {
namespace {

class GlooBackend : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;

  void abort() override {
    // Closing connections wakes the peers' calls, but none that is blocked here. A receive that runs out does: Gloo then signals an error to every pair of
    // the context. One on a connection that is broken already fails at once and signals nothing, so the next peer is tried.
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

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout,
                                                    const std::string& address) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
  return c10::make_intrusive<GlooBackend>(store, rank, size, std::move(options));
}

}  // namespace tessera
