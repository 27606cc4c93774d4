#pragma once
// ReadFile: a regular file, read at any place by any number of threads.
//
//   const ReadFile file("net.safetensors");
//   file.read(buffer, 16, 8);            // bytes 8 to 23
//   file.read_box(buffer, 4, 40, {10, 6}, {{2, 5}, {0, 3}});
//     // of a [10, 6] array of 4-byte elements that begins at byte 40: rows 2 to 4, columns 0 to 2

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/file.h"

namespace tessera {

/// A RandomAccessFile that reads boxes of arrays and counts what it reads.
class ReadFile {
 public:
  /// Throws FileError as RandomAccessFile does.
  explicit ReadFile(const std::string& path) : file_(path) {}

  const std::string& path() const { return file_.path(); }
  /// Bytes, when it was opened.
  std::uint64_t size() const { return file_.size(); }
  /// Bytes that were asked of the system so far.
  std::uint64_t bytes_read() const { return read_; }

  /// Throws FileError where the file ends before, as one does that was cut short meanwhile.
  void read(void* out, std::size_t bytes, std::uint64_t offset) const;

  /// An array of `shape`, row-major, that begins at byte `offset`: the elements of each dim from
  /// `begin`, `count` of them, `stride` apart, packed row-major into `out`. The lists are as long
  /// as the shape and inside it (the caller has checked). Runs of bytes that lie near each other
  /// are read at once where that reads at most `max_over_read` times the bytes that are needed
  /// (1: not one byte more).
  struct Range {
    std::int64_t begin = 0, count = 0, stride = 1;
  };
  void read_box(void* out, std::size_t element, std::uint64_t offset,
                const std::vector<std::int64_t>& shape, const std::vector<Range>& box,
                double max_over_read = 1) const;

 private:
  RandomAccessFile file_;
  mutable std::atomic<std::uint64_t> read_{0};
};

}  // namespace tessera
