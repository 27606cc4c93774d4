#pragma once
// Which MPI datatype and operation a dtype and a c10d reduce operation correspond to.

#include <ATen/core/Tensor.h>
#include <mpi.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "tessera/comm/group/types.h"

namespace tessera::detail {

/// How one reduction is carried out: multiply each rank's values by `scale`, convert them to
/// `wire`, reduce them by `op` over `per_element` items of `type` for each element, divide by the
/// number of ranks if `average`, and convert back.
struct MpiReduction {
  c10::ScalarType wire = c10::ScalarType::Float;
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op op = MPI_OP_NULL;
  /// 2 where a complex sum is the sum of twice as many reals.
  int per_element = 1;
  bool average = false;
  /// A tensor of one element.
  std::optional<at::Tensor> scale;
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

  std::mutex mutex_;  // guards made_
  std::map<MPI_User_function*, MPI_Op> made_;
};

/// An MPI type for one element whose bytes are moved unread.
MPI_Datatype mpi_bytes_type(std::size_t element_size);

}  // namespace tessera::detail
