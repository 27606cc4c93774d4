#pragma once
// Errors of the library as the classes that the package `tessera` has for them. What is raised is
// an error of the same class of C++, too, so that whoever catches it on its way sees no difference.

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::python {

/// Throws `error` as one that libtorch hands to Python by its class; returns where Python has given
/// no class for it.
void raise_by_class(const Error& error);

/// Names of the classes of errors, those that derive from others first.
std::vector<std::string> error_names();
/// Python's class of each, which must outlive the process' use of the library.
void set_error_classes(const std::vector<std::int64_t>& classes);

template <class R, class F, class... Arguments>
auto by_class(F f, R (F::*)(Arguments...) const) {
  return [f](Arguments... arguments) -> R {
    try {
      return f(std::forward<Arguments>(arguments)...);
    } catch (const Error& error) {
      raise_by_class(error);
      throw;
    }
  };
}
template <class F>
auto by_class(F f) {
  return by_class(f, &F::operator());
}
template <class R, class... Arguments>
auto by_class(R (*f)(Arguments...)) {
  return by_class(
      [f](Arguments... arguments) -> R { return f(std::forward<Arguments>(arguments)...); });
}
template <class R, class C, class... Arguments>
auto by_class(R (C::*f)(Arguments...)) {
  return by_class([f](const c10::intrusive_ptr<C>& self, Arguments... arguments) -> R {
    return ((*self).*f)(std::forward<Arguments>(arguments)...);
  });
}

}  // namespace tessera::python
