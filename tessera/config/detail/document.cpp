#include "tessera/config/detail/document.h"

#include <yaml-cpp/yaml.h>

#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/config/errors.h"

namespace tessera::detail {
namespace {

constexpr int kDeepest = 100;

Json plain_scalar(const std::string& text) {
  static const std::regex integer("[-+]?[0-9]+"),
      real("[-+]?(\\.[0-9]+|[0-9]+(\\.[0-9]*)?)([eE][-+]?[0-9]+)?");
  if (text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL")
    return nullptr;
  if (text == "true" || text == "True" || text == "TRUE") return true;
  if (text == "false" || text == "False" || text == "FALSE") return false;
  try {
    if (std::regex_match(text, integer)) return std::stoll(text);
    if (std::regex_match(text, real)) return std::stod(text);
  } catch (const std::out_of_range&) {
  }
  return text;
}

Json from_yaml(const YAML::Node& node, const std::string& source, int depth) {
  const int line = node.Mark().line + 1;
  if (depth > kDeepest)
    throw ConfigFileError(concat(source, ":", line, ": nested deeper than ", kDeepest,
                                 " levels; an alias may contain itself"));
  switch (node.Type()) {
    case YAML::NodeType::Scalar:
      return node.Tag() == "!" ? Json(node.Scalar()) : plain_scalar(node.Scalar());
    case YAML::NodeType::Sequence: {
      Json array = Json::array();
      for (const auto& item : node) array.push_back(from_yaml(item, source, depth + 1));
      return array;
    }
    case YAML::NodeType::Map: {
      Json object = Json::object();
      for (const auto& entry : node) {
        const YAML::Node& key = entry.first;
        if (!key.IsScalar())
          throw ConfigFileError(concat(source, ":", line, ": a key is not a plain name"));
        if (object.contains(key.Scalar()))
          throw ConfigFileError(concat(source, ":", key.Mark().line + 1, ": the key '",
                                       key.Scalar(), "' stands twice"));
        object[key.Scalar()] = from_yaml(entry.second, source, depth + 1);
      }
      return object;
    }
    default:
      return nullptr;
  }
}

void to_yaml(const Json& value, YAML::Emitter& out) {
  const auto put_text = [&](const std::string& text) {
    const bool ambiguous = text.empty() || !plain_scalar(text).is_string();
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
  } else {
    out << value.dump();
  }
}

}  // namespace

Json parse_document(const std::string& text, FileFormat format, const std::string& source) {
  if (format == FileFormat::yaml) {
    try {
      return from_yaml(YAML::Load(text), source, 0);
    } catch (const YAML::Exception& error) {
      throw ConfigFileError(concat(source, ":", error.mark.line + 1, ": ", error.msg));
    }
  }
  std::vector<std::set<std::string>> keys;
  std::string repeated;
  const auto watch = [&](int, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second &&
        repeated.empty())
      repeated = value.get<std::string>();
    return true;
  };
  try {
    Json document = Json::parse(text, watch);
    if (!repeated.empty())
      throw ConfigFileError(
          concat(source, ": the key '", repeated, "' stands twice in one object"));
    return document;
  } catch (const Json::parse_error& error) {
    throw ConfigFileError(concat(source, ": ", error.what()));
  }
}

std::string write_document(const Json& value, FileFormat format) {
  if (format == FileFormat::json) return value.dump(1) + "\n";
  YAML::Emitter out;
  to_yaml(value, out);
  return std::string(out.c_str()) + "\n";
}

FileFormat format_of(const std::string& path) {
  const auto ends = [&](const std::string& end) {
    return path.size() >= end.size() &&
           path.compare(path.size() - end.size(), end.size(), end) == 0;
  };
  if (ends(".json")) return FileFormat::json;
  if (ends(".yaml") || ends(".yml")) return FileFormat::yaml;
  throw ConfigFileError(
      concat(path, ": the name must end in .json, .yaml or .yml, so that the format is known"));
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TextStream text;
  if (!file || !(text << file.rdbuf()))
    throw ConfigFileError(concat(path, ": cannot be read (or is empty); check the path"));
  return std::move(text).str();
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file)
    throw ConfigFileError(
        concat(path, ": cannot be written; check the folder and its permissions"));
}

}  // namespace tessera::detail
