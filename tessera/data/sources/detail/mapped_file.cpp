#include "tessera/data/sources/detail/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/data/errors.h"

namespace tessera::detail {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  // Non-blocking, since opening a named pipe waits for its other end.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) throw FileError("'", path, "' cannot be opened: ", std::strerror(errno));
  struct stat status{};
  if (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(file);
    throw FileError("'", path, "' is no regular file");
  }
  size_ = static_cast<std::size_t>(status.st_size);
  void* mapped = size_ == 0 ? nullptr : ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
  const int reason = errno;
  ::close(file);
  if (mapped == MAP_FAILED)
    throw FileError("'", path, "' cannot be mapped: ", std::strerror(reason));
  data_ = static_cast<const char*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<char*>(data_), size_);
}

}  // namespace tessera::detail
