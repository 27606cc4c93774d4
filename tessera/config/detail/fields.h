#pragma once
// Fields: an object of a document, read strictly: a field of the wrong type, and one that was not
// asked for, are errors that name their place.

#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/config/detail/document.h"
#include "tessera/config/errors.h"

namespace tessera::detail {

class Fields {
 public:
  /// `where`: the source and the path inside the document.
  Fields(const Json& value, std::string where);

  std::string where(const std::string& field) const {
    return where_ + (where_.back() == ' ' ? "" : ".") + field;
  }

  /// This and the following return nullopt for a field that is absent or null. They throw
  /// ConfigFileError for one of another type, and integer() for one outside [low, high].
  std::optional<std::string> text(const std::string& field);
  std::optional<std::int64_t> integer(const std::string& field, std::int64_t low,
                                      std::int64_t high);
  std::optional<double> real(const std::string& field);
  std::optional<bool> boolean(const std::string& field);
  std::optional<std::vector<std::string>> texts(const std::string& field);
  std::optional<std::vector<int>> integers(const std::string& field);
  /// A time span: "500ms", "30s", "5min", "1h", or a number of milliseconds.
  std::optional<std::chrono::milliseconds> duration(const std::string& field);
  /// The value itself, marked as read; nullptr if absent.
  const Json* raw(const std::string& field);
  std::string required_text(const std::string& field);
  /// Calls read(Fields&) for each object of a list, and checks that it read every field.
  template <class Read>
  void each(const std::string& field, Read&& read) {
    const Json* entries = raw(field);
    if (!entries) return;
    if (!entries->is_array()) fail(field, "must be a list, but is ", shown(*entries));
    int i = 0;
    for (const Json& entry : *entries) {
      Fields one(entry, concat(where(field), "[", i++, "]"));
      read(one);
      one.finish();
    }
  }

  /// Throws ConfigFileError for a field that was not read. Call it last.
  void finish() const;
  /// Throws ConfigFileError; `why` joined follows the field's place.
  template <class... Why>
  [[noreturn]] void fail(const std::string& field, const Why&... why) const {
    throw ConfigFileError(where(field), ": ", why...);
  }

 private:
  const Json& value_;
  std::string where_;
  std::set<std::string> read_;
};

/// Reads a number of bytes: "512MB", "4KiB", "1e9", "25GB/s"; powers of ten for kB MB GB TB, of two
/// for KiB MiB GiB TiB. Throws ConfigFileError.
double parse_bytes(const std::string& text, const std::string& where);
/// Reads seconds: "5us", "0.2ms", "1s", or a bare number of seconds. Throws ConfigFileError.
double parse_seconds(const std::string& text, const std::string& where);

}  // namespace tessera::detail
