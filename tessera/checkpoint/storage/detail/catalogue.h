#pragma once
// The checkpoints in a place: which there are, which is the latest, removing them.
//
// Each checkpoint is a folder of its own with a manifest. Names in these functions are those of
// checkpoints, not paths.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint_io.h"
#include "tessera/checkpoint/storage/detail/manifest.h"

namespace tessera {

struct CheckpointName {
  std::string name;
  /// Later saves have higher ones.
  std::uint64_t sequence = 0;
};

/// One that cannot be loaded.
struct DamagedCheckpoint {
  std::string name;
  /// What is wrong with it, a sentence with the path.
  std::string damage;
  /// Absent if the manifest itself cannot be read: it may be of any age.
  std::optional<std::uint64_t> sequence;
};

/// Throws InvalidArgument for a name that cannot be one folder: empty, with a slash, "." or "..",
/// hidden, longer than 200 bytes, or not UTF-8.
void check_checkpoint_name(const std::string& name);

/// Throws InvalidArgument for none.
void check_place(const std::shared_ptr<CheckpointIO>& io);

/// The manifest of a checkpoint, whose files are there with their sizes. Throws FileError with the
/// file that is absent, of another size, or damaged.
Manifest read_manifest(CheckpointIO& io, const std::string& name);

/// The text of a manifest, whatever it holds; nothing if there is none. Throws FileError where the
/// store does not say: what cannot be looked at is not absent.
std::optional<std::string> manifest_text(CheckpointIO& io, const std::string& name);

/// Those whose manifests and file sizes are right, earliest first; `damaged` gets the others, and
/// what cannot be looked at. A folder without a manifest is not a checkpoint and not damaged, nor
/// is one that another job replaces or removes meanwhile. Throws FileError if the folder itself
/// cannot be read.
std::vector<CheckpointName> list_checkpoints(CheckpointIO& io,
                                             std::vector<DamagedCheckpoint>* damaged = nullptr);
/// The highest sequence of a manifest in the folder, also of checkpoints whose files are damaged;
/// 0: there is none. `unread` gets a sentence for each manifest that the system does not give,
/// whose sequence may be higher. Throws FileError if the folder itself cannot be read.
std::uint64_t highest_sequence(CheckpointIO& io, std::vector<std::string>& unread);

/// Removes the manifest first, so that a half-removed checkpoint is none, then its files. Files
/// that no checkpoint writes stay, and their folder with them; of a link the link alone goes.
/// Throws FileError.
void remove_checkpoint(CheckpointIO& io, const std::string& name);
/// Removes what interrupted saves left: shard files and temporary files in folders that have no
/// manifest. Only for who holds the lock of the folder: nobody is saving there. Gives what could
/// not be looked at or removed, a sentence each, and stays. Throws FileError if the folder itself
/// cannot be read.
std::vector<std::string> remove_incomplete(CheckpointIO& io);

}  // namespace tessera
