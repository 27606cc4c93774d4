#include "tessera/comm/backends/shm/shm_elements.h"

#include "tessera/base/text.h"

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

shm::Reduction reduction_of(ReduceOp op) {
  using Kind = shm::Reduction::Kind;
  switch (op.kind) {
    case ReduceOp::Kind::sum:
      return {Kind::sum};
    case ReduceOp::Kind::avg:
      return {Kind::average};
    case ReduceOp::Kind::product:
      return {Kind::product};
    case ReduceOp::Kind::min:
      return {Kind::min};
    case ReduceOp::Kind::max:
      return {Kind::max};
    case ReduceOp::Kind::premultiplied:
      return {Kind::premultiplied, op.factor};
  }
  return {};
}

namespace {

shm::Reduction reduction_in(const TransportCall& call) {
  switch (call.bits) {
    case Bits::bit_and:
      return {shm::Reduction::Kind::bit_and};
    case Bits::bit_or:
      return {shm::Reduction::Kind::bit_or};
    case Bits::bit_xor:
      return {shm::Reduction::Kind::bit_xor};
    case Bits::none:
      break;
  }
  return reduction_of(call.op);
}

}  // namespace

Reduces reduces_of(const char* name, const TransportCall& call, const at::Tensor& tensor) {
  const auto element = element_of(tensor.scalar_type());
  const auto reduction = reduction_in(call);
  if (!element || !shm::reduces(*element, reduction.kind))
    throw InvalidArgument(concat(name, ": ", c10::toString(tensor.scalar_type()),
                                 " has no reduction by ", to_string(reduction.kind),
                                 " over shared memory"));
  return {*element, reduction};
}

}  // namespace tessera::detail
