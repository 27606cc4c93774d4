#pragma once
// The operators that a function calls: their `out=` forms, and calls with other numbers.

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <optional>

#include "cases.h"

namespace tessera::test {

/// A call of an operator that has an `out=` form.
struct OutCall {
  /// The operator, its form with `out`, and the arguments of the call.
  c10::OperatorHandle op, form;
  torch::jit::Stack arguments;

  /// What the operator returns.
  Tensors results() const;
  /// Calls the form, which writes to `targets`, one per result.
  void into(const Tensors& targets) const;
};

/// Runs `f`, and returns the last of the calls that it makes itself (not those that operators make)
/// of an operator with an `out=` form; nullopt if there is none.
std::optional<OutCall> last_with_out(const std::function<void()>& f);

/// Runs `f`, and calls the last operator that it calls itself again with other floating-point
/// arguments, if it has any. What that call throws is forgotten, unless ranks disagree (CommError).
void repeat_with_other_numbers(const std::function<void()>& f);

}  // namespace tessera::test
