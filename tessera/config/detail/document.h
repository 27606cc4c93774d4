#pragma once
// JSON and YAML texts as one kind of value, so that each schema is read by one piece of code.

#include <nlohmann/json.hpp>
#include <string>

#include "tessera/config/format.h"

namespace tessera::detail {

using Json = nlohmann::ordered_json;

/// Throws ConfigFileError ("source:line: ...") for a syntax error, and for a key that stands twice
/// in one object.
Json parse_document(const std::string& text, FileFormat format, const std::string& source);
std::string write_document(const Json& value, FileFormat format);

/// ".json" -> json; ".yaml", ".yml" -> yaml; anything else: ConfigFileError.
FileFormat format_of(const std::string& path);
std::string read_text(const std::string& path);
void write_text(const std::string& path, const std::string& text);

}  // namespace tessera::detail
