#include "tessera/files/read_file.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "tessera/base/internal/file.h"

namespace tessera {

ReadFile::ReadFile(const std::string& path) : path_(path) {
  const auto file = std::make_shared<const RandomAccessFile>(path);
  size_ = file->size();
  fetch_ = [file](std::uint64_t offset, void* out, std::size_t bytes) {
    file->read(offset, out, bytes);
  };
}

ReadFile::ReadFile(std::string path, std::uint64_t size, Fetch fetch)
    : path_(std::move(path)), size_(size), fetch_(std::move(fetch)) {}

void ReadFile::read(void* out, std::size_t bytes, std::uint64_t offset) const {
  read_ += bytes;
  fetch_(offset, out, bytes);
}

namespace {

// Joins runs of bytes that are near each other into one read.
class RunReader {
 public:
  RunReader(const ReadFile& file, char* out, double max_over_read)
      : file_(file), out_(out), ratio_(std::max(max_over_read, 1.0)) {}

  void add(std::uint64_t offset, std::size_t bytes) {
    if (runs_.size() == 1 && offset == end_) {
      runs_[0].bytes += bytes;
    } else {
      const std::uint64_t span = runs_.empty() ? 0 : offset + bytes - runs_[0].offset;
      if (span > kWindow ||
          !(static_cast<double>(span) <= ratio_ * static_cast<double>(needed_ + bytes)))
        flush();
      runs_.push_back({offset, bytes});
    }
    end_ = offset + bytes;
    needed_ += bytes;
  }

  void flush() {
    if (runs_.size() == 1) {
      file_.read(out_, runs_[0].bytes, runs_[0].offset);
      out_ += runs_[0].bytes;
    } else if (!runs_.empty()) {
      const std::uint64_t begin = runs_[0].offset;
      window_.resize(end_ - begin);
      file_.read(window_.data(), window_.size(), begin);
      for (const Run& run : runs_) {
        std::memcpy(out_, window_.data() + (run.offset - begin), run.bytes);
        out_ += run.bytes;
      }
    }
    runs_.clear();
    needed_ = 0;
  }

 private:
  static constexpr std::uint64_t kWindow = 1 << 20;
  struct Run {
    std::uint64_t offset;
    std::size_t bytes;
  };
  const ReadFile& file_;
  char* out_;
  double ratio_;
  std::vector<Run> runs_;
  std::size_t needed_ = 0;
  std::uint64_t end_ = 0;
  std::vector<char> window_;
};

}  // namespace

void ReadFile::read_box(void* out, std::size_t element, std::uint64_t offset,
                        const std::vector<std::int64_t>& shape, const std::vector<Range>& box,
                        double max_over_read) const {
  for (const Range& range : box)
    if (range.count == 0) return;
  // The innermost dims that are taken completely form one run with the next dim.
  std::size_t outer = shape.size();
  std::uint64_t run = element;
  while (outer > 0 && box[outer - 1].begin == 0 && box[outer - 1].count == shape[outer - 1] &&
         box[outer - 1].stride == 1)
    run *= static_cast<std::uint64_t>(shape[--outer]);
  std::uint64_t step = run;
  std::int64_t picked = 1, stride = 1;
  std::uint64_t first = offset;
  if (outer > 0) {
    const Range& range = box[--outer];
    first += static_cast<std::uint64_t>(range.begin) * step;
    if (range.stride == 1) {
      run *= static_cast<std::uint64_t>(range.count);
    } else {
      picked = range.count;
      stride = range.stride;
    }
    step *= static_cast<std::uint64_t>(shape[outer]);
  }
  std::vector<std::uint64_t> steps(outer);
  for (std::size_t d = outer; d-- > 0; step *= static_cast<std::uint64_t>(shape[d]))
    steps[d] = step;
  for (std::size_t d = 0; d < outer; ++d)
    first += static_cast<std::uint64_t>(box[d].begin) * steps[d];
  RunReader reader(*this, static_cast<char*>(out), max_over_read);
  std::vector<std::int64_t> index(outer, 0);
  while (true) {
    std::uint64_t at = first;
    for (std::size_t d = 0; d < outer; ++d)
      at += static_cast<std::uint64_t>(index[d] * box[d].stride) * steps[d];
    for (std::int64_t i = 0; i < picked; ++i)
      reader.add(at + static_cast<std::uint64_t>(i * stride) * run, run);
    std::size_t d = outer;
    while (d > 0 && ++index[d - 1] == box[d - 1].count) index[--d] = 0;
    if (d == 0) break;
  }
  reader.flush();
}

}  // namespace tessera
