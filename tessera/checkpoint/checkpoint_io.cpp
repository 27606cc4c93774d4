#include "tessera/checkpoint/checkpoint_io.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {

CheckpointFile::~CheckpointFile() = default;
CheckpointIO::~CheckpointIO() = default;

std::shared_ptr<const void> CheckpointIO::lock() {
  throw NotAvailable("'", where(""), "' has no locks");
}

namespace {

void make_folders(const std::string& path, FileOperations& operations) {
  if (path == "." || path == "/" || path.empty()) return;
  const std::string above = folder_of(path);
  try {
    if (operations.make_folder(path)) operations.sync_folder(above);
  } catch (const FileError&) {
    if (above == path) throw;
    make_folders(above, operations);
    if (operations.make_folder(path)) operations.sync_folder(above);
  }
}

class LocalFile final : public CheckpointFile, AtomicFile {
 public:
  using AtomicFile::AtomicFile;
  void write(const void* data, std::size_t bytes) override { AtomicFile::write(data, bytes); }
  void commit() override { AtomicFile::commit(); }
};

class LocalFolder final : public CheckpointIO {
 public:
  LocalFolder(std::string path, std::shared_ptr<FileOperations> operations)
      : path_(std::move(path)), operations_(std::move(operations)) {
    while (path_.size() > 1 && path_.back() == '/') path_.pop_back();
  }

  std::string where(const std::string& name) const override {
    return name.empty() ? path_ : concat(path_, '/', name);
  }
  std::vector<std::string> list(const std::string& folder) override {
    struct stat found{};
    if (!folder.empty() && (!look(folder, found) || !S_ISDIR(found.st_mode))) return {};
    return names_in(where(folder));
  }
  std::optional<std::uint64_t> size(const std::string& name) override {
    struct stat found{};
    if (!look(name, found)) return std::nullopt;
    if (!S_ISREG(found.st_mode)) throw FileError("'", where(name), "' is no regular file");
    return static_cast<std::uint64_t>(found.st_size);
  }
  std::shared_ptr<const ReadFile> open(const std::string& name) override {
    return std::make_shared<const ReadFile>(where(name));
  }
  std::unique_ptr<CheckpointFile> create(const std::string& name) override {
    return std::make_unique<LocalFile>(where(name), operations_);
  }
  bool put(const std::string& name, std::string_view bytes, bool if_absent) override {
    if (if_absent) throw NotAvailable("to rename a file replaces what is there");
    AtomicFile file(where(name), operations_);
    file.write(bytes);
    file.commit();
    return true;
  }
  bool remove(const std::string& name) override { return operations_->remove(where(name)); }
  void make(const std::string& folder) override {
    if (folder.empty())
      make_folders(path_, *operations_);
    else
      operations_->make_folder(where(folder));
  }
  void sync(const std::string& folder) override { operations_->sync_folder(where(folder)); }
  bool is_link(const std::string& name) override {
    std::error_code unknown;
    return std::filesystem::is_symlink(std::filesystem::symlink_status(where(name), unknown));
  }
  std::shared_ptr<const void> lock() override { return operations_->lock(where(".lock")); }

 private:
  // False where nothing is. Only "no such file" says so: a stale handle, a disk error or a refusal
  // says nothing.
  bool look(const std::string& name, struct stat& found) const {
    if (::stat(where(name).c_str(), &found) == 0) return true;
    if (errno == ENOENT || errno == ENOTDIR) return false;
    throw FileError("'", where(name), "' cannot be looked at: ", std::strerror(errno));
  }

  std::string path_;
  std::shared_ptr<FileOperations> operations_;
};

}  // namespace

std::shared_ptr<CheckpointIO> local_folder(std::string path,
                                           std::shared_ptr<FileOperations> operations) {
  return std::make_shared<LocalFolder>(std::move(path), std::move(operations));
}

}  // namespace tessera
