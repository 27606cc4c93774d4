#pragma once
// NCCL as a backend of groups: the one inside libtorch_cuda.so, for CUDA tensors. It lives in a
// library of its own, libtessera_nccl.so, loaded when it is first asked for, so that the rest needs
// no CUDA.

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace c10d {
class Backend;
}

namespace tessera {

/// Number of CUDA devices that the driver shows; 0 without a driver. Does not load
/// libtorch_cuda.so, and does not start CUDA in this process beyond cuInit.
int cuda_device_count();

/// Why make_nccl_backend() cannot work here: no such part in this build, libtessera_nccl.so or a
/// library that it needs is not found, no device. Empty: it can. Loads the libraries on the first
/// call. libtorch looks once for CUDA: a program that has used a random generator before this call
/// may not see it, so programs for GPUs link libtorch_cuda.so themselves, or make their manager
/// first.
std::string nccl_unavailable();

/// What is there of NCCL, whatever devices there are.
struct NcclPart {
  /// libtessera_nccl.so was found.
  bool built = false;
  /// Why it cannot be used: absent, a library that it needs is not found, or it was built for
  /// another NCCL than libtorch's; empty: it can.
  std::string problem;
};
NcclPart nccl_part();

/// Version of the NCCL library in use: "2.28.9". Throws NotAvailable.
std::string nccl_version();

/// Meets the other ranks through `store`, which belongs to this group alone, and connects to them
/// on `device`: at once if the device has an index (which becomes this thread's current device),
/// else at the first call. `timeout` limits that. Throws NotAvailable with nccl_unavailable(),
/// TimeoutError if not all ranks come.
///
/// The result is also a detail::UnevenBackend: uneven all-gather pads where that costs little,
/// broadcasts where one rank holds most, and else sends and receives in one NCCL group. And a
/// detail::ReducingBackend: float and double sums, products, averages, premultiplied sums, and
/// integer reductions go to NCCL; the rest (NaN-propagating min and max, half and bfloat16
/// accumulated in float32) is composed from these by the group.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout,
                                                    c10::Device device = c10::DeviceType::CUDA);

/// Connects a backend that connects on demand to its peers, for `device`, in a thread that is left
/// behind when `timeout` is over. Throws TimeoutError, or what the backend throws.
void connect_within(const c10::intrusive_ptr<c10d::Backend>& backend, c10::Device device,
                    std::chrono::milliseconds timeout);

}  // namespace tessera
