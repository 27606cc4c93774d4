#pragma once
// The formats of documents, and the error for one that does not hold what it should.

#include "tessera/base/error.h"

namespace tessera {

/// The format of a document. Both formats hold the same fields.
enum class FileFormat { json, yaml };

/// Thrown for a file, or a text given in its place, that does not hold what it should. The message
/// begins with the source and, where known, the line or the path inside the document ("job.yaml:
/// children[1].size: ...").
class ConfigFileError : public ConfigurationError {
 public:
  using ConfigurationError::ConfigurationError;
};

}  // namespace tessera
