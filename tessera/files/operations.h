#pragma once
// How files are written: FileOperations, the few operations of a system that a durable file needs,
// and AtomicFile, which is at its place complete or not at all.
//
//   AtomicFile file("net.safetensors");   // writes net.safetensors.tmp-<nonce>
//   file.write(data, bytes);
//   file.commit();                        // synced, renamed, and the folder synced
//
// Tests replace FileOperations to fail or to end the process at any operation.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Every member throws FileError with the path, what was tried and the system's reason. May be
/// called from several threads.
class FileOperations {
 public:
  FileOperations() = default;
  virtual ~FileOperations();
  FileOperations(const FileOperations&) = delete;
  FileOperations& operator=(const FileOperations&) = delete;

  struct File {
    int descriptor = -1;
    std::string path;
  };
  /// Opens a file for writing that must not exist yet; `existing`: one that must exist.
  virtual File open(const std::string& path, bool existing = false);
  /// All of it, at that place of the file.
  virtual void write(const File& file, const void* data, std::size_t bytes, std::uint64_t offset);
  /// Makes the file so long.
  virtual void resize(const File& file, std::uint64_t bytes);
  /// Returns when the file's contents are on the disk.
  virtual void sync(const File& file);
  virtual void close(File& file);
  /// Replaces `to` if it exists.
  virtual void rename(const std::string& from, const std::string& to);
  /// Files and empty folders; false if there is no such file.
  virtual bool remove(const std::string& path);
  /// False if the folder exists already.
  virtual bool make_folder(const std::string& path);
  /// Returns when the names in the folder are on the disk.
  virtual void sync_folder(const std::string& path);

  /// The system's own.
  static std::shared_ptr<FileOperations> system();
};

/// The folder of a path: "a" for "a/b", "." for "b".
std::string folder_of(const std::string& path);
/// The names in a folder, sorted; none if it does not exist. Throws FileError if it cannot be read.
std::vector<std::string> names_in(const std::string& folder);
/// Sixteen hexadecimal digits that no other call, thread or process is likely to get.
std::string make_nonce();

/// A file that is open for writing, closed with its holder.
class OpenFile {
 public:
  /// As FileOperations::open().
  OpenFile(std::shared_ptr<FileOperations> operations, const std::string& path,
           bool existing = false);
  /// Closes it, if close() has not; what that throws is lost.
  ~OpenFile();
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

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

/// Moves a complete file to its place and syncs the folder. Throws FileError as
/// AtomicFile::commit() does.
void move_into_place(FileOperations& operations, const std::string& from, const std::string& to);

/// A file that is written beside its place and moved there when it is complete.
class AtomicFile {
 public:
  /// Throws FileError if it cannot be opened.
  explicit AtomicFile(const std::string& path,
                      std::shared_ptr<FileOperations> operations = FileOperations::system(),
                      const std::string& nonce = make_nonce());
  /// Removes what was not committed.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  const std::string& path() const { return path_; }
  const std::string& temporary_path() const { return file_.path(); }
  std::uint64_t size() const { return size_; }
  /// After what is there.
  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Syncs the file, moves it to its place and syncs the folder. Throws FileError; if only the last
  /// of these failed, the file is at its place, and the error says that a crash of the system may
  /// undo it.
  void commit();

 private:
  std::string path_;
  std::shared_ptr<FileOperations> operations_;
  OpenFile file_;
  std::uint64_t size_ = 0;
  bool moved_ = false;
};

}  // namespace tessera
