#pragma once
// The collectives that are measured, in three ways: through Group, by MPI, by a backend of c10d's.
// All work on buffers of one shape.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/comm/group/group.h"

namespace tessera::bench {

struct Buffers {
  /// float32: [n], [ranks * n], [ranks * n]
  at::Tensor one, many, other;
};
Buffers make_buffers(int ranks, std::int64_t floats, c10::Device device);

/// One way to call the collectives; every call blocks. The root is rank 0.
class Calls {
 public:
  explicit Calls(Buffers b) : b_(std::move(b)) {}
  virtual ~Calls() = default;
  /// one
  virtual void all_reduce() = 0;
  /// one
  virtual void broadcast() = 0;
  /// one
  virtual void reduce() = 0;
  /// one -> many
  virtual void all_gather() = 0;
  /// many -> one
  virtual void reduce_scatter() = 0;
  /// many -> other
  virtual void all_to_all() = 0;
  /// one -> many
  virtual void gather() = 0;
  /// many -> one
  virtual void scatter() = 0;
  /// one
  virtual void send(int to) = 0;
  virtual void receive(int from) = 0;
  virtual void barrier() = 0;

 protected:
  Buffers b_;
};

std::unique_ptr<Calls> group_calls(const Group& group, Buffers buffers);
/// Libraries called directly, on MPI_COMM_WORLD, or on a backend that nothing else uses.
std::unique_ptr<Calls> mpi_calls(int rank, Buffers buffers);
std::unique_ptr<Calls> c10d_calls(const c10::intrusive_ptr<c10d::Backend>& backend,
                                  Buffers buffers);

}  // namespace tessera::bench
