#pragma once
// How files are written: FileOperations, the few system operations that a durable file needs, and
// AtomicFile, which appears at its path complete or not at all.
//
//   AtomicFile file("net.safetensors");   // writes net.safetensors.tmp-<nonce>
//   file.write(data, bytes);
//   file.commit();                        // synced, renamed, and the folder synced
//
// Tests replace FileOperations to fail, or to end the process, at any operation.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/pinned.h"

namespace tessera {

/// The operations of a file system. Every member throws FileError with the path, what was tried and
/// the system's reason. May be called from several threads.
class FileOperations : Pinned {
 public:
  virtual ~FileOperations();

  struct File {
    int descriptor = -1;
    std::string path;
  };
  /// Opens a file for writing that must not exist yet; `existing`: one that must exist.
  virtual File open(const std::string& path, bool existing = false);
  /// Writes all `bytes` bytes at `offset`.
  virtual void write(const File& file, const void* data, std::size_t bytes, std::uint64_t offset);
  /// Sets the size of the file.
  virtual void resize(const File& file, std::uint64_t bytes);
  /// Returns when the file's contents are on the disk.
  virtual void sync(const File& file);
  virtual void close(File& file);
  /// Renames a file; replaces `to` if it exists.
  virtual void rename(const std::string& from, const std::string& to);
  /// Removes a file or an empty folder; false if there is none.
  virtual bool remove(const std::string& path);
  /// Makes a folder; false if it exists already.
  virtual bool make_folder(const std::string& path);
  /// Returns when the names in the folder are on the disk.
  virtual void sync_folder(const std::string& path);
  /// Locks a file, which is made if there is none, until the result and its copies are gone or the
  /// process has ended, by whatever. Null: somebody else holds the lock, in this process or in
  /// another, on any host that has the file. Throws NotAvailable where the file system has no
  /// locks.
  virtual std::shared_ptr<const void> lock(const std::string& path);

  /// The operations of this system.
  static std::shared_ptr<FileOperations> system();
};

/// The folder of a path: "a" for "a/b", "." for "b".
std::string folder_of(const std::string& path);
/// The names in a folder, sorted; none if it does not exist. Throws FileError if it cannot be read.
std::vector<std::string> names_in(const std::string& folder);
/// Sixteen hexadecimal digits that no other call, thread or process is likely to get.
std::string make_nonce();

/// A file that is open for writing, closed on destruction.
class OpenFile : Pinned {
 public:
  /// Opens the file with FileOperations::open().
  OpenFile(std::shared_ptr<FileOperations> operations, const std::string& path,
           bool existing = false);
  /// Closes the file unless close() has; errors are dropped.
  ~OpenFile();

  const std::string& path() const { return file_.path; }
  void write(const void* data, std::size_t bytes, std::uint64_t offset) {
    operations_->write(file_, data, bytes, offset);
  }
  void resize(std::uint64_t bytes) { operations_->resize(file_, bytes); }
  void sync() { operations_->sync(file_); }
  void close();

 private:
  std::shared_ptr<FileOperations> operations_;
  FileOperations::File file_;
};

/// Renames a complete file to its final path and syncs the folder. Throws FileError as
/// AtomicFile::commit() does.
void move_into_place(FileOperations& operations, const std::string& from, const std::string& to);

/// A file that is written beside its final path and renamed when it is complete.
class AtomicFile : Pinned {
 public:
  /// Opens the temporary file. Throws FileError if it cannot be opened.
  explicit AtomicFile(const std::string& path,
                      std::shared_ptr<FileOperations> operations = FileOperations::system(),
                      const std::string& nonce = make_nonce());
  /// Removes the temporary file unless it was committed.
  ~AtomicFile();

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  /// Appends to the file.
  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Syncs the file, renames it to its final path and syncs the folder. Throws FileError; if only
  /// the last of these failed, the file is at its path, and the error says that a crash of the
  /// system may undo it.
  void commit();

 private:
  std::string path_;
  std::shared_ptr<FileOperations> operations_;
  OpenFile file_;
  std::uint64_t size_ = 0;
  bool moved_ = false;
};

}  // namespace tessera
