#pragma once
// Json: the values of a JSON text (RFC 8259), for file headers that may come from anywhere.
//
//   const Json header = Json::parse(R"({"shape": [2, 3], "dtype": "F32"})");
//   header.at("shape").items()[1].number() -> 3
//
// Strict: UTF-8 must be valid, escaped surrogates come in pairs, no name occurs twice in one
// object, nothing follows the value but white space, and nesting is limited. Numbers are kept as
// they are written; number() takes whole numbers from 0 to 2^64 - 1 alone.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

class Json {
 public:
  enum class Kind : unsigned char { null, boolean, number, string, array, object };

  /// Throws InvalidArgument with the byte at which the text is broken, for texts nested deeper than
  /// `depth`, and for names that occur twice in one object.
  static Json parse(std::string_view text, int depth = 32);

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }

  /// Each throws InvalidArgument for a value of another kind; number() also for fractions, signs,
  /// exponents and what 64 bits do not hold; at() for a name that is not there.
  bool boolean() const;
  std::uint64_t number() const;
  /// As number(), below 2^63.
  std::int64_t index() const;
  const std::string& string() const;
  const std::vector<Json>& items() const;
  const std::vector<std::pair<std::string, Json>>& members() const;
  const Json& at(std::string_view name) const;
  /// nullptr if the object has no such name.
  const Json* find(std::string_view name) const;

 private:
  friend class JsonParser;
  void need(Kind kind) const;

  Kind kind_ = Kind::null;
  /// Of a string its value; of a number or a boolean what is written.
  std::string text_;
  std::vector<Json> items_;
  std::vector<std::pair<std::string, Json>> members_;
};

/// True for valid UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF.
bool is_utf8(std::string_view text);

}  // namespace tessera
