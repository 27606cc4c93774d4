#include "tessera/comm/group/detail/reduction.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "tessera/comm/backends/flat.h"
#include "tessera/comm/group/detail/abilities.h"

namespace tessera::detail {
namespace {

// A kind of reduction and c10d's, but for premultiplied sums.
constexpr std::pair<ReduceOp::Kind, c10d::ReduceOp::RedOpType> kOps[] = {
    {ReduceOp::Kind::sum, c10d::ReduceOp::SUM},
    {ReduceOp::Kind::avg, c10d::ReduceOp::AVG},
    {ReduceOp::Kind::product, c10d::ReduceOp::PRODUCT},
    {ReduceOp::Kind::min, c10d::ReduceOp::MIN},
    {ReduceOp::Kind::max, c10d::ReduceOp::MAX}};

}  // namespace

c10d::ReduceOp to_c10d(ReduceOp::Kind op, double factor) {
  for (const auto& [kind, theirs] : kOps)
    if (kind == op) return theirs;
  // The function that makes one has other names in libtorch 2.11 and 2.15; what it makes has not.
  c10d::ReduceOp result;
  result.op_ = c10d::ReduceOp::PREMUL_SUM;
  result.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(factor);
  return result;
}

std::optional<ReduceOp> from_c10d(const c10d::ReduceOp& op) {
  for (const auto& [kind, theirs] : kOps)
    if (theirs == op.op_) return ReduceOp{kind};
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return std::nullopt;
  const auto* given = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (!given || (given->tensor_factor.defined() && given->tensor_factor.numel() != 1))
    throw InvalidArgument(
        "a premultiplied sum needs one number as its factor; c10d has a function that makes the "
        "operation with one");
  return ReduceOp::premultiplied(
      given->tensor_factor.defined() ? given->tensor_factor.item<double>() : given->double_factor);
}

namespace {

template <class Float, class Int>
void to_keys(const Float* values, Int* keys, std::int64_t n, Int nan_key) {
  constexpr Int kMagnitude = std::numeric_limits<Int>::max();
  for (std::int64_t i = 0; i < n; ++i) {
    Int bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    const Int key = bits ^ ((bits >> (8 * sizeof(Int) - 1)) & kMagnitude);
    keys[i] = values[i] != values[i] ? nan_key : key;
  }
}

template <class Float, class Int>
void from_keys(const Int* keys, Float* values, std::int64_t n, Int nan_key) {
  constexpr Int kMagnitude = std::numeric_limits<Int>::max();
  for (std::int64_t i = 0; i < n; ++i) {
    const Int bits = keys[i] ^ ((keys[i] >> (8 * sizeof(Int) - 1)) & kMagnitude);
    Float value;
    std::memcpy(&value, &bits, sizeof(bits));
    values[i] = keys[i] == nan_key ? std::numeric_limits<Float>::quiet_NaN() : value;
  }
}

template <class Int>
Int nan_key(ReduceOp::Kind op) {
  return op == ReduceOp::Kind::max ? std::numeric_limits<Int>::max()
                                   : std::numeric_limits<Int>::min();
}

// out = a op b; `out` may be `a` or `b`.
void combine(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, ReduceOp::Kind op) {
  switch (op) {
    case ReduceOp::Kind::product:
      at::mul_out(out, a, b);
      return;
    case ReduceOp::Kind::min:
      at::minimum_out(out, a, b);
      return;
    case ReduceOp::Kind::max:
      at::maximum_out(out, a, b);
      return;
    default:
      if (!out.is_complex()) {
        at::add_out(out, a, b);
        return;
      }
      // By component: libtorch's sum of complex numbers multiplies by a factor first, which loses
      // the sign of zeros.
      at::Tensor components = at::view_as_real(out);
      at::add_out(components, at::view_as_real(a), at::view_as_real(b));
  }
}

}  // namespace

void check_reducible(const char* operation, c10::ScalarType dtype, ReduceOp::Kind op) {
  using Kind = ReduceOp::Kind;
  auto refuse = [&](const char* why) {
    throw InvalidArgument(operation, " with ", to_string(op), " of ", c10::toString(dtype), ": ",
                          why);
  };
  using enum c10::ScalarType;
  if (is_one_of(dtype, {Float, Double, Half, BFloat16})) return;
  if (is_one_of(dtype, {ComplexFloat, ComplexDouble, ComplexHalf})) {
    if (op == Kind::min || op == Kind::max)
      refuse("complex numbers have no order; reduce their magnitude");
  } else if (dtype == Bool) {
    if (op != Kind::min && op != Kind::max && op != Kind::product)
      refuse("not defined; use max for 'any', min for 'all', or convert to int64 to count");
  } else if (is_one_of(dtype, {Byte, Char, Short, Int, Long})) {
    if (op == Kind::avg || op == Kind::premultiplied)
      refuse("integers would be rounded; convert to a floating-point type");
  } else {
    refuse(
        "this type has no arithmetic; convert it first (it can be moved by every collective that "
        "does not reduce)");
  }
}

c10::ScalarType accumulation_type(c10::ScalarType dtype) {
  if (dtype == c10::ScalarType::Half || dtype == c10::ScalarType::BFloat16)
    return c10::ScalarType::Float;
  if (dtype == c10::ScalarType::ComplexHalf) return c10::ScalarType::ComplexFloat;
  return dtype;
}

c10::ScalarType Recipe::wire_type() const {
  if (real) return c10::toRealValueType(wide);
  if (bytes) return c10::ScalarType::Byte;
  if (!keys) return wide;
  return wide == c10::ScalarType::Float ? c10::ScalarType::Int : c10::ScalarType::Long;
}

at::Tensor Recipe::outgoing(const at::Tensor& tensor, bool writes) const {
  at::Tensor work = plain(tensor);
  if (wide != work.scalar_type()) work = work.to(wide);
  if (scale) work = writes && work.is_same(tensor) ? work.mul_(op.factor) : work.mul(op.factor);
  if (keys) return order_keys(work.view({-1}), op.kind, work.is_cpu());
  if (real) return at::view_as_real(work);
  return bytes ? work.view(at::kByte) : work;
}

bool Recipe::settles(const at::Tensor& target, const at::Tensor& result) const {
  return divide || keys || result.const_data_ptr() != target.const_data_ptr();
}

void Recipe::settle(const at::Tensor& target, const at::Tensor& result, int ranks) const {
  if (keys) {
    const bool direct = target.scalar_type() == wide && is_plain(target);
    const auto decoded = direct ? target : at::empty(target.sizes(), target.options().dtype(wide));
    from_order_keys(decoded.view({-1}), result.view({-1}), op.kind, decoded.is_cpu());
    if (!direct) target.copy_(decoded);
    return;
  }
  const auto values = real ? at::view_as_complex(result.view({-1, 2})) : result;
  if (divide) values.div_(ranks);
  if (result.const_data_ptr() != target.const_data_ptr()) target.copy_(values.view(target.sizes()));
}

Recipe recipe_of(bool (*native)(c10::ScalarType, ReduceOp::Kind), c10::ScalarType dtype,
                 ReduceOp op) {
  using Kind = ReduceOp::Kind;
  Recipe recipe{op, dtype};
  if (native(dtype, op.kind)) return recipe;
  if (op.kind == Kind::avg || op.kind == Kind::premultiplied) {
    (op.kind == Kind::avg ? recipe.divide : recipe.scale) = true;
    recipe.op.kind = Kind::sum;
    // Half precision is scaled and divided in float32, before the one rounding.
    if (native(dtype, Kind::sum) && accumulation_type(dtype) == dtype) return recipe;
  }
  recipe.wide = dtype == c10::ScalarType::Short ? c10::ScalarType::Int : accumulation_type(dtype);
  if (recipe.wide == c10::ScalarType::Bool) {
    recipe.bytes = true;
    if (recipe.op.kind == Kind::product) recipe.op.kind = Kind::min;
  }
  recipe.real = c10::isComplexType(recipe.wide) && recipe.op.kind == Kind::sum;
  if (native(recipe.wire_type(), recipe.op.kind)) return recipe;
  const bool ordered = recipe.op.kind == Kind::min || recipe.op.kind == Kind::max;
  recipe.keys =
      ordered && (recipe.wide == c10::ScalarType::Float || recipe.wide == c10::ScalarType::Double);
  recipe.compose = !recipe.keys;
  return recipe;
}

void reduce_in_order(const at::Tensor& output, const std::vector<at::Tensor>& parts,
                     ReduceOp::Kind op) {
  const auto wide = accumulation_type(output.scalar_type());
  // Computed in the output itself, unless it is narrower or holds values that are still needed.
  const bool in_place =
      wide == output.scalar_type() &&
      std::none_of(parts.begin() + std::min<std::size_t>(2, parts.size()), parts.end(),
                   [&](const at::Tensor& part) { return part.is_alias_of(output); });
  at::Tensor sum = in_place ? output : at::empty(output.sizes(), output.options().dtype(wide));
  if (parts.size() == 1) {
    sum.copy_(parts.front());
  } else {
    combine(sum, parts[0].to(wide), parts[1].to(wide), op);
    for (std::size_t i = 2; i < parts.size(); ++i) combine(sum, sum, parts[i].to(wide), op);
  }
  if (op == ReduceOp::Kind::avg) sum.div_(static_cast<double>(parts.size()));
  if (!in_place) output.copy_(sum);
}

namespace {

// The order keys on any device, by operators of libtorch.
template <class Int>
at::Tensor keys_by_operators(const at::Tensor& values, ReduceOp::Kind op) {
  const auto bits = values.view(c10::CppTypeToScalarType<Int>::value);
  const auto flips =
      bits.bitwise_right_shift(8 * sizeof(Int) - 1).bitwise_and(std::numeric_limits<Int>::max());
  return bits.bitwise_xor(flips).masked_fill_(values.isnan(), nan_key<Int>(op));
}

template <class Int>
void values_by_operators(const at::Tensor& output, const at::Tensor& keys, ReduceOp::Kind op) {
  const auto flips =
      keys.bitwise_right_shift(8 * sizeof(Int) - 1).bitwise_and(std::numeric_limits<Int>::max());
  output.copy_(keys.bitwise_xor(flips).view(output.scalar_type()));
  output.masked_fill_(keys.eq(nan_key<Int>(op)), std::numeric_limits<double>::quiet_NaN());
}

// Gives `body` a number of the type of floating-point numbers, and one of their keys'.
template <class Body>
auto with_types_of(c10::ScalarType dtype, const Body& body) {
  return dtype == c10::ScalarType::Float ? body(0.0F, std::int32_t{}) : body(0.0, std::int64_t{});
}

}  // namespace

at::Tensor order_keys(const at::Tensor& values, ReduceOp::Kind op, bool on_cpu) {
  return with_types_of(values.scalar_type(), [&]<class Float, class Int>(Float, Int) {
    if (!on_cpu) return keys_by_operators<Int>(values, op);
    at::Tensor keys =
        at::empty(values.sizes(), values.options().dtype(c10::CppTypeToScalarType<Int>::value));
    to_keys(values.const_data_ptr<Float>(), keys.mutable_data_ptr<Int>(), values.numel(),
            nan_key<Int>(op));
    return keys;
  });
}

void from_order_keys(const at::Tensor& output, const at::Tensor& keys, ReduceOp::Kind op,
                     bool on_cpu) {
  with_types_of(output.scalar_type(), [&]<class Float, class Int>(Float, Int) {
    if (!on_cpu) return values_by_operators<Int>(output, keys, op);
    from_keys(keys.const_data_ptr<Int>(), output.mutable_data_ptr<Float>(), keys.numel(),
              nan_key<Int>(op));
  });
}

}  // namespace tessera::detail
