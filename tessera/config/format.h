#pragma once

namespace tessera {

/// How a document is written down. Both hold the same fields.
enum class FileFormat { json, yaml };

}  // namespace tessera
