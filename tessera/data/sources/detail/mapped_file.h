#pragma once
// A file mapped into memory for reading.

#include <cstddef>
#include <string>

#include "tessera/base/pinned.h"

namespace tessera::detail {

class MappedFile : Pinned {
 public:
  /// Throws FileError if it is no regular file or cannot be opened or mapped. An empty file has
  /// null data.
  explicit MappedFile(const std::string& path);
  ~MappedFile();

  const std::string& path() const { return path_; }
  const char* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::string path_;
  const char* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace tessera::detail
