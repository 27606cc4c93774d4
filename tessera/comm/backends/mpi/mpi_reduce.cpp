#include "tessera/comm/backends/mpi/mpi_reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <cmath>

#include "tessera/base/text.h"
#include "tessera/comm/backends/mpi/mpi_context.h"

namespace tessera::detail {

namespace {

using Op = c10d::ReduceOp;

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

const char* op_name(Op::RedOpType op) {
  switch (op) {
    case Op::SUM:
      return "sum";
    case Op::AVG:
      return "avg";
    case Op::PRODUCT:
      return "product";
    case Op::MIN:
      return "min";
    case Op::MAX:
      return "max";
    case Op::BAND:
      return "band";
    case Op::BOR:
      return "bor";
    case Op::BXOR:
      return "bxor";
    case Op::PREMUL_SUM:
      return "premultiplied";
    default:
      return "unknown";
  }
}

bool is_16bit_float(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Half || dtype == c10::ScalarType::BFloat16;
}

bool is_mpi_complex(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::ComplexFloat || dtype == c10::ScalarType::ComplexDouble;
}

}  // namespace

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
      throw InvalidArgument(
          concat("MPI groups move elements of 1, 2, 4, 8 or 16 bytes, not of ", element_size));
  }
}

MpiReductions::~MpiReductions() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized) return;
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

bool MpiReductions::supports(c10::ScalarType dtype, Op::RedOpType op) {
  const bool integer = c10::isIntegralType(dtype, /*includeBool=*/false);
  const bool complex = is_mpi_complex(dtype);
  const bool floating =
      dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double || is_16bit_float(dtype);
  const bool boolean = dtype == c10::ScalarType::Bool;
  switch (op) {
    case Op::SUM:
    case Op::PRODUCT:
      return integer || complex || floating || boolean;
    case Op::MIN:
    case Op::MAX:
      return integer || floating || boolean;
    case Op::AVG:
    case Op::PREMUL_SUM:
      return complex || floating;
    case Op::BAND:
    case Op::BOR:
    case Op::BXOR:
      return integer || boolean;
    default:
      return false;
  }
}

MpiReduction MpiReductions::plan(c10::ScalarType dtype, const c10d::ReduceOp& op) {
  if (!supports(dtype, op.op_))
    throw InvalidArgument(
        concat("MPI groups do not reduce ", c10::toString(dtype), " by ", op_name(op.op_),
               "; convert the tensor first (integers have no average, complex numbers no order)"));
  MpiReduction plan;
  plan.wire = dtype;
  plan.average = op.op_ == Op::AVG;
  if (op.op_ == Op::PREMUL_SUM) {
    const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    if (!factor)
      throw InvalidArgument(
          "a premultiplied sum without its factor; c10d has a function that makes the operation "
          "with one");
    plan.scale = factor->tensor_factor.defined()
                     ? factor->tensor_factor
                     : at::scalar_tensor(factor->double_factor, at::kDouble);
    plan.scale = plan.scale->reshape({});
  }
  const bool adds = op.op_ == Op::SUM || op.op_ == Op::AVG || op.op_ == Op::PREMUL_SUM;
  if (is_mpi_complex(dtype)) {
    const bool wide = dtype == c10::ScalarType::ComplexDouble;
    if (adds) {
      plan.type = wide ? MPI_DOUBLE : MPI_FLOAT;
      plan.op = MPI_SUM;
      plan.per_element = 2;
    } else {
      plan.type = wide ? MPI_C_DOUBLE_COMPLEX : MPI_C_FLOAT_COMPLEX;
      plan.op = make(wide ? multiply<c10::complex<double>> : multiply<c10::complex<float>>);
    }
    return plan;
  }
  if (dtype == c10::ScalarType::Bool) {
    plan.type = MPI_UINT8_T;  // A bool is a byte that holds 0 or 1.
    const bool all = op.op_ == Op::PRODUCT || op.op_ == Op::MIN || op.op_ == Op::BAND;
    plan.op = op.op_ == Op::BXOR ? MPI_BXOR : all ? MPI_BAND : MPI_BOR;
    return plan;
  }
  if (is_16bit_float(dtype) && (adds || op.op_ == Op::PRODUCT)) plan.wire = c10::ScalarType::Float;
  const Native type = native(plan.wire);
  plan.type = type.type;
  switch (op.op_) {
    case Op::PRODUCT:
      plan.op = MPI_PROD;
      break;
    case Op::MAX:
      plan.op = type.max ? make(type.max) : MPI_MAX;
      break;
    case Op::MIN:
      plan.op = type.min ? make(type.min) : MPI_MIN;
      break;
    case Op::BAND:
      plan.op = MPI_BAND;
      break;
    case Op::BOR:
      plan.op = MPI_BOR;
      break;
    case Op::BXOR:
      plan.op = MPI_BXOR;
      break;
    default:
      plan.op = MPI_SUM;
      break;
  }
  return plan;
}

}  // namespace tessera::detail
