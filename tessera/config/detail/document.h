#pragma once
// JSON and YAML texts as one kind of value, so that each schema is read by one piece of code.

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "tessera/config/errors.h"

namespace tessera::detail {

using Json = nlohmann::ordered_json;

/// Parses a document. Throws ConfigFileError ("source:line: ...") for a syntax error, a duplicate
/// key in one object, more than 400 levels, and more than 4 million values (YAML's aliases are
/// counted wherever they are used).
Json parse_document(const std::string& text, FileFormat format, const std::string& source);
/// Throws InvalidArgument for a text that the format cannot hold: no valid UTF-8; in YAML, one that
/// would be read back as another.
std::string write_document(const Json& value, FileFormat format);
/// The lines of the keys of a YAML text that parse_document() has read, by their path with dots
/// between ("trainer.max_steps"), counted from 1; of keys inside lists none.
std::map<std::string, int> lines_of(const std::string& text);

/// The format of a file by its ending: ".json" -> json; ".yaml", ".yml" -> yaml. Throws
/// ConfigFileError for anything else.
FileFormat format_of(const std::string& path);
/// The contents of a file. Throws ConfigFileError if it cannot be read, is empty or has more than
/// 64 MiB.
std::string read_text(const std::string& path);
/// A value for a message: on one line, and truncated if it is long.
std::string shown(const Json& value);
void write_text(const std::string& path, const std::string& text);

}  // namespace tessera::detail
