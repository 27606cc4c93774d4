#pragma once
// ReadFile: a file that any number of threads read at any offset.
//
//   const ReadFile file("net.safetensors");
//   file.read(buffer, 16, 8);            // bytes 8 to 23
//   file.read_box(buffer, 4, 40, {10, 6}, {{2, 5}, {0, 3}});
//     // of a [10, 6] array of 4-byte elements that begins at byte 40: rows 2 to 4, columns 0 to 2

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera {

/// Reads boxes of arrays, and counts what it reads.
class ReadFile {
 public:
  /// A regular file, opened once. Throws FileError as RandomAccessFile does.
  explicit ReadFile(const std::string& path);
  /// What lies elsewhere, of `size` bytes: `fetch` fills `out` with `bytes` bytes from `offset` on,
  /// called by several threads at once, or throws FileError. `path` is for messages.
  using Fetch = std::function<void(std::uint64_t offset, void* out, std::size_t bytes)>;
  ReadFile(std::string path, std::uint64_t size, Fetch fetch);

  const std::string& path() const { return path_; }
  /// Size in bytes when it was opened.
  std::uint64_t size() const { return size_; }
  /// Number of bytes requested from the system so far.
  std::uint64_t bytes_read() const { return read_; }

  /// Reads `bytes` bytes from `offset` on. Throws FileError if the file ends before, as one does
  /// that was truncated while it was open.
  void read(void* out, std::size_t bytes, std::uint64_t offset) const;

  /// Reads a box of an array of `shape`, row-major, that begins at byte `offset`: of each dim
  /// `count` elements from `begin`, `stride` apart, packed row-major into `out`. `element` is the
  /// size of one element in bytes. `box` has one range per dim, inside the shape (the caller has
  /// checked). Runs of bytes that are near each other are read at once if that reads at most
  /// `max_over_read` times the bytes that are needed (1: not one byte more).
  struct Range {
    std::int64_t begin = 0, count = 0, stride = 1;
  };
  void read_box(void* out, std::size_t element, std::uint64_t offset,
                const std::vector<std::int64_t>& shape, const std::vector<Range>& box,
                double max_over_read = 1) const;

 private:
  std::string path_;
  std::uint64_t size_ = 0;
  Fetch fetch_;
  mutable std::atomic<std::uint64_t> read_{0};
};

}  // namespace tessera
