#pragma once

namespace tessera {

/// The format of a document. Both formats hold the same fields.
enum class FileFormat { json, yaml };

}  // namespace tessera
