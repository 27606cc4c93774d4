#include "tessera/config/settings.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tessera/base/internal/name.h"
#include "tessera/base/internal/nearest.h"
#include "tessera/base/internal/split.h"
#include "tessera/base/text.h"
#include "tessera/config/detail/document.h"
#include "tessera/config/detail/fields.h"

namespace tessera {
namespace {

using detail::Json;

[[noreturn]] void refuse(const std::string& where, const std::string& key, const char* kind,
                         const Json& value) {
  throw ConfigFileError(where, ": ", key, " must be ", kind, ", but is ", detail::shown(value));
}

template <class Integer>
Integer integer_of(const Json& value, const std::string& where, const std::string& key) {
  constexpr auto low = std::numeric_limits<Integer>::min(),
                 high = std::numeric_limits<Integer>::max();
  if (!value.is_number_integer() ||
      (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t(high)) ||
      value.get<std::int64_t>() < low || value.get<std::int64_t>() > high)
    refuse(where, key, "a whole number", value);
  return value.get<Integer>();
}

// Sets a target, which says what it must be given.
struct Put {
  const Json& value;
  const std::string& where;
  const std::string& key;

  void operator()(std::nullptr_t) const {}
  void operator()(bool* target) const {
    if (!value.is_boolean()) refuse(where, key, "true or false", value);
    *target = value.get<bool>();
  }
  void operator()(int* target) const { *target = integer_of<int>(value, where, key); }
  void operator()(std::int64_t* target) const {
    *target = integer_of<std::int64_t>(value, where, key);
  }
  void operator()(double* target) const {
    if (!value.is_number()) refuse(where, key, "a number", value);
    *target = value.get<double>();
  }
  void operator()(std::string* target) const {
    // A name of digits is a name.
    if (value.is_structured()) refuse(where, key, "a text", value);
    *target = value.is_string() ? value.get<std::string>() : value.dump();
  }
  void operator()(std::chrono::milliseconds* target) const {
    if (!value.is_number() && !value.is_string())
      refuse(where, key, "a duration such as \"20min\"", value);
    const double ms = value.is_number() ? value.get<double>()
                                        : 1000 * detail::parse_seconds(value.get<std::string>(),
                                                                       concat(where, ": ", key));
    constexpr double kTenYears = 1000. * 3600 * 24 * 3653;
    if (!(ms >= 0) || ms > kTenYears) refuse(where, key, "a duration up to 10 years", value);
    *target = std::chrono::milliseconds(std::llround(ms));
  }
  void operator()(NamedNumbers* target) const {
    NamedNumbers all;
    each([&](const std::string& name, const Json& item) {
      all.emplace_back(name, integer_of<int>(item, where, concat(key, ".", name)));
    });
    *target = std::move(all);
  }
  void operator()(NamedTexts* target) const {
    NamedTexts all;
    each([&](const std::string& name, const Json& item) {
      if (!item.is_string()) refuse(where, concat(key, ".", name), "a text", item);
      all.emplace_back(name, item.get<std::string>());
    });
    *target = std::move(all);
  }

 private:
  // Of names with values, or of a text "a=1,b=2".
  template <class F>
  void each(const F& take) const {
    if (value.is_object()) {
      for (const auto& [name, item] : value.items()) take(name, item);
      return;
    }
    if (!value.is_string()) refuse(where, key, "names with values", value);
    for (const std::string& part : split(value.get<std::string>(), ',')) {
      const std::size_t equals = part.find('=');
      if (equals == std::string::npos || equals == 0)
        refuse(where, key, "names with values, as in a=1,b=2", value);
      take(part.substr(0, equals),
           detail::parse_document(part.substr(equals + 1), FileFormat::yaml, where));
    }
  }
};

struct Get {
  Json operator()(std::nullptr_t) const { return nullptr; }
  template <class T>
  Json operator()(T* target) const {
    return *target;
  }
  // Numbers that a file does not have: the default stands where there is none.
  Json operator()(double* target) const {
    return std::isfinite(*target) ? Json(*target) : Json(nullptr);
  }
  Json operator()(std::chrono::milliseconds* target) const {
    return target->count() == 0 ? Json(0) : Json(concat(target->count(), "ms"));
  }
  Json operator()(NamedNumbers* target) const { return object(*target); }
  Json operator()(NamedTexts* target) const { return object(*target); }

 private:
  template <class Pairs>
  static Json object(const Pairs& pairs) {
    Json all = Json::object();
    for (const auto& [name, value] : pairs) all[name] = value;
    return all;
  }
};

struct Kind {
  const char* operator()(std::nullptr_t) const { return ""; }
  const char* operator()(const bool*) const { return "true or false"; }
  const char* operator()(const int*) const { return "whole number"; }
  const char* operator()(const std::int64_t*) const { return "whole number"; }
  const char* operator()(const double*) const { return "number"; }
  const char* operator()(const std::string*) const { return "text"; }
  const char* operator()(const std::chrono::milliseconds*) const { return "duration"; }
  const char* operator()(const NamedNumbers*) const { return "names with whole numbers"; }
  const char* operator()(const NamedTexts*) const { return "names with texts"; }
};

bool within(const std::string& inner, const std::string& outer) {
  return inner.size() > outer.size() && inner.starts_with(outer) && inner[outer.size()] == '.';
}

}  // namespace

void Settings::add_setting(Setting setting) {
  for (const Setting& s : settings_)
    if (s.key == setting.key || within(s.key, setting.key) || within(setting.key, s.key))
      throw InvalidArgument("the setting '", setting.key, "' beside '", s.key,
                            "': keys are unique, and none "
                            "lies within another");
  if (setting.key.empty()) throw InvalidArgument("a setting has no key");
  settings_.push_back(std::move(setting));
}

// One document that is being read.
struct Settings::Reader {
  Settings& of;
  const std::string& source;
  std::map<std::string, int> lines;

  std::string where(const std::string& key) const {
    const auto line = lines.find(key);
    return line == lines.end() ? source : concat(source, ":", line->second);
  }

  void read(const Json& document, const std::string& at) const {
    for (const auto& [name, value] : document.items()) {
      const std::string key = dotted(at, name);
      const auto found =
          std::ranges::find_if(of.settings_, [&](const Setting& s) { return s.key == key; });
      const bool section =
          std::ranges::any_of(of.settings_, [&](const Setting& s) { return within(s.key, key); });
      if (found != of.settings_.end())
        put(*found, value);
      else if (section && value.is_object())
        read(value, key);
      else if (section && !value.is_null())
        refuse(where(key), key, "a section with keys of its own", value);
      else if (!section)
        unknown(key);
    }
  }

  // Absent is what has no value: it stays as it is.
  void put(const Setting& setting, const Json& value) const {
    if (value.is_null()) return;
    const std::string place = where(setting.key);
    if (!setting.choice.set) return std::visit(Put{value, place, setting.key}, setting.target);
    const auto& names = setting.choice.names;
    const auto name =
        std::ranges::find(names, value.is_string() ? value.get<std::string>() : value.dump());
    if (name == names.end())
      refuse(place, setting.key, concat("one of ", list(names)).c_str(), value);
    setting.choice.set(static_cast<std::size_t>(name - names.begin()));
  }

  [[noreturn]] void unknown(const std::string& key) const {
    std::vector<std::string> keys;  // and sections
    for (const Setting& s : of.settings_) {
      for (std::size_t dot = s.key.find('.'); dot != s.key.npos; dot = s.key.find('.', dot + 1))
        keys.push_back(s.key.substr(0, dot));
      keys.push_back(s.key);
    }
    throw ConfigFileError(where(key), ": there is no key '", printable(key), "'; the nearest is '",
                          nearest(key.substr(0, 200), keys), "'");
  }
};

void Settings::read_file(const std::string& path) {
  const std::string text = detail::read_text(path);
  if (detail::format_of(path) == FileFormat::yaml) return read_text(text, path);
  const Json document = detail::parse_document(text, FileFormat::json, path);
  if (!document.is_object()) refuse(path, "the document", "sections with keys", document);
  Reader{*this, path, {}}.read(document, "");
}

void Settings::read_text(const std::string& text, const std::string& source) {
  const Json document = detail::parse_document(text, FileFormat::yaml, source);
  if (document.is_null()) return;
  if (!document.is_object()) refuse(source, "the document", "sections with keys", document);
  Reader{*this, source, detail::lines_of(text)}.read(document, "");
}

void Settings::set(const std::string& assignment) {
  const std::size_t equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0)
    throw InvalidArgument("--set ", printable(assignment),
                          ": write KEY=VALUE, as in trainer.max_steps=100");
  const std::string source = concat("--set ", printable(assignment));
  Json document = detail::parse_document(assignment.substr(equals + 1), FileFormat::yaml, source);
  std::vector<std::string> path = split(assignment.substr(0, equals), '.');
  for (; !path.empty(); path.pop_back()) {
    Json outer = Json::object();
    outer[path.back()] = std::move(document);
    document = std::move(outer);
  }
  Reader{*this, source, {}}.read(document, "");
}

std::vector<std::string> Settings::read_arguments(int argc, const char* const* argv) {
  std::vector<std::string> others, overrides;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool file = argument == "--config", override = argument == "--set";
    if (!file && !override) {
      others.push_back(argument);
      continue;
    }
    if (++i == argc)
      throw InvalidArgument(argument, " stands at the end: ", file ? "a file" : "KEY=VALUE",
                            " comes after it");
    if (file)
      read_file(argv[i]);
    else
      overrides.emplace_back(argv[i]);
  }
  for (const std::string& one : overrides) set(one);
  return others;
}

std::string Settings::resolved() const {
  Json document = Json::object();
  for (const Setting& s : settings_) {
    Json* at = &document;
    for (const std::string& name : split(s.key, '.')) at = &(*at)[name];
    const std::size_t chosen = s.choice.get ? s.choice.get() : 0;
    if (!s.choice.get)
      *at = std::visit(Get(), s.target);
    else if (chosen < s.choice.names.size())
      *at = s.choice.names[chosen];
  }
  return detail::write_document(document, FileFormat::yaml);
}

std::string Settings::table() const {
  TextStream out;
  out << "| key | value | default | |\n| --- | --- | --- | --- |\n";
  for (const Setting& s : settings_) {
    const std::size_t chosen = s.choice.get ? s.choice.get() : 0;
    const Json now = s.choice.get
                         ? (chosen < s.choice.names.size() ? Json(s.choice.names[chosen]) : Json())
                         : std::visit(Get(), s.target);
    out << "| `" << s.key << "` | ";
    if (s.choice.get)
      out << '`' << joined(s.choice.names, "`, `") << '`';
    else
      out << std::visit(Kind(), s.target);
    const std::string shown = now.is_string() ? now.get<std::string>() : now.dump();
    const bool nothing = now.is_null() || shown.empty() || shown == "{}";
    out << " | " << (nothing ? "" : concat("`", shown, "`")) << " | " << s.help << " |\n";
  }
  return std::move(out).str();
}

}  // namespace tessera
