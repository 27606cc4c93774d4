#pragma once
// JSON and YAML texts as one kind of value, so that each schema is read by one piece of code.

#include <nlohmann/json.hpp>
#include <string>

#include "tessera/config/format.h"

namespace tessera::detail {

using Json = nlohmann::ordered_json;

/// Throws ConfigFileError ("source:line: ...") for a syntax error, a key that is duplicated in one
/// object, more than 400 levels, and more than 4 million values (YAML's aliases are counted
/// wherever they stand).
Json parse_document(const std::string& text, FileFormat format, const std::string& source);
std::string write_document(const Json& value, FileFormat format);

/// ".json" -> json; ".yaml", ".yml" -> yaml; anything else: ConfigFileError.
FileFormat format_of(const std::string& path);
/// Throws ConfigFileError for a file that cannot be read, is empty or has more than 64 MiB.
std::string read_text(const std::string& path);
/// A value for a message: on one line, and cut where it is long.
std::string shown(const Json& value);
void write_text(const std::string& path, const std::string& text);

}  // namespace tessera::detail
