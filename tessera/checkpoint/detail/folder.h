#pragma once
// CheckpointFolder: what a job that saves does beside the saves themselves: the lock or the claim
// that keeps other jobs out, the order of the checkpoints, and which of them go. The first rank's,
// but for where it is and the warnings.

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpointer.h"

namespace tessera::detail {

/// What a save or a removal holds; with neither a lock nor a claim it is up to the user that one
/// job saves at a time.
struct WriteHold {
  std::shared_ptr<const void> lock;
  /// Number of the file ".claim-<n>" that this job has put, where there are no locks: who has the
  /// highest one may commit, so that a job which died is in nobody's way. It stays there.
  std::uint64_t claim = 0;
  explicit operator bool() const { return lock || claim > 0; }
};

/// Used by one save at a time; protect(), warn() and warnings() beside it.
class CheckpointFolder {
 public:
  CheckpointFolder(std::shared_ptr<CheckpointIO> io, const CheckpointOptions& options);
  CheckpointIO& io() const { return *io_; }
  const std::shared_ptr<CheckpointIO>& shared_io() const { return io_; }

  /// As long as the result is held, no other job saves or removes here unseen: throws
  /// CheckpointLocked if one does. Warns where there are neither locks nor claims.
  WriteHold hold();
  /// The same; the first time, what interrupted saves have left goes, as far as options say.
  WriteHold hold_for_save();
  /// Throws CheckpointLocked if another job has claimed the place since.
  void confirm(const WriteHold& hold);
  /// Higher than that of any checkpoint in the folder: the latest is the one with the highest.
  /// Throws FileError where one that may be higher cannot be read.
  std::uint64_t next_sequence(const WriteHold& hold);
  /// Removes checkpoints beyond CheckpointOptions::keep_last. What fails is a warning: the save
  /// before it stands.
  void retain();
  /// The latest checkpoint; empty: there is none. Throws as Checkpointer::to_resume().
  std::string to_resume() const;

  void protect(const std::vector<std::string>& names);
  void warn(const std::vector<std::string>& what);
  std::vector<std::string> warnings() const;

 private:
  std::uint64_t claim();
  std::uint64_t highest_claim() const;

  std::shared_ptr<CheckpointIO> io_;
  std::size_t keep_last_;
  bool remove_incomplete_, told_of_locks_ = false;
  /// The highest that was ever in the folder; absent until all could be read once.
  std::optional<std::uint64_t> known_sequence_;
  mutable std::mutex mutex_;
  std::vector<std::string> warnings_;
  std::set<std::string> protected_;
};

}  // namespace tessera::detail
