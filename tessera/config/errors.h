#pragma once
// The error of the config room.

#include "tessera/base/error.h"

namespace tessera {

/// Thrown for a file, or a text given in its place, that does not hold what it should. The message
/// begins with the source and, where known, the line or the path inside the document ("job.yaml:
/// children[1].size: ...").
class ConfigFileError : public ConfigurationError {
 public:
  using ConfigurationError::ConfigurationError;
  ~ConfigFileError() override;
};

}  // namespace tessera
