#pragma once
// The errors that all rooms share. Each says what was asked, what the limit is and what to do; a
// room derives its own from these.

#include <stdexcept>
#include <string>

#include "tessera/base/text.h"

namespace tessera {

/// Base of every exception that Tessera throws on purpose.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what);
  /// Joins the parts of a message, as concat() does: Error("rank ", 3, " of ", 4).
  template <class First, class Second, class... Rest>
  Error(const First& first, const Second& second, const Rest&... rest)
      : Error(concat(first, second, rest...)) {}
};

/// An argument that the caller can correct: a wrong size, an unknown name, a rank out of range.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// A configuration (environment, file, tree of groups) that is incomplete or contradicts itself.
class ConfigurationError : public Error {
 public:
  using Error::Error;
};

/// A file that is absent, unreadable, of another format, or damaged; the message holds the path and
/// the system's or library's own reason.
class FileError : public Error {
 public:
  using Error::Error;
};

/// A part that this build does not have; the message says how to get it.
class NotAvailable : public Error {
 public:
  using Error::Error;
};

}  // namespace tessera
