#pragma once
// Which dtypes norms take, the dtype of their statistics, which are passed to their backward, and
// over which axes these are reduced.

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "tessera/ops/rules/detail/rules.h"

namespace tessera::detail {

inline at::Tensor optional_tensor(const c10::IValue& v) {
  return v.isTensor() ? v.toTensor() : at::Tensor();
}

/// An optional tensor in another dtype.
inline at::Tensor given(const c10::IValue& v, at::ScalarType type) {
  const at::Tensor t = optional_tensor(v);
  return t.defined() ? t.to(type) : t;
}

/// The dtype in which libtorch's CPU kernels return mean and inverse deviation, and expect them in
/// backward: the input's dtype, or float32 if a half-precision input is combined with parameters of
/// another dtype. `arguments`: of the forward pass, the input first.
inline at::ScalarType statistics_dtype(const Stack& arguments) {
  const auto own = arguments[0].toTensor().scalar_type();
  const bool mixed = std::ranges::any_of(arguments, [&](const c10::IValue& v) {
    const at::Tensor t = optional_tensor(v);
    return t.defined() && t.scalar_type() != own;
  });
  return mixed ? at::toOpMathType(own) : own;
}

/// As statistics_dtype(), where kernels for other devices return the dtype that they compute in.
inline at::ScalarType wide_statistics_dtype(const Stack& arguments) {
  const at::Tensor& x = arguments[0].toTensor();
  return x.is_cpu() ? statistics_dtype(arguments) : at::toOpMathType(x.scalar_type());
}

/// Throws InvalidArgument for dtypes that libtorch's kernels refuse, before any rank is in one.
inline void require_norm_dtypes(const OpCall& call, const TensorInfo& x) {
  if (!at::isFloatingType(x.dtype))
    throw InvalidArgument(call.name(), " of ", x.dtype, ": give floating-point values");
  const bool half = x.dtype == at::kHalf || x.dtype == at::kBFloat16;
  for (const char* name : {"weight", "bias"}) {
    const TensorInfo* t = call.find(name);
    if (t && t->dtype != x.dtype && !(half && t->dtype == at::kFloat))
      throw InvalidArgument(call.name(), ": ", name, " is of ", t->dtype, " and the input of ",
                            x.dtype, ": give both one dtype");
  }
}

/// The axes that divide among ranks what is normalized together: dims from `first` on.
inline std::vector<int> axes_within(const ShardSpec& x, int first) {
  return axes_where(x.placements(),
                    [&](const Placement& p) { return p.is_shard() && p.dim >= first; });
}

}  // namespace tessera::detail
