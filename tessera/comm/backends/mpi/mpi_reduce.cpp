#include "tessera/comm/backends/mpi/mpi_reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include "tessera/comm/backends/mpi/mpi_context.h"

namespace tessera::detail {
namespace {

// `a` unless `b` is larger (smaller) or NaN, or `a` is NaN; two NaNs give one of them. As
// at::maximum and at::minimum.
template <class T>
void nan_max(void* in, void* inout, int* count, MPI_Datatype*) {
  const T* __restrict a = static_cast<const T*>(in);
  T* __restrict b = static_cast<T*>(inout);
  for (int i = 0; i < *count; ++i) b[i] = (a[i] > b[i] || a[i] != a[i]) ? a[i] : b[i];
}

template <class T>
void nan_min(void* in, void* inout, int* count, MPI_Datatype*) {
  const T* __restrict a = static_cast<const T*>(in);
  T* __restrict b = static_cast<T*>(inout);
  for (int i = 0; i < *count; ++i) b[i] = (a[i] < b[i] || a[i] != a[i]) ? a[i] : b[i];
}

template <class T>
void multiply(void* in, void* inout, int* count, MPI_Datatype*) {
  const T* a = static_cast<const T*>(in);
  T* b = static_cast<T*>(inout);
  for (int i = 0; i < *count; ++i) b[i] = a[i] * b[i];
}

struct Native {
  MPI_Datatype type;
  MPI_User_function* max;  // null: MPI_MAX is used
  MPI_User_function* min;
};

/// MPI's type for a dtype; null if MPI has none.
Native native(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return {MPI_FLOAT, nan_max<float>, nan_min<float>};
    case c10::ScalarType::Double:
      return {MPI_DOUBLE, nan_max<double>, nan_min<double>};
    case c10::ScalarType::Char:
      return {MPI_INT8_T, nullptr, nullptr};
    case c10::ScalarType::Short:
      return {MPI_INT16_T, nullptr, nullptr};
    case c10::ScalarType::Int:
      return {MPI_INT32_T, nullptr, nullptr};
    case c10::ScalarType::Long:
      return {MPI_INT64_T, nullptr, nullptr};
    case c10::ScalarType::Byte:
    case c10::ScalarType::Bool:
      return {MPI_UINT8_T, nullptr, nullptr};
    case c10::ScalarType::UInt16:
      return {MPI_UINT16_T, nullptr, nullptr};
    case c10::ScalarType::UInt32:
      return {MPI_UINT32_T, nullptr, nullptr};
    case c10::ScalarType::UInt64:
      return {MPI_UINT64_T, nullptr, nullptr};
    // 16 bits as MPI sees them; sums and products of these travel as float32.
    case c10::ScalarType::Half:
      return {MPI_UINT16_T, nan_max<c10::Half>, nan_min<c10::Half>};
    case c10::ScalarType::BFloat16:
      return {MPI_UINT16_T, nan_max<c10::BFloat16>, nan_min<c10::BFloat16>};
    default:
      return {MPI_DATATYPE_NULL, nullptr, nullptr};
  }
}

bool is_16bit_float(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Half || dtype == c10::ScalarType::BFloat16;
}

bool is_mpi_complex(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::ComplexFloat || dtype == c10::ScalarType::ComplexDouble;
}

}  // namespace

bool mpi_reduces(c10::ScalarType dtype, ReduceOp::Kind op) {
  using Kind = ReduceOp::Kind;
  if (op == Kind::avg || op == Kind::premultiplied) return false;
  if (is_mpi_complex(dtype)) return op == Kind::product;
  const bool ordered = op == Kind::min || op == Kind::max;
  return native(dtype).type != MPI_DATATYPE_NULL && (ordered || !is_16bit_float(dtype));
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
  switch (bits) {
    case Bits::bit_and:
      return {type, MPI_BAND};
    case Bits::bit_or:
      return {type, MPI_BOR};
    case Bits::bit_xor:
      return {type, MPI_BXOR};
    case Bits::none:
      break;
  }
  return {type, op_for(op, dtype)};
}

}  // namespace tessera::detail
