#pragma once
// Which MPI datatype and operation a dtype and a reduce operation correspond to.

#include <ATen/core/Tensor.h>
#include <mpi.h>

#include <map>
#include <mutex>

#include "tessera/base/pinned.h"
#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/types.h"

namespace tessera::detail {

/// True for what MPI, and the operations made here, reduce as it is.
bool mpi_reduces(c10::ScalarType dtype, ReduceOp::Kind op);

/// One reduction: `op` over items of `type`.
struct MpiReduction {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op op = MPI_OP_NULL;
};

/// The operations that MPI lacks (NaN-propagating min and max, 16-bit floats, complex products),
/// made on first use and freed with the object.
class MpiReductions : Pinned {
 public:
  ~MpiReductions();

  /// How values of `dtype` are reduced by `op`, or by an operation on bits, which takes integers
  /// and bool.
  MpiReduction plan(c10::ScalarType dtype, ReduceOp::Kind op, Bits bits);

 private:
  MPI_Op make(MPI_User_function* function);
  MPI_Op op_for(ReduceOp::Kind op, c10::ScalarType dtype);

  std::mutex mutex_;  // guards made_
  std::map<MPI_User_function*, MPI_Op> made_;
};

/// An MPI type for one element whose bytes are moved unread.
MPI_Datatype mpi_bytes_type(std::size_t element_size);

}  // namespace tessera::detail
