#include "tessera/comm/backends/shm/shm_elements.h"

#include <utility>

#include "tessera/base/text.h"

namespace tessera::detail {

std::optional<shm::Element> element_of(c10::ScalarType dtype) {
  using Type = c10::ScalarType;
  using Element = shm::Element;
  static constexpr std::pair<Type, Element> kElements[] = {
      {Type::Bool, Element::boolean},
      {Type::Char, Element::int8},
      {Type::Byte, Element::uint8},
      {Type::Short, Element::int16},
      {Type::UInt16, Element::uint16},
      {Type::Int, Element::int32},
      {Type::UInt32, Element::uint32},
      {Type::Long, Element::int64},
      {Type::UInt64, Element::uint64},
      {Type::Half, Element::half},
      {Type::BFloat16, Element::bfloat16},
      {Type::Float, Element::float32},
      {Type::Double, Element::float64},
      {Type::ComplexFloat, Element::complex64},
      {Type::ComplexDouble, Element::complex128}};
  for (const auto& [type, element] : kElements)
    if (type == dtype) return element;
  return std::nullopt;
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
