#include "tessera/comm/backends/shm/shm_elements.h"

#include "tessera/base/text.h"
#include "tessera/comm/group/detail/reduction.h"

namespace tessera::detail {

std::optional<shm::Element> element_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Bool:
      return shm::Element::boolean;
    case c10::ScalarType::Char:
      return shm::Element::int8;
    case c10::ScalarType::Byte:
      return shm::Element::uint8;
    case c10::ScalarType::Short:
      return shm::Element::int16;
    case c10::ScalarType::UInt16:
      return shm::Element::uint16;
    case c10::ScalarType::Int:
      return shm::Element::int32;
    case c10::ScalarType::UInt32:
      return shm::Element::uint32;
    case c10::ScalarType::Long:
      return shm::Element::int64;
    case c10::ScalarType::UInt64:
      return shm::Element::uint64;
    case c10::ScalarType::Half:
      return shm::Element::half;
    case c10::ScalarType::BFloat16:
      return shm::Element::bfloat16;
    case c10::ScalarType::Float:
      return shm::Element::float32;
    case c10::ScalarType::Double:
      return shm::Element::float64;
    case c10::ScalarType::ComplexFloat:
      return shm::Element::complex64;
    case c10::ScalarType::ComplexDouble:
      return shm::Element::complex128;
    default:
      return std::nullopt;
  }
}

shm::Reduction::Kind kind_of(ReduceOp::Kind op) {
  switch (op) {
    case ReduceOp::Kind::sum:
      return shm::Reduction::Kind::sum;
    case ReduceOp::Kind::avg:
      return shm::Reduction::Kind::average;
    case ReduceOp::Kind::product:
      return shm::Reduction::Kind::product;
    case ReduceOp::Kind::min:
      return shm::Reduction::Kind::min;
    case ReduceOp::Kind::max:
      return shm::Reduction::Kind::max;
    case ReduceOp::Kind::premultiplied:
      return shm::Reduction::Kind::premultiplied;
  }
  return shm::Reduction::Kind::sum;
}

namespace {

shm::Reduction reduction_of(const c10d::ReduceOp& op) {
  using Kind = shm::Reduction::Kind;
  switch (op.op_) {
    case c10d::ReduceOp::BAND:
      return {Kind::bit_and};
    case c10d::ReduceOp::BOR:
      return {Kind::bit_or};
    case c10d::ReduceOp::BXOR:
      return {Kind::bit_xor};
    default:
      break;
  }
  const auto known = from_c10d(op);
  if (!known)
    throw InvalidArgument(
        "shared memory reduces by sum, product, min, max, average, premultiplied sum and bits");
  return {kind_of(known->kind), known->factor};
}

}  // namespace

Reduces reduces_of(const char* name, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const auto element = element_of(tensor.scalar_type());
  const auto reduction = reduction_of(op);
  if (!element || !shm::reduces(*element, reduction.kind))
    throw InvalidArgument(concat(name, ": ", c10::toString(tensor.scalar_type()),
                                 " has no reduction by ", to_string(reduction.kind),
                                 " over shared memory"));
  return {*element, reduction};
}

}  // namespace tessera::detail
