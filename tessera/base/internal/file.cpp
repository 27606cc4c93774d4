#include "tessera/base/internal/file.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "tessera/base/error.h"

namespace tessera {
namespace {

constexpr int kPipeLimitMs = 60'000;

// Non-blocking, since opening a named pipe waits for its other end.
Descriptor open_to_read(const std::string& path) {
  Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file) throw FileError("'", path, "' cannot be opened: ", std::strerror(errno));
  return file;
}

}  // namespace

RandomAccessFile::RandomAccessFile(const std::string& path)
    : path_(path), file_(open_to_read(path)) {
  struct stat status{};
  if (fstat(file_.get(), &status) != 0 || !S_ISREG(status.st_mode))
    throw FileError("'", path, "' is no regular file");
  size_ = static_cast<std::uint64_t>(status.st_size);
}

void RandomAccessFile::read(std::uint64_t offset, void* out, std::size_t bytes) const {
  auto* at = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t size = pread(file_.get(), at, bytes, static_cast<off_t>(offset));
    if (size < 0 && errno == EINTR) continue;
    if (size < 0)
      throw FileError("'", path_, "' cannot be read at byte ", offset, ": ", std::strerror(errno));
    if (size == 0)
      throw FileError("'", path_, "' had ", size_, " bytes when it was opened and ends at ", offset,
                      " now: it was truncated or replaced while it was being read");
    at += size;
    offset += static_cast<std::uint64_t>(size);
    bytes -= static_cast<std::size_t>(size);
  }
}

std::string read_whole_file(const std::string& path, std::size_t most) {
  const Descriptor file = open_to_read(path);
  std::string text;
  char buffer[65536];
  for (;;) {
    const ssize_t size = ::read(file.get(), buffer, sizeof buffer);
    if (size == 0) return text;
    if (size > 0) {
      if (text.size() + static_cast<std::size_t>(size) > most)
        throw FileError("'", path, "' has more than ", most, " bytes");
      text.append(buffer, static_cast<std::size_t>(size));
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) throw FileError("'", path, "' cannot be read: ", std::strerror(errno));
    pollfd ready{file.get(), POLLIN, 0};
    const int events = poll(&ready, 1, kPipeLimitMs);
    if (events == 0)
      throw FileError("'", path, "' has delivered nothing for ", kPipeLimitMs / 1000, " s");
    if (events < 0 && errno != EINTR)
      throw FileError("'", path, "' cannot be read: ", std::strerror(errno));
  }
}

}  // namespace tessera
