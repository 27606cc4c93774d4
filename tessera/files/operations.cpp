#include "tessera/files/operations.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/internal/descriptor.h"
#include "tessera/base/text.h"
#include "tessera/files/internal/checksum.h"

namespace tessera {
namespace {

[[noreturn]] void refuse_operation(const std::string& path, const std::string& what,
                                   int reason = errno) {
  throw FileError("'", path, "' cannot be ", what, ": ", std::strerror(reason));
}

template <class Call>
auto repeated(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace

FileOperations::~FileOperations() = default;

FileOperations::File FileOperations::open(const std::string& path, bool existing) {
  const int flags = O_WRONLY | O_CLOEXEC | O_NONBLOCK | (existing ? 0 : O_CREAT | O_EXCL);
  const int descriptor = repeated([&] { return ::open(path.c_str(), flags, 0666); });
  if (descriptor < 0) refuse_operation(path, "opened for writing");
  return {descriptor, path};
}

void FileOperations::write(const File& file, const void* data, std::size_t bytes,
                           std::uint64_t offset) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const std::size_t part = std::min<std::size_t>(bytes, std::size_t{1} << 30);
    const ssize_t done =
        repeated([&] { return ::pwrite(file.descriptor, at, part, static_cast<off_t>(offset)); });
    if (done < 0) refuse_operation(file.path, "written to");
    at += done;
    offset += static_cast<std::uint64_t>(done);
    bytes -= static_cast<std::size_t>(done);
  }
}

void FileOperations::resize(const File& file, std::uint64_t bytes) {
  if (repeated([&] { return ::ftruncate(file.descriptor, static_cast<off_t>(bytes)); }) != 0)
    refuse_operation(file.path, "made so long");
}

void FileOperations::sync(const File& file) {
  if (repeated([&] { return ::fsync(file.descriptor); }) != 0)
    refuse_operation(file.path, "synced to the disk");
}

void FileOperations::close(File& file) {
  const int descriptor = std::exchange(file.descriptor, -1);
  if (descriptor >= 0 && ::close(descriptor) != 0 && errno != EINTR)
    refuse_operation(file.path, "closed");
}

void FileOperations::rename(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) {
    const int reason = errno;
    refuse_operation(from, concat("moved to '", to, "'"), reason);
  }
}

bool FileOperations::remove(const std::string& path) {
  if (std::remove(path.c_str()) == 0) return true;
  if (errno != ENOENT) refuse_operation(path, "removed");
  return false;
}

bool FileOperations::make_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0777) == 0) return true;
  struct stat status{};
  if (errno != EEXIST || ::stat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode))
    refuse_operation(path, "made as a folder");
  return false;
}

void FileOperations::sync_folder(const std::string& path) {
  const Descriptor folder(
      repeated([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  if (!folder) refuse_operation(path, "opened as a folder");
  // Some file systems have no such call for folders, and say so.
  if (repeated([&] { return ::fsync(folder.get()); }) != 0 && errno != EINVAL && errno != ENOTSUP)
    refuse_operation(path, "synced");
}

std::shared_ptr<const void> FileOperations::lock(const std::string& path) {
  const auto open = [&](int flags) {
    return repeated([&] { return ::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, 0666); });
  };
  int descriptor = open(O_RDWR | O_CREAT);
  // The file of another user may be locked by whoever can read it.
  if (descriptor < 0 && errno == EACCES) descriptor = open(O_RDONLY);
  if (descriptor < 0) refuse_operation(path, "opened to be locked");
  // A child that was forked has the descriptor too, and neither holds nor ends the lock.
  std::shared_ptr<const void> held(new std::pair(descriptor, ::getpid()),
                                   [](const std::pair<int, pid_t>* lock) {
                                     if (lock->second == ::getpid()) ::flock(lock->first, LOCK_UN);
                                     ::close(lock->first);
                                     delete lock;
                                   });
  if (repeated([&] { return ::flock(descriptor, LOCK_EX | LOCK_NB); }) == 0) return held;
  const int reason = errno;
  if (reason == EWOULDBLOCK) return nullptr;
  throw NotAvailable("'", path, "' cannot be locked: ", std::strerror(reason));
}

std::shared_ptr<FileOperations> FileOperations::system() {
  return std::make_shared<FileOperations>();
}

std::string folder_of(const std::string& path) {
  const auto slash = path.find_last_of('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  if (error == std::errc::no_such_file_or_directory) return names;
  if (error) refuse_operation(folder, "read as a folder", error.value());
  for (; entry != std::filesystem::directory_iterator(); entry.increment(error))
    names.push_back(entry->path().filename().string());
  // Half a listing would pass for a folder that holds no more.
  if (error) refuse_operation(folder, "read to its end as a folder", error.value());
  std::ranges::sort(names);
  return names;
}

std::string make_nonce() {
  static std::atomic<std::uint64_t> count{0};
  std::random_device device;
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  return to_hex(Hash()
                    .number(std::uint64_t{device()} << 32 | device())
                    .number(static_cast<std::uint64_t>(::getpid()))
                    .number(static_cast<std::uint64_t>(now))
                    .number(count++)
                    .value());
}

OpenFile::OpenFile(std::shared_ptr<FileOperations> operations, const std::string& path,
                   bool existing)
    : operations_(std::move(operations)), file_(operations_->open(path, existing)) {}

OpenFile::~OpenFile() {
  try {
    close();
  } catch (const std::exception&) {
    // The contents are not needed.
  }
}

void OpenFile::close() {
  if (file_.descriptor >= 0) operations_->close(file_);
}

namespace {

void sync_moved(FileOperations& operations, const std::string& path) {
  try {
    operations.sync_folder(folder_of(path));
  } catch (const FileError& e) {
    throw FileError(e.what(), "; '", path,
                    "' is complete and at its place, but a crash of the system may undo it");
  }
}

}  // namespace

void move_into_place(FileOperations& operations, const std::string& from, const std::string& to) {
  operations.rename(from, to);
  sync_moved(operations, to);
}

AtomicFile::AtomicFile(const std::string& path, std::shared_ptr<FileOperations> operations,
                       const std::string& nonce)
    : path_(path),
      operations_(std::move(operations)),
      file_(operations_, concat(path, ".tmp-", nonce)) {}

AtomicFile::~AtomicFile() {
  if (moved_) return;
  try {
    file_.close();
  } catch (const std::exception&) {
    // It is to be removed anyhow.
  }
  try {
    operations_->remove(file_.path());
  } catch (const std::exception&) {
    // A file that stays behind has a name that no reader trusts.
  }
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  file_.write(data, bytes, size_);
  size_ += bytes;
}

void AtomicFile::commit() {
  file_.sync();
  file_.close();
  operations_->rename(file_.path(), path_);
  moved_ = true;
  sync_moved(*operations_, path_);
}

}  // namespace tessera
