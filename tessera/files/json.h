#pragma once
// Json: the values of a JSON text (RFC 8259), for file headers from any source.
//
//   const Json header = Json::parse(R"({"shape": [2, 3], "dtype": "F32"})");
//   header.at("shape").items()[1].number() -> 3
//
// Strict: UTF-8 must be valid, escaped surrogates come in pairs, names in one object are unique,
// nothing follows the value but white space, and nesting is limited. Numbers are kept as they are
// written; number() accepts whole numbers from 0 to 2^64 - 1 alone.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

class Json {
 public:
  enum class Kind : unsigned char { null, boolean, number, string, array, object };

  /// Parses a text. Throws InvalidArgument with the byte at which the text is broken, for texts
  /// nested deeper than `depth`, and for duplicate names in one object.
  static Json parse(std::string_view text, int depth = 32);

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }

  /// The following throw InvalidArgument for a value of another kind; number() also for fractions,
  /// signs, exponents and what 64 bits do not hold; at() for a name that is absent.
  bool boolean() const;
  std::uint64_t number() const;
  /// Any number that a double holds.
  double real() const;
  /// A whole number from -2^63 to 2^63 - 1, also as "3.0" or "1e3" where a double is exact; nullopt
  /// for other numbers.
  std::optional<std::int64_t> integer() const;
  /// Returns number(), which must be below 2^63.
  std::int64_t index() const;
  const std::string& string() const;
  const std::vector<Json>& items() const;
  const std::vector<std::pair<std::string, Json>>& members() const;
  const Json& at(std::string_view name) const;
  /// The member of this name, or nullptr.
  const Json* find(std::string_view name) const;

 private:
  friend class JsonParser;
  void need(Kind kind) const;

  Kind kind_ = Kind::null;
  /// A string's value; a number or a boolean as it is written.
  std::string text_;
  std::vector<Json> items_;
  std::vector<std::pair<std::string, Json>> members_;
};

/// True for valid UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF.
bool is_utf8(std::string_view text);

}  // namespace tessera
