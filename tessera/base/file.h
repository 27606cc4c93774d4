#pragma once
// Files that are read without harm: a named pipe without a writer does not hold the reader up, and
// a file that shrinks meanwhile is an error, where a mapped one ends the process by SIGBUS.

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera {

/// A regular file, read at any place by any thread at the same time.
class RandomAccessFile {
 public:
  /// Throws FileError if it is absent, unreadable or no regular file.
  explicit RandomAccessFile(const std::string& path);
  ~RandomAccessFile();
  RandomAccessFile(const RandomAccessFile&) = delete;
  RandomAccessFile& operator=(const RandomAccessFile&) = delete;

  const std::string& path() const { return path_; }
  /// Bytes, when it was opened.
  std::uint64_t size() const { return size_; }
  /// Fills `out` with the bytes from `offset` on. Throws FileError where the file ends before (it
  /// was cut or replaced) or cannot be read.
  void read(std::uint64_t offset, void* out, std::size_t bytes) const;

 private:
  std::string path_;
  int file_;
  std::uint64_t size_ = 0;
};

/// All of a small file, or of a pipe with a writer. Throws FileError where it cannot be read, holds
/// more than `most` bytes, or is a pipe that delivers nothing for 60 s.
std::string read_whole_file(const std::string& path, std::size_t most = std::size_t{64} << 20);

}  // namespace tessera
