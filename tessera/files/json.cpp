#include "tessera/files/json.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/number.h"

namespace tessera {
namespace {

constexpr std::array<const char*, 6> kKinds = {"null",     "true or false", "a number",
                                               "a string", "an array",      "an object"};

void append_utf8(std::string& out, std::uint32_t code) {
  const auto put = [&](std::uint32_t byte) { out += static_cast<char>(byte); };
  // The first byte says how many more follow, of six bits each.
  static constexpr std::uint32_t first[] = {0, 0xc0, 0xe0, 0xf0};
  const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  put(first[more] | code >> 6 * more);
  for (int k = more; k-- > 0;) put(0x80 | (code >> 6 * k & 0x3f));
}

}  // namespace

bool is_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    const int more = first < 0x80   ? 0
                     : first < 0xc2 ? -1
                     : first < 0xe0 ? 1
                     : first < 0xf0 ? 2
                     : first < 0xf5 ? 3
                                    : -1;
    if (more < 0 || text.size() - i <= static_cast<std::size_t>(more)) return false;
    for (int k = 1; k <= more; ++k)
      if ((static_cast<unsigned char>(text[i + k]) & 0xc0) != 0x80) return false;
    const auto second = more > 0 ? static_cast<unsigned char>(text[i + 1]) : 0;
    // Overlong forms, surrogates, and what is above the last code point.
    if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
        (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f))
      return false;
    i += static_cast<std::size_t>(more) + 1;
  }
  return true;
}

class JsonParser {
 public:
  JsonParser(std::string_view text, int depth) : text_(text), depth_(depth) {}

  Json document() {
    Json value = this->value(depth_);
    space();
    if (at_ != text_.size()) fail("nothing more");
    return value;
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw InvalidArgument("the JSON text is broken at byte ", at_, " of ", text_.size(),
                          ": expected there is ", what);
  }
  void space() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r'))
      ++at_;
  }
  bool take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json value(int depth) {
    space();
    if (depth == 0) fail("an end: it is nested too deeply");
    Json out;
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    if (c == '{') {
      object(out, depth);
    } else if (c == '[') {
      array(out, depth);
    } else if (c == '"') {
      out.kind_ = Json::Kind::string;
      out.text_ = string();
    } else if (c == '-' || is_digit(c)) {
      out.kind_ = Json::Kind::number;
      out.text_ = number();
    } else if (take_word("true") || take_word("false")) {
      out.kind_ = Json::Kind::boolean;
      out.text_ = c;
    } else if (!take_word("null")) {
      fail("a value");
    }
    return out;
  }

  // What stands between brackets with commas between, up to `end`.
  template <class One>
  void items(char end, const char* expected, const One& one) {
    ++at_;
    space();
    if (take(end)) return;
    do {
      one();
      space();
    } while (take(','));
    if (!take(end)) fail(expected);
  }

  void object(Json& out, int depth) {
    out.kind_ = Json::Kind::object;
    items('}', "',' or '}'", [&] {
      space();
      std::string name = string();
      space();
      if (!take(':')) fail("':'");
      out.members_.emplace_back(std::move(name), value(depth - 1));
    });
    std::unordered_set<std::string_view> names;
    for (const auto& member : out.members_)
      if (!names.insert(member.first).second)
        throw InvalidArgument("the JSON text has the name '", member.first,
                              "' twice in one object");
  }

  void array(Json& out, int depth) {
    out.kind_ = Json::Kind::array;
    items(']', "',' or ']'", [&] { out.items_.push_back(value(depth - 1)); });
  }

  std::string number() {
    const std::size_t begin = at_;
    const auto digits = [&] {
      if (at_ >= text_.size() || !is_digit(text_[at_])) fail("a digit");
      while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
    };
    take('-');
    if (!take('0')) digits();
    if (take('.')) digits();
    if (take('e') || take('E')) {
      if (!take('+')) take('-');
      digits();
    }
    return std::string(text_.substr(begin, at_ - begin));
  }

  std::uint32_t four_digits() {
    std::uint32_t code = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char c = at_ < text_.size() ? text_[at_] : '\0';
      const int digit = is_digit(c)            ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) fail("a hexadecimal digit");
      code = code << 4 | static_cast<std::uint32_t>(digit);
    }
    return code;
  }

  void escape(std::string& out) {
    static constexpr std::string_view letters = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    if (const auto found = letters.find(c); found != std::string_view::npos && c != '\0') {
      out += meant[found];
      ++at_;
      return;
    }
    if (!take('u')) fail("an escaped character");
    std::uint32_t code = four_digits();
    if (code >= 0xdc00 && code < 0xe000) fail("the first half of a surrogate pair before this");
    if (code >= 0xd800 && code < 0xdc00) {
      if (!take_word("\\u")) fail("the second half of a surrogate pair");
      const std::uint32_t second = four_digits();
      if (second < 0xdc00 || second >= 0xe000) fail("the second half of a surrogate pair");
      code = 0x10000 + ((code - 0xd800) << 10) + (second - 0xdc00);
    }
    append_utf8(out, code);
  }

  std::string string() {
    if (!take('"')) fail("a string");
    std::string out;
    while (true) {
      const std::size_t begin = at_;
      while (at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\\' &&
             static_cast<unsigned char>(text_[at_]) >= 0x20)
        ++at_;
      const std::string_view plain = text_.substr(begin, at_ - begin);
      if (!is_utf8(plain)) fail("valid UTF-8 in the string that ends");
      out += plain;
      if (take('"')) return out;
      if (!take('\\')) fail("the end of a string");
      escape(out);
    }
  }

  std::string_view text_;
  int depth_;
  std::size_t at_ = 0;
};

Json Json::parse(std::string_view text, int depth) { return JsonParser(text, depth).document(); }

void Json::need(Kind kind) const {
  if (kind_ != kind)
    throw InvalidArgument(kKinds[static_cast<std::size_t>(kind)], " is expected, it is ",
                          kKinds[static_cast<std::size_t>(kind_)]);
}

bool Json::boolean() const {
  need(Kind::boolean);
  return text_ == "t";
}

std::uint64_t Json::number() const {
  need(Kind::number);
  const auto value = parse_number(text_);
  if (!value) throw InvalidArgument("a whole number from 0 to 2^64 - 1 is expected, it is ", text_);
  return *value;
}

double Json::real() const {
  need(Kind::number);
  const auto value = parse_real(text_);
  if (!value) throw InvalidArgument("a number that a double holds is expected, it is ", text_);
  return *value;
}

std::optional<std::int64_t> Json::integer() const {
  need(Kind::number);
  std::int64_t value = 0;
  const char* const end = text_.data() + text_.size();
  if (const auto [at, error] = std::from_chars(text_.data(), end, value);
      error == std::errc() && at == end)
    return value;
  const auto wide = parse_real(text_);
  if (!wide || std::abs(*wide) >= 0x1p53 || *wide != std::trunc(*wide)) return std::nullopt;
  return static_cast<std::int64_t>(*wide);
}

std::int64_t Json::index() const {
  const std::uint64_t value = number();
  if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
    throw InvalidArgument("a number below 2^63 is expected, it is ", value);
  return static_cast<std::int64_t>(value);
}

const std::string& Json::string() const {
  need(Kind::string);
  return text_;
}
const std::vector<Json>& Json::items() const {
  need(Kind::array);
  return items_;
}
const std::vector<std::pair<std::string, Json>>& Json::members() const {
  need(Kind::object);
  return members_;
}
const Json* Json::find(std::string_view name) const {
  for (const auto& member : members())
    if (member.first == name) return &member.second;
  return nullptr;
}
const Json& Json::at(std::string_view name) const {
  const Json* found = find(name);
  if (!found) throw InvalidArgument("the name '", name, "' is missing");
  return *found;
}

}  // namespace tessera
