#pragma once
// --device of benchmarks: the CPU, or "cuda", this rank's GPU. Where that cannot be, the program
// ends with status 77 and the reason in its last line, as a skipped test does.

#include <c10/core/Device.h>
#include <torch/cuda.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/nccl/nccl.h"
#include "tessera/comm/group/types.h"

namespace tessera::bench {

inline constexpr int kSkipped = 77;

inline void add_device(CLI::App& app, std::string& name) {
  app.add_option("--device", name, "cpu, or cuda: GPUs, and NCCL between ranks")
      ->check(CLI::IsMember({"cpu", "cuda"}));
}

/// This rank's device: cuda:(LOCAL_RANK modulo GPUs). Throws NotAvailable where there is none, and
/// where `ranks` of this host would share a GPU that NCCL does not let them share.
inline c10::Device device_of(const std::string& name, int ranks) {
  if (name == "cpu") return c10::kCPU;
  if (!torch::cuda::is_available()) throw NotAvailable("libtorch sees no GPU");
  const int gpus = cuda_device_count();
  if (ranks > 1) {
    if (const auto why = nccl_unavailable(); !why.empty()) throw NotAvailable(why);
    int major = 0, minor = 0;
    std::sscanf(nccl_version().c_str(), "%d.%d", &major, &minor);
    if (ranks > gpus && (major < 2 || (major == 2 && minor < 30)))
      throw NotAvailable(ranks, " ranks, ", gpus, " GPUs, and NCCL ", nccl_version(),
                         " lets no two ranks share one (2.30 does)");
    if (ranks > gpus) setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  }
  const char* local = std::getenv("LOCAL_RANK");
  const int rank = local ? std::atoi(local) : 0;
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(rank % gpus)};
}

/// Waits until the device has done what it was given.
inline void settle(c10::Device device) {
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
}

/// What main() returns: `run`'s status, 77 where a device is absent, 2 for any other error.
inline int guarded(const char* program, const std::function<int()>& run) {
  try {
    return run();
  } catch (const NotAvailable& e) {
    std::printf("%s: skipped: %s\n", program, e.what());
    return kSkipped;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", program, e.what());
    return 2;
  }
}

}  // namespace tessera::bench
