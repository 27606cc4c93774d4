#pragma once
// CheckpointIO: where checkpoints go. A local folder is one implementation, any store that lists,
// reads ranges and writes whole files is another.
//
//   Checkpointer checkpoints(manager, local_folder("runs/7"));  // the same as "runs/7"
//   CheckpointReader saved(manager.world(), std::make_shared<MyStore>("bucket/7"), "step-100");
//
// Names are relative to the place ("step-100/manifest.json"), folders have no slash at their end,
// and "" is the place itself.
//
// Calls. Each rank has an object of its own for the same place; list(), size(), open() and what it
// opened are called from several threads of a rank at once, the others from one at a time, which
// need not be the program's. What one rank has committed the others see at once.
//
// Errors. A call returns or throws within a limit of its own: the other ranks wait for it. It
// repeats what is worth repeating itself; nothing here calls again. What it throws, best FileError
// with where(), is thrown on all ranks. A put() that threw may have been done, or be done yet.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/files/operations.h"
#include "tessera/files/read_file.h"

namespace tessera {

/// Another job saves or removes a checkpoint in the same place at this moment.
class CheckpointLocked : public Error {
 public:
  using Error::Error;
};

/// A file that is being written. Destroyed without commit() it is none, as far as that can be done.
class CheckpointFile {
 public:
  virtual ~CheckpointFile();
  /// Appends.
  virtual void write(const void* data, std::size_t bytes) = 0;
  /// Returns when the file is complete, is seen by all ranks and survives a crash.
  virtual void commit() = 0;
};

class CheckpointIO {
 public:
  virtual ~CheckpointIO();
  /// The name as users know it, for messages: "runs/7/step-100", "s3://bucket/7/step-100".
  virtual std::string where(const std::string& name) const = 0;
  /// The names of files and folders directly in a folder; none if there is no such folder.
  virtual std::vector<std::string> list(const std::string& folder) = 0;
  /// Size of a file in bytes; nothing if there is none, and only then: what cannot be looked at is
  /// an error.
  virtual std::optional<std::uint64_t> size(const std::string& name) = 0;
  /// Opens a file, of which ranges are read.
  virtual std::shared_ptr<const ReadFile> open(const std::string& name) = 0;
  /// Begins a file by a name that no other save has used. Until it is committed nobody trusts it.
  virtual std::unique_ptr<CheckpointFile> create(const std::string& name) = 0;
  /// Writes a small file at once: whenever it is looked at, it is complete, or what was there
  /// before. `if_absent`: unless there is one by this name (then false), of all writers at once one
  /// has true; throws NotAvailable where the store cannot decide that.
  virtual bool put(const std::string& name, std::string_view bytes, bool if_absent) = 0;
  /// Removes a file, or a folder that is empty; false if there is none.
  virtual bool remove(const std::string& name) = 0;

  // ---- what a store may leave as it is ----

  /// Makes a folder, and for "" those above it, unless it is there.
  virtual void make(const std::string& /*folder*/) {}
  /// Returns when what was put, moved and removed in a folder survives a crash.
  virtual void sync(const std::string& /*folder*/) {}
  /// True for a name that leads to somebody else's files: only the name itself is ever removed.
  virtual bool is_link(const std::string& /*name*/) { return false; }
  /// A lock that keeps every other writer out as long as the result is held, and dies with its
  /// process; null: another writer has it. Throws NotAvailable where there are no locks: then a
  /// save claims the place by a put() if absent, and the last to claim it may commit.
  virtual std::shared_ptr<const void> lock();
};

/// A folder of a file system that all ranks share, with a lock on ".lock" in it where the file
/// system has locks. Files are synced and moved to their names.
std::shared_ptr<CheckpointIO> local_folder(
    std::string path, std::shared_ptr<FileOperations> operations = FileOperations::system());

}  // namespace tessera
