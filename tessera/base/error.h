#pragma once
// The errors that all rooms share. Each says what was asked, what the limit is and what to do; a
// room derives its own from these.

#include <stdexcept>
#include <string>

namespace tessera {

/// Base of every exception that Tessera throws on purpose.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what);
  ~Error() override;
};

/// An argument that the caller can correct: a wrong size, an unknown name, a rank out of range.
class InvalidArgument : public Error {
 public:
  using Error::Error;
  ~InvalidArgument() override;
};

/// A configuration (environment, file, tree of groups) that is incomplete or contradicts itself.
class ConfigurationError : public Error {
 public:
  using Error::Error;
  ~ConfigurationError() override;
};

/// A file that is absent, unreadable, of another format, or damaged; the message holds the path and
/// the system's or library's own reason.
class FileError : public Error {
 public:
  using Error::Error;
  ~FileError() override;
};

/// A part that this build does not have; the message says how to get it.
class NotAvailable : public Error {
 public:
  using Error::Error;
  ~NotAvailable() override;
};

}  // namespace tessera
