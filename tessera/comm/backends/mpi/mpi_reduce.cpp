#include "tessera/comm/backends/mpi/mpi_reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <functional>
#include <utility>

#include "tessera/comm/backends/mpi/mpi_context.h"

namespace tessera::detail {
namespace {

// `a` unless `b` is larger (smaller) or NaN, or `a` is NaN; two NaNs give one of them. As
// at::maximum and at::minimum.
template <class T, class Wins>
void nan_extreme(void* in, void* inout, int* count, MPI_Datatype*) {
  const T* __restrict a = static_cast<const T*>(in);
  T* __restrict b = static_cast<T*>(inout);
  for (int i = 0; i < *count; ++i) b[i] = (Wins()(a[i], b[i]) || a[i] != a[i]) ? a[i] : b[i];
}

template <class T>
void multiply(void* in, void* inout, int* count, MPI_Datatype*) {
  const T* a = static_cast<const T*>(in);
  T* b = static_cast<T*>(inout);
  for (int i = 0; i < *count; ++i) b[i] = a[i] * b[i];
}

struct Native {
  MPI_Datatype type;
  MPI_User_function* max = nullptr;  // null: MPI_MAX is used
  MPI_User_function* min = nullptr;
};

template <class T>
Native floating(MPI_Datatype type) {
  return {type, nan_extreme<T, std::greater<T>>, nan_extreme<T, std::less<T>>};
}

/// MPI's type for a dtype; null if MPI has none.
Native native(c10::ScalarType dtype) {
  using Type = c10::ScalarType;
  static const std::pair<Type, Native> kNatives[] = {
      {Type::Float, floating<float>(MPI_FLOAT)},
      {Type::Double, floating<double>(MPI_DOUBLE)},
      {Type::Char, {MPI_INT8_T}},
      {Type::Short, {MPI_INT16_T}},
      {Type::Int, {MPI_INT32_T}},
      {Type::Long, {MPI_INT64_T}},
      {Type::Byte, {MPI_UINT8_T}},
      {Type::Bool, {MPI_UINT8_T}},
      {Type::UInt16, {MPI_UINT16_T}},
      {Type::UInt32, {MPI_UINT32_T}},
      {Type::UInt64, {MPI_UINT64_T}},
      // 16 bits as MPI sees them; sums and products of these travel as float32.
      {Type::Half, floating<c10::Half>(MPI_UINT16_T)},
      {Type::BFloat16, floating<c10::BFloat16>(MPI_UINT16_T)}};
  for (const auto& [type, native] : kNatives)
    if (type == dtype) return native;
  return {MPI_DATATYPE_NULL};
}

}  // namespace

bool mpi_reduces(c10::ScalarType dtype, ReduceOp::Kind op) {
  using Kind = ReduceOp::Kind;
  if (op == Kind::avg || op == Kind::premultiplied) return false;
  if (dtype == c10::ScalarType::ComplexFloat || dtype == c10::ScalarType::ComplexDouble)
    return op == Kind::product;
  const bool ordered = op == Kind::min || op == Kind::max;
  return native(dtype).type != MPI_DATATYPE_NULL && (ordered || !c10::isReducedFloatingType(dtype));
}

MPI_Datatype mpi_bytes_type(std::size_t element_size) {
  switch (element_size) {
    case 2:
      return MPI_UINT16_T;
    case 4:
      return MPI_UINT32_T;
    case 8:
      return MPI_UINT64_T;
    case 16:
      return MPI_C_DOUBLE_COMPLEX;
    case 1:
      return MPI_BYTE;
    default:
      throw InvalidArgument("MPI groups move elements of 1, 2, 4, 8 or 16 bytes, not of ",
                            element_size);
  }
}

MpiReductions::~MpiReductions() {
  if (mpi_flag(MPI_Finalized)) return;
  for (auto& [function, op] : made_) MPI_Op_free(&op);
}

MPI_Op MpiReductions::make(MPI_User_function* function) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = made_.find(function);
  if (found != made_.end()) return found->second;
  MPI_Op op = MPI_OP_NULL;
  check_mpi(MPI_Op_create(function, 1, &op), "MPI_Op_create");
  made_.emplace(function, op);
  return op;
}

MPI_Op MpiReductions::op_for(ReduceOp::Kind op, c10::ScalarType dtype) {
  if (dtype == c10::ScalarType::Bool)  // or, and
    return op == ReduceOp::Kind::sum || op == ReduceOp::Kind::max ? MPI_MAX : MPI_MIN;
  switch (op) {
    case ReduceOp::Kind::product:
      if (dtype == c10::ScalarType::ComplexDouble) return make(multiply<c10::complex<double>>);
      if (dtype == c10::ScalarType::ComplexFloat) return make(multiply<c10::complex<float>>);
      return MPI_PROD;
    case ReduceOp::Kind::max:
      return native(dtype).max ? make(native(dtype).max) : MPI_MAX;
    case ReduceOp::Kind::min:
      return native(dtype).min ? make(native(dtype).min) : MPI_MIN;
    default:
      return MPI_SUM;
  }
}

MpiReduction MpiReductions::plan(c10::ScalarType dtype, ReduceOp::Kind op, Bits bits) {
  const MPI_Datatype type = dtype == c10::ScalarType::ComplexDouble  ? MPI_C_DOUBLE_COMPLEX
                            : dtype == c10::ScalarType::ComplexFloat ? MPI_C_FLOAT_COMPLEX
                                                                     : native(dtype).type;
  return {type, bits == Bits::bit_and   ? MPI_BAND
                : bits == Bits::bit_or  ? MPI_BOR
                : bits == Bits::bit_xor ? MPI_BXOR
                                        : op_for(op, dtype)};
}

}  // namespace tessera::detail
