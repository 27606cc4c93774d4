#pragma once
// Which MPI datatype and operation a dtype and a c10d reduce operation correspond to.

#include <ATen/core/Tensor.h>
#include <mpi.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <map>
#include <mutex>

#include "tessera/comm/group/detail/reduction.h"
#include "tessera/comm/group/types.h"

namespace tessera::detail {

/// How one reduction is carried out: as its recipe says, by `op` over items of `type`.
struct MpiReduction {
  Recipe recipe;
  /// Of a premultiplied sum.
  double factor = 1;
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op op = MPI_OP_NULL;
};

/// The operations that MPI lacks (NaN-propagating min and max, 16-bit floats, complex products),
/// made on first use and freed with the object.
class MpiReductions {
 public:
  MpiReductions() = default;
  ~MpiReductions();
  MpiReductions(const MpiReductions&) = delete;
  MpiReductions& operator=(const MpiReductions&) = delete;

  static bool supports(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op);
  /// How values of `dtype` are reduced by `op`. Throws InvalidArgument if the pair makes no sense
  /// (an average of integers, a maximum of complex numbers).
  MpiReduction plan(c10::ScalarType dtype, const c10d::ReduceOp& op);

 private:
  MPI_Op make(MPI_User_function* function);
  MPI_Op op_for(ReduceOp::Kind op, c10::ScalarType dtype);

  std::mutex mutex_;  // guards made_
  std::map<MPI_User_function*, MPI_Op> made_;
};

/// An MPI type for one element whose bytes are moved unread.
MPI_Datatype mpi_bytes_type(std::size_t element_size);

}  // namespace tessera::detail
