#include "tessera/config/detail/fields.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <map>

#include "tessera/base/deadline.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/config/errors.h"

namespace tessera::detail {
namespace {

/// A number that is finite and not negative, times what the unit after it stands for.
double with_unit(const std::string& text, const std::map<std::string, double>& units,
                 const std::string& where) {
  std::size_t begin = text.find_first_not_of(' ');
  if (begin == std::string::npos) begin = 0;
  if (begin < text.size() && text[begin] == '+') ++begin;
  double number = std::numeric_limits<double>::quiet_NaN();
  const auto read = std::from_chars(text.data() + begin, text.data() + text.size(), number);
  if (read.ec != std::errc() || !std::isfinite(number) || number < 0)
    throw ConfigFileError(where, ": '", printable(text),
                          "' does not begin with a finite number of at least 0");
  auto used = static_cast<std::size_t>(read.ptr - text.data());
  while (used < text.size() && text[used] == ' ') ++used;
  const std::string unit = text.substr(used);
  const auto factor = units.find(unit);
  if (factor == units.end()) {
    std::vector<std::string> names;
    for (const auto& [name, unused] : units)
      if (!name.empty()) names.push_back(name);
    throw ConfigFileError(where, ": '", printable(text), "' has the unknown unit '",
                          printable(unit), "'; the units are ", list(names));
  }
  return number * factor->second;
}

}  // namespace

double parse_bytes(const std::string& text, const std::string& where) {
  static const std::map<std::string, double> units{{"", 1},
                                                   {"B", 1},
                                                   {"kB", 1e3},
                                                   {"KB", 1e3},
                                                   {"MB", 1e6},
                                                   {"GB", 1e9},
                                                   {"TB", 1e12},
                                                   {"KiB", 1024.},
                                                   {"MiB", 1048576.},
                                                   {"GiB", 1073741824.},
                                                   {"TiB", 1099511627776.}};
  const bool rate = text.size() > 2 && text.compare(text.size() - 2, 2, "/s") == 0;
  return with_unit(rate ? text.substr(0, text.size() - 2) : text, units, where);
}

double parse_seconds(const std::string& text, const std::string& where) {
  static const std::map<std::string, double> units{
      {"", 1}, {"s", 1}, {"ms", 1e-3}, {"us", 1e-6}, {"ns", 1e-9}, {"min", 60}, {"h", 3600}};
  return with_unit(text, units, where);
}

Fields::Fields(const Json& value, std::string where) : value_(value), where_(std::move(where)) {
  if (!value.is_object())
    throw ConfigFileError(where_, ": must be an object (fields with values), but is ",
                          value.type_name());
}

const Json* Fields::raw(const std::string& field) {
  read_.insert(field);
  const auto at = value_.find(field);
  return at == value_.end() || at->is_null() ? nullptr : &*at;
}

std::optional<std::string> Fields::text(const std::string& field) {
  const Json* value = raw(field);
  if (!value) return std::nullopt;
  if (!value->is_string()) fail(field, "must be a text, but is ", shown(*value));
  return value->get<std::string>();
}

std::string Fields::required_text(const std::string& field) {
  const auto value = text(field);
  if (!value) fail(field, "is missing");
  return *value;
}

std::optional<std::int64_t> Fields::integer(const std::string& field, std::int64_t low,
                                            std::int64_t high) {
  const Json* value = raw(field);
  if (!value) return std::nullopt;
  const bool fits =
      value->is_number_integer() &&
      !(value->is_number_unsigned() && value->get<std::uint64_t>() > std::uint64_t(INT64_MAX));
  if (!fits || value->get<std::int64_t>() < low || value->get<std::int64_t>() > high)
    fail(field, "must be a whole number from ", low, " to ", high, ", but is ", shown(*value));
  return value->get<std::int64_t>();
}

std::optional<double> Fields::real(const std::string& field) {
  const Json* value = raw(field);
  if (!value) return std::nullopt;
  if (!value->is_number()) fail(field, "must be a number, but is ", shown(*value));
  return value->get<double>();
}

std::optional<bool> Fields::boolean(const std::string& field) {
  const Json* value = raw(field);
  if (!value) return std::nullopt;
  if (!value->is_boolean()) fail(field, "must be true or false, but is ", shown(*value));
  return value->get<bool>();
}

std::optional<std::vector<std::string>> Fields::texts(const std::string& field) {
  const Json* value = raw(field);
  if (!value) return std::nullopt;
  if (!value->is_array()) fail(field, "must be a list of texts, but is ", shown(*value));
  std::vector<std::string> items;
  for (const Json& item : *value) {
    if (!item.is_string()) fail(field, "must be a list of texts, but holds ", shown(item));
    items.push_back(item.get<std::string>());
  }
  return items;
}

std::optional<std::vector<int>> Fields::integers(const std::string& field) {
  const Json* value = raw(field);
  if (!value) return std::nullopt;
  if (!value->is_array()) fail(field, "must be a list of whole numbers, but is ", shown(*value));
  std::vector<int> items;
  for (const Json& item : *value) {
    if (!item.is_number_integer() || item.get<std::int64_t>() < INT32_MIN ||
        item.get<std::int64_t>() > INT32_MAX)
      fail(field, "must be a list of whole numbers, but holds ", shown(item));
    items.push_back(item.get<int>());
  }
  return items;
}

std::optional<std::chrono::milliseconds> Fields::duration(const std::string& field) {
  const Json* value = raw(field);
  if (!value) return std::nullopt;
  double ms = 0;
  if (value->is_number())
    ms = value->get<double>();
  else if (value->is_string())
    ms = 1000 * parse_seconds(value->get<std::string>(), where(field));
  else
    fail(field, "must be a duration such as \"30s\", but is ", shown(*value));
  if (!(ms >= 1) || ms > static_cast<double>(kLongestLimit.count()))
    fail(field, "must be a duration from 1 ms to 10 years (", kLongestLimit.count(),
         " ms), but is ", shown(*value));
  return std::chrono::milliseconds(std::llround(ms));
}

void Fields::finish() const {
  for (const auto& [name, unused] : value_.items()) {
    if (read_.contains(name)) continue;
    throw ConfigFileError(where(printable(name)), ": is not a field here; the fields are ",
                          list(read_));
  }
}

}  // namespace tessera::detail
