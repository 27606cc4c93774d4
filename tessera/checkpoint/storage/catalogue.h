#pragma once
// The checkpoints in a folder: which there are, which is the latest, removing them.
//
// Each checkpoint is a folder of its own with a manifest. Names in these functions are those of
// checkpoints, not paths.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/storage/manifest.h"
#include "tessera/files/operations.h"

namespace tessera {

struct CheckpointName {
  std::string name;
  /// Later saves have higher ones.
  std::uint64_t sequence = 0;
};

/// Throws InvalidArgument for a name that cannot be one folder: empty, with a slash, "." or "..",
/// hidden, longer than 200 bytes.
void check_checkpoint_name(const std::string& name);

/// The manifest of a checkpoint, whose files are there with their sizes. Throws FileError with the
/// file that is absent, of another size, or damaged.
Manifest read_manifest(const std::string& folder, const std::string& name);

/// Those whose manifests and file sizes are right, earliest first. What is wrong with the others
/// is told in `problems`, a sentence each; a folder without a manifest is not a checkpoint and no
/// problem.
std::vector<CheckpointName> list_checkpoints(const std::string& folder,
                                             std::vector<std::string>* problems = nullptr);
std::optional<std::string> latest_checkpoint(const std::string& folder,
                                             std::vector<std::string>* problems = nullptr);

/// Removes the manifest first, so that a half-removed checkpoint is none, then its files. Files
/// that no checkpoint writes stay, and their folder with them. Throws FileError.
void remove_checkpoint(const std::string& folder, const std::string& name,
                       FileOperations& operations);
/// Removes what interrupted saves left: shard files and temporary files in folders that have no
/// manifest. Only for one who knows that nobody is saving there.
void remove_incomplete(const std::string& folder, FileOperations& operations);

}  // namespace tessera
