#pragma once
// CheckpointFolder: what a job that saves does in its folder beside the saves themselves: the lock
// that keeps other jobs out, the order of the checkpoints, and which of them go. The first rank's,
// but for its path and the warnings.

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpointer.h"

namespace tessera::detail {

/// Used by one save at a time; protect(), warn() and warnings() beside it.
class CheckpointFolder {
 public:
  CheckpointFolder(std::string path, const CheckpointOptions& options);
  const std::string& path() const { return path_; }

  /// Makes the folder and those above it. Throws FileError.
  void make() const;
  /// As long as the result is held, no other job saves or removes here: throws CheckpointLocked if
  /// one does. Null, with a warning, where the file system has no locks.
  std::shared_ptr<const void> lock();
  /// The same; the first time, what interrupted saves have left goes, as far as options say.
  std::shared_ptr<const void> lock_for_save();
  /// Higher than that of any checkpoint in the folder: the latest is the one with the highest.
  /// Throws FileError where one that may be higher cannot be read.
  std::uint64_t next_sequence();
  /// Removes checkpoints beyond CheckpointOptions::keep_last. What fails is a warning: the save
  /// before it stands.
  void retain();
  /// The latest checkpoint; empty: there is none. Throws as Checkpointer::to_resume().
  std::string to_resume() const;

  void protect(const std::vector<std::string>& names);
  void warn(const std::vector<std::string>& what);
  std::vector<std::string> warnings() const;

 private:
  std::string path_;
  std::shared_ptr<FileOperations> operations_;
  std::size_t keep_last_;
  bool remove_incomplete_, told_of_locks_ = false;
  /// The highest that was ever in the folder; absent until all could be read once.
  std::optional<std::uint64_t> known_sequence_;
  mutable std::mutex mutex_;
  std::vector<std::string> warnings_;
  std::set<std::string> protected_;
};

}  // namespace tessera::detail
