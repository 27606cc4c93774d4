#pragma once
// NCCL as a transport of groups, for CUDA tensors: the one inside libtorch_cuda.so. The code that
// uses it is in a library of its own, libtessera_nccl.so, loaded on first use, so that the rest
// needs no CUDA.

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>

namespace c10d {
class Backend;
}

namespace tessera {

namespace detail {
class Transport;
}

/// Number of CUDA devices that the driver shows; 0 without a driver. Does not load
/// libtorch_cuda.so, and does not start CUDA in this process beyond cuInit.
int cuda_device_count();

/// Says why make_nccl_transport() cannot work here (this build lacks the part, libtessera_nccl.so
/// or a library that it needs is not found, no device); empty if it can. Loads the libraries on the
/// first call. libtorch looks for CUDA only once: a program that has used a random generator before
/// this call may not see it, so programs for GPUs link libtorch_cuda.so themselves, or make their
/// manager first.
std::string nccl_unavailable();

/// Which part of NCCL is present, whatever devices there are.
struct NcclPart {
  /// libtessera_nccl.so was found.
  bool built = false;
  /// Why it cannot be used: absent, a library that it needs is not found, or it was built for
  /// another NCCL than libtorch's; empty if it can.
  std::string problem;
};
NcclPart nccl_part();

/// Version of the NCCL library in use: "2.28.9". Throws NotAvailable.
std::string nccl_version();

/// Meets the other ranks through `store`, which belongs to this group alone, and connects to them
/// on `device`: at once if the device has an index (it becomes this thread's current device), else
/// in the first call. `timeout` limits that. Throws NotAvailable with nccl_unavailable(), and
/// TimeoutError if not all ranks come.
///
/// An uneven all-gather pads where that costs little,
/// broadcasts where one rank holds most, and otherwise sends and receives in one NCCL group. Sums,
/// products, averages and premultiplied sums of float and double, and integer reductions, are
/// NCCL's; the group composes the rest from these (NaN-propagating min and max, half and bfloat16
/// accumulated in float32).
std::shared_ptr<detail::Transport> make_nccl_transport(const c10::intrusive_ptr<c10d::Store>& store,
                                                       int rank, int size,
                                                       std::chrono::milliseconds timeout,
                                                       c10::Device device = c10::DeviceType::CUDA);

/// Connects a backend that connects on demand to its peers, for `device`, in a thread that is left
/// behind when `timeout` is over. Throws TimeoutError, or what the backend throws.
void connect_within(const c10::intrusive_ptr<c10d::Backend>& backend, c10::Device device,
                    std::chrono::milliseconds timeout);

}  // namespace tessera
