#pragma once
// Files that are read safely: a named pipe without a writer does not block the reader, and a file
// that shrinks while it is read is an error, whereas a mapped one ends the process by SIGBUS.

#include <cstddef>
#include <cstdint>
#include <string>

#include "tessera/base/internal/descriptor.h"
#include "tessera/base/pinned.h"

namespace tessera {

/// A regular file that any number of threads read at any offset at the same time.
class RandomAccessFile : Pinned {
 public:
  /// Throws FileError if it is absent, unreadable or no regular file.
  explicit RandomAccessFile(const std::string& path);

  const std::string& path() const { return path_; }
  /// Size in bytes when it was opened.
  std::uint64_t size() const { return size_; }
  /// Fills `out` with `bytes` bytes from `offset` on. Throws FileError if the file ends before (it
  /// was truncated or replaced) or cannot be read.
  void read(std::uint64_t offset, void* out, std::size_t bytes) const;

 private:
  std::string path_;
  Descriptor file_;
  std::uint64_t size_ = 0;
};

/// The contents of a small file, or of a pipe with a writer. Throws FileError if it cannot be read,
/// holds more than `most` bytes, or is a pipe that delivers nothing for 60 s.
std::string read_whole_file(const std::string& path, std::size_t most = std::size_t{64} << 20);

}  // namespace tessera
