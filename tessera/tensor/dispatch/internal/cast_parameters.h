#pragma once
// Mixed precision of parameters: an operator that takes a parameter whose source says so, together
// with data, computes in a lower precision. C++ modules have no hooks, so that operators are where
// the dtype changes; it does so above autograd, like autocast's, and gradients come back in the
// parameter's own dtype.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <optional>

#include "tessera/tensor/dispatch/internal/op_info.h"

namespace tessera::detail {

struct ShardMeta;

/// One load: whether arguments may have to be cast, in a call that takes this tensor.
bool casts_parameters(const ShardMeta& meta);

struct ParameterCasts {
  /// Whether an argument was replaced.
  bool any = false;
  /// The dtype that the first result is to have.
  std::optional<at::ScalarType> output = {};
};

/// Casts, among the arguments of a call, parameters to the dtype that operators compute in, and the
/// other floating-point tensors (but for those without dims and those that are written to) to that
/// dtype as well. Nothing is cast in calls
///   - that write to a parameter, or take parameters alone,
///   - that work element by element on a parameter and tensors of its shape and dtype, as those of
///     an optimizer or a penalty do,
///   - of optimizers on lists, and of batch norm, whose statistics keep their dtype.
/// Ranks agree: it depends on shapes, dtypes and which tensors are parameters alone.
ParameterCasts cast_arguments(const OpInfo& info, c10::IValue* arguments);

/// The result of a call in the dtype that its casts ask for, if it has the one that it computes in.
at::Tensor cast_result(at::Tensor result, const ParameterCasts& casts);
/// The first of the results at the top of the stack.
void cast_result(const OpInfo& info, torch::jit::Stack* stack, const ParameterCasts& casts);

/// For kernels above autograd that are not libtorch's own: casts the tensors in place, by the rules
/// of a call that is not element by element.
ParameterCasts cast_tensors(at::ArrayRef<at::Tensor*> tensors);

}  // namespace tessera::detail
