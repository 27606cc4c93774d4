#include "tessera/comm/backends/nccl/nccl.h"

#include <dlfcn.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <future>
#include <memory>
#include <thread>

#include "tessera/base/deadline.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/nccl/nccl_part.h"
#include "tessera/comm/group/types.h"
#include "tessera/comm/internal/part.h"

namespace tessera {
namespace {

/// The entry points of libtessera_nccl.so, or the reason why there are none.
struct Part {
  detail::NcclMake make = nullptr;
  detail::NcclVersion version = nullptr;
  std::string problem;
  bool built = false;
};

Part load() {
  const auto loaded = detail::load_part("libtessera_nccl.so");
  Part part;
  part.built = loaded.built;
  if (!loaded.library) {
    part.problem =
        loaded.built
            ? concat(loaded.problem,
                     ". Install what libtorch_cuda.so needs (the dependencies of the torch wheel), "
                     "or set LD_LIBRARY_PATH to it")
            : std::string(
                  "this build of Tessera has no NCCL part: libtessera_nccl.so is not beside "
                  "libtessera.so. Configure with -DTESSERA_NCCL=ON, a CUDA toolkit, nccl.h "
                  "(toolkit "
                  "or the nvidia-nccl wheel), and a libtorch that has libtorch_cuda.so");
    return part;
  }
  part.make = loaded.find<detail::NcclMake>(detail::kNcclMake);
  part.version = loaded.find<detail::NcclVersion>(detail::kNcclVersion);
  const auto problem = loaded.find<detail::NcclProblem>(detail::kNcclProblem);
  part.problem = part.make && part.version && problem
                     ? problem()
                     : "libtessera_nccl.so is of another version of Tessera; build both together";
  return part;
}

const Part& part() {
  // Libraries are loaded once, for the whole process.
  static const Part loaded = load();
  return loaded;
}

}  // namespace

int cuda_device_count() {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (!driver) return 0;
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto count = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  int devices = 0;
  if (!init || !count || init(0) != 0 || count(&devices) != 0) return 0;
  return devices;
}

std::string nccl_unavailable() {
  if (cuda_device_count() == 0)
    return "the CUDA driver shows no device (libcuda.so.1 is missing, or no GPU is visible)";
  return part().problem;
}

NcclPart nccl_part() { return {part().built, part().problem}; }

std::string nccl_version() {
  if (!part().problem.empty()) throw NotAvailable(part().problem);
  return part().version();
}

std::shared_ptr<detail::Transport> make_nccl_transport(const c10::intrusive_ptr<c10d::Store>& store,
                                                       int rank, int size,
                                                       std::chrono::milliseconds timeout,
                                                       c10::Device device) {
  const std::string problem = nccl_unavailable();
  if (!problem.empty()) throw NotAvailable("NCCL: ", problem);
  auto transport = part().make(store, rank, size, timeout, device);
  if (device.has_index()) connect_within(transport->backend(), device, timeout);
  return transport;
}

void connect_within(const c10::intrusive_ptr<c10d::Backend>& backend, c10::Device device,
                    std::chrono::milliseconds timeout) {
  // The thread may outlive this call, and keeps all that it needs.
  auto connected = std::make_shared<std::promise<void>>();
  auto result = connected->get_future();
  std::thread([connected, backend, device] {
    try {
      backend->eagerConnectSingleDevice(device);
      connected->set_value();
    } catch (...) {
      connected->set_exception(std::current_exception());
    }
  }).detach();
  if (result.wait_for(bounded_limit(timeout)) != std::future_status::ready)
    throw TimeoutError(concat("NCCL did not connect the ranks of a group within ", timeout.count(),
                              " ms: a rank did not come, or its network is not reached"),
                       {});
  result.get();
}

}  // namespace tessera
