#include "tessera/checkpoint/safetensors.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/json_text.h"
#include "tessera/base/text.h"

namespace tessera::detail {

namespace {

const std::vector<std::pair<std::string, at::ScalarType>>& dtypes() {
  static const std::vector<std::pair<std::string, at::ScalarType>> all = {
      {"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf},        {"BF16", at::kBFloat16},
      {"I64", at::kLong},   {"I32", at::kInt},   {"I16", at::kShort},       {"I8", at::kChar},
      {"U8", at::kByte},    {"BOOL", at::kBool}, {"C64", at::kComplexFloat}};
  return all;
}

// The JSON that such headers are made of: objects, lists of whole numbers, strings.
class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  [[noreturn]] void fail(const char* what) const {
    throw InvalidArgument(
        concat("a safetensors header is broken at byte ", at_, ": ", what, " is expected there"));
  }
  void space() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  bool take(char c) {
    space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void need(char c, const char* what) {
    if (!take(c)) fail(what);
  }
  bool ended() {
    space();
    return at_ == text_.size();
  }
  std::string string() {
    need('"', "a string");
    std::string out;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (text_[at_] != '\\') {
        out += text_[at_++];
        continue;
      }
      if (++at_ >= text_.size()) fail("an escaped character");
      switch (text_[at_++]) {
        case '"':
          out += '"';
          break;
        case '\\':
          out += '\\';
          break;
        case '/':
          out += '/';
          break;
        case 'b':
          out += '\b';
          break;
        case 'f':
          out += '\f';
          break;
        case 'n':
          out += '\n';
          break;
        case 'r':
          out += '\r';
          break;
        case 't':
          out += '\t';
          break;
        case 'u':
          append_code(out);
          break;
        default:
          fail("an escaped character");
      }
    }
    need('"', "the end of a string");
    return out;
  }
  std::uint64_t number() {
    space();
    const std::size_t first = at_;
    std::uint64_t n = 0;
    while (at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_]))) {
      if (n > (std::uint64_t{1} << 62) / 10) fail("a number below 2^62");
      n = 10 * n + static_cast<std::uint64_t>(text_[at_++] - '0');
    }
    if (at_ == first) fail("a whole number");
    return n;
  }
  std::vector<std::uint64_t> numbers() {
    std::vector<std::uint64_t> all;
    need('[', "a list");
    if (take(']')) return all;
    do all.push_back(number());
    while (take(','));
    need(']', "the end of a list");
    return all;
  }
  template <class Entry>
  void object(Entry entry) {
    need('{', "an object");
    if (take('}')) return;
    do {
      const std::string key = string();
      need(':', "a colon");
      entry(key);
    } while (take(','));
    need('}', "the end of an object");
  }

 private:
  unsigned code() {
    if (at_ + 4 > text_.size()) fail("four hexadecimal digits");
    unsigned n = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = text_[at_++];
      if (!std::isxdigit(static_cast<unsigned char>(c))) fail("four hexadecimal digits");
      n = 16 * n + static_cast<unsigned>(std::isdigit(static_cast<unsigned char>(c))
                                             ? c - '0'
                                             : (c | 0x20) - 'a' + 10);
    }
    return n;
  }
  void append_code(std::string& out) {
    unsigned n = code();
    if (n >= 0xd800 && n < 0xdc00) {
      if (at_ + 2 > text_.size() || text_[at_] != '\\' || text_[at_ + 1] != 'u')
        fail("the second half of a surrogate pair");
      at_ += 2;
      n = 0x10000 + ((n - 0xd800) << 10) + (code() - 0xdc00);
    }
    const auto put = [&](unsigned byte) { out += static_cast<char>(byte); };
    if (n < 0x80) {
      put(n);
    } else if (n < 0x800) {
      put(0xc0 | n >> 6);
      put(0x80 | (n & 0x3f));
    } else if (n < 0x10000) {
      put(0xe0 | n >> 12);
      put(0x80 | (n >> 6 & 0x3f));
      put(0x80 | (n & 0x3f));
    } else {
      put(0xf0 | n >> 18);
      put(0x80 | (n >> 12 & 0x3f));
      put(0x80 | (n >> 6 & 0x3f));
      put(0x80 | (n & 0x3f));
    }
  }

  const std::string& text_;
  std::size_t at_ = 0;
};

std::uint64_t bytes_of(const StoredTensor& t) {
  std::uint64_t n = c10::elementSize(t.dtype);
  for (const auto d : t.shape) {
    if (d != 0 && n > (std::uint64_t{1} << 62) / static_cast<std::uint64_t>(d))
      throw InvalidArgument(concat("tensor '", t.name, "' is too large"));
    n *= static_cast<std::uint64_t>(d);
  }
  return n;
}

}  // namespace

std::string stored_dtype(at::ScalarType dtype, const std::string& name) {
  for (const auto& [text, type] : dtypes()) {
    if (type == dtype) return text;
  }
  throw InvalidArgument(concat("tensor '", name, "' is ", c10::toString(dtype),
                               ", which the safetensors format does not have; save it as "
                               "at::view_as_real of it, or convert it"));
}

std::string write_header(std::vector<StoredTensor>& tensors) {
  std::string json = "{";
  std::set<std::string> names;
  std::uint64_t at = 0;
  for (StoredTensor& t : tensors) {
    if (!names.insert(t.name).second || t.name == "__metadata__")
      throw InvalidArgument(
          concat("the name '", t.name,
                 "' stands twice or is reserved: give each tensor a name of its own"));
    t.begin = at;
    t.end = at += bytes_of(t);
    std::string shape = list(t.shape, t.shape.size());
    json += concat(json.size() > 1 ? "," : "", json_text(t.name), ":{\"dtype\":\"",
                   stored_dtype(t.dtype, t.name), "\",\"shape\":", shape, ",\"data_offsets\":[",
                   t.begin, ",", t.end, "]}");
  }
  json += "}";
  while (json.size() % 8 != 0) json += ' ';
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(json.size() >> 8 * i & 0xff);
  return out + json;
}

std::vector<StoredTensor> read_header(const std::string& json, std::uint64_t data_bytes) {
  std::vector<StoredTensor> tensors;
  std::set<std::string> names;
  Reader in(json);
  in.object([&](const std::string& name) {
    if (name == "__metadata__") {
      in.object([&](const std::string&) { in.string(); });
      return;
    }
    StoredTensor t;
    t.name = name;
    if (!names.insert(name).second)
      throw InvalidArgument(concat("a safetensors header names '", name, "' twice"));
    in.object([&](const std::string& key) {
      if (key == "dtype") {
        const std::string text = in.string();
        const auto found = std::find_if(dtypes().begin(), dtypes().end(),
                                        [&](const auto& d) { return d.first == text; });
        if (found == dtypes().end())
          throw InvalidArgument(
              concat("tensor '", name, "' has the dtype ", text, ", which libtorch does not have"));
        t.dtype = found->second;
      } else if (key == "shape") {
        for (const auto n : in.numbers()) t.shape.push_back(static_cast<std::int64_t>(n));
      } else if (key == "data_offsets") {
        const auto range = in.numbers();
        if (range.size() != 2) in.fail("a list of two offsets");
        t.begin = range[0];
        t.end = range[1];
      } else {
        in.fail("dtype, shape or data_offsets");
      }
    });
    if (t.begin > t.end || t.end > data_bytes || t.end - t.begin != bytes_of(t)) {
      throw InvalidArgument(concat("tensor '", name, "' of shape ", list(t.shape),
                                   " is said to lie in bytes ", t.begin, " to ", t.end, " of ",
                                   data_bytes, ": the file is cut short or broken"));
    }
    tensors.push_back(std::move(t));
  });
  if (!in.ended()) in.fail("the end");
  return tensors;
}

}  // namespace tessera::detail
