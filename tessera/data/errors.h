#pragma once
// Errors between a request for data and the file that should hold it.

#include "tessera/base/error.h"

namespace tessera {

/// Thrown for a variable or attribute that the source does not have, or whose type cannot be read
/// as requested; the message lists the known names.
class VariableError : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// Thrown for a hyperslab that reaches beyond the variable; the message names the dimension, what
/// was asked and its size.
class RangeError : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

}  // namespace tessera
