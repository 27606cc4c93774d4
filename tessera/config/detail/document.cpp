#include "tessera/config/detail/document.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <functional>
#include <set>
#include <vector>

#include "tessera/base/internal/file.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/config/errors.h"

namespace tessera::detail {
namespace {

// Levels of a document; code that walks one calls itself once per level.
constexpr int kDeepest = 400;
// Values of a document; each alias of YAML counts as often as it is used.
constexpr std::size_t kMostValues = 4'000'000;

// Keys of one object: finding one takes time proportional to their number.
constexpr std::size_t kMostKeys = 20'000;

// Counts the values of one document.
class Limits {
 public:
  explicit Limits(const std::string& source) : source_(source) {}
  // `line`: 0 if it is not known.
  void value(int depth, int line) {
    if (depth > kDeepest)
      fail(line, "nested deeper than ", kDeepest, " levels; an alias may contain itself");
    if (++values_ > kMostValues)
      fail(line, "more than ", kMostValues, " values; aliases are counted wherever they stand");
  }
  void keys(std::size_t count, int line) const {
    if (count > kMostKeys) fail(line, "an object with more than ", kMostKeys, " keys");
  }
  template <class... Why>
  [[noreturn]] void fail(int line, const Why&... why) const {
    throw ConfigFileError(source_, line > 0 ? concat(":", line) : "", ": ", why...);
  }

 private:
  const std::string& source_;
  std::size_t values_ = 0;
};

Json plain_scalar(const std::string& text) {
  if (text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL")
    return nullptr;
  if (text == "true" || text == "True" || text == "TRUE") return true;
  if (text == "false" || text == "False" || text == "FALSE") return false;
  const char* const begin = text.data() + (text.size() > 1 && text[0] == '+' ? 1 : 0);
  const char* const end = text.data() + text.size();
  std::int64_t integer = 0;
  const auto read = std::from_chars(begin, end, integer);
  // "+-1" is no number.
  if (read.ec == std::errc() && read.ptr == end && (begin == text.data() || *begin != '-'))
    return integer;
  // A whole number that is too large stays text.
  const bool sign = text[0] == '+' || text[0] == '-';
  const bool whole = text.find_first_not_of("0123456789", sign ? 1 : 0) == text.npos;
  if (const auto real = parse_real(text); real && !whole) return *real;
  return text;
}

Json from_yaml(const YAML::Node& node, Limits& limits, int depth) {
  const int line = node.Mark().line + 1;
  limits.value(depth, line);
  switch (node.Type()) {
    case YAML::NodeType::Scalar:
      return node.Tag() == "!" ? Json(node.Scalar()) : plain_scalar(node.Scalar());
    case YAML::NodeType::Sequence: {
      Json array = Json::array();
      for (const auto& item : node) array.push_back(from_yaml(item, limits, depth + 1));
      return array;
    }
    case YAML::NodeType::Map: {
      Json object = Json::object();
      limits.keys(node.size(), line);
      for (const auto& entry : node) {
        const YAML::Node& key = entry.first;
        if (!key.IsScalar()) limits.fail(line, "a key is not a plain name");
        if (object.contains(key.Scalar()))
          limits.fail(key.Mark().line + 1, "the key '", printable(key.Scalar()), "' is duplicated");
        object[key.Scalar()] = from_yaml(entry.second, limits, depth + 1);
      }
      return object;
    }
    default:
      return nullptr;
  }
}

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20; }

// YAML allows three control characters; yaml-cpp takes some others for the end of the document.
void refuse_control_characters(const std::string& text, const Limits& limits) {
  int line = 1;
  for (const char c : text) {
    if (is_control(c) && c != '\t' && c != '\n' && c != '\r')
      limits.fail(line, "byte ", static_cast<int>(c),
                  " is a control character that YAML does not allow; write it in double quotes, "
                  "\"\\x41\" being A");
    line += c == '\n';
  }
}

void to_yaml(const Json& value, YAML::Emitter& out) {
  const auto put_text = [&](const std::string& text) {
    // Without quotes these would be no text, the mark of a new document, or lose their end.
    const bool ambiguous = text.empty() || !plain_scalar(text).is_string() ||
                           text.starts_with("---") || text.starts_with("...") ||
                           std::any_of(text.begin(), text.end(), is_control);
    if (ambiguous) out << YAML::DoubleQuoted;
    out << text;
  };
  if (value.is_object()) {
    out << YAML::BeginMap;
    for (const auto& [key, item] : value.items()) {
      out << YAML::Key;
      put_text(key);
      out << YAML::Value;
      to_yaml(item, out);
    }
    out << YAML::EndMap;
  } else if (value.is_array()) {
    bool plain = true;
    for (const auto& item : value) plain = plain && item.is_primitive();
    if (plain) out << YAML::Flow;
    out << YAML::BeginSeq;
    for (const auto& item : value) to_yaml(item, out);
    out << YAML::EndSeq;
  } else if (value.is_string()) {
    put_text(value.get<std::string>());
  } else if (value.is_null()) {
    out << YAML::Null;
  } else {
    out << value.dump();
  }
}

}  // namespace

Json parse_document(const std::string& text, FileFormat format, const std::string& source) {
  if (format == FileFormat::yaml) {
    Limits limits(source);
    try {
      // yaml-cpp takes any bytes, which could neither be written again nor compared.
      static_cast<void>(Json(text).dump());
      refuse_control_characters(text, limits);
      return from_yaml(YAML::Load(text), limits, 0);
    } catch (const YAML::Exception& error) {
      throw ConfigFileError(source, ":", error.mark.line + 1, ": ", error.msg);
    } catch (const Json::type_error& error) {
      throw ConfigFileError(source, ": ", printable(error.what()));
    }
  }
  std::vector<std::set<std::string>> keys;
  std::string repeated;
  Limits limits(source);
  const auto watch = [&](int depth, Json::parse_event_t event, Json& value) {
    if (event != Json::parse_event_t::object_end && event != Json::parse_event_t::array_end)
      limits.value(depth, 0);
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second &&
        repeated.empty())
      repeated = value.get<std::string>();
    if (event == Json::parse_event_t::key) limits.keys(keys.back().size(), 0);
    return true;
  };
  try {
    Json document = Json::parse(text, watch);
    if (!repeated.empty())
      throw ConfigFileError(source, ": the key '", printable(repeated),
                            "' is duplicated in one object");
    return document;
  } catch (const Json::exception& error) {
    // Of a number that is too large the message holds every digit.
    throw ConfigFileError(source, ": ", printable(error.what(), 500));
  }
}

std::map<std::string, int> lines_of(const std::string& text) {
  std::map<std::string, int> lines;
  const std::function<void(const YAML::Node&, const std::string&)> visit =
      [&](const YAML::Node& node, const std::string& at) {
        if (!node.IsMap()) return;
        for (const auto& entry : node) {
          const std::string key = dotted(at, entry.first.Scalar());
          lines[key] = entry.first.Mark().line + 1;
          visit(entry.second, key);
        }
      };
  visit(YAML::Load(text), "");
  return lines;
}

std::string write_document(const Json& value, FileFormat format) {
  if (format == FileFormat::json) {
    try {
      return value.dump(1) + "\n";
    } catch (const Json::type_error& error) {
      throw InvalidArgument("a name that is no valid UTF-8 cannot be written: ",
                            printable(error.what()));
    }
  }
  YAML::Emitter out;
  to_yaml(value, out);
  std::string text = std::string(out.c_str()) + "\n";
  // yaml-cpp writes some characters as others.
  try {
    if (parse_document(text, format, "the text that was written") == value) return text;
  } catch (const ConfigFileError& error) {
    throw InvalidArgument("what is to be written could not be read again: ", error.what());
  }
  throw InvalidArgument(
      "a name or a value cannot be written as YAML: it would be read as another; write JSON");
}

FileFormat format_of(const std::string& path) {
  if (path.ends_with(".json")) return FileFormat::json;
  if (path.ends_with(".yaml") || path.ends_with(".yml")) return FileFormat::yaml;
  throw ConfigFileError(path,
                        ": the name must end in .json, .yaml or .yml, so that the format is known");
}

std::string read_text(const std::string& path) {
  try {
    std::string text = read_whole_file(path);
    if (text.empty()) throw ConfigFileError(path, ": is empty; check the path");
    return text;
  } catch (const FileError& error) {
    throw ConfigFileError(path, ": cannot be read: ", error.what());
  }
}

std::string shown(const Json& value) {
  constexpr std::size_t most = 200;
  // Of a large value, only its kind.
  if (value.is_structured() && value.size() > most)
    return concat("a", value.is_array() ? " list" : "n object", " of ", value.size(), " items");
  return printable(value.dump(-1, ' ', false, Json::error_handler_t::replace), most);
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file)
    throw ConfigFileError(path, ": cannot be written; check the folder and its permissions");
}

}  // namespace tessera::detail
