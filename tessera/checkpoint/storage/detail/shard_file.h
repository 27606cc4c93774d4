#pragma once
// Shard file: what one rank writes, and the commit that makes a checkpoint of all ranks' files.
//
//   every rank:  ShardOutcome mine = write_shard(...)     // written, synced and moved to its name
//   first rank:  commit_checkpoint(..., all outcomes)     // the manifest, written last

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/checkpoint_io.h"
#include "tessera/checkpoint/storage/detail/write_plan.h"

namespace tessera {

/// What a rank reports of its file.
struct ShardOutcome {
  std::string file;
  std::uint64_t bytes = 0;
  /// Of each box, in the order in which they were given.
  struct Piece {
    std::uint64_t begin = 0, checksum = 0;
  };
  std::vector<Piece> pieces;
};
std::string to_text(const ShardOutcome& outcome);
/// Throws InvalidArgument for a broken text.
ShardOutcome outcome_from(std::string_view text);

struct ShardJob {
  /// Of the checkpoint, whose folder has been made.
  std::string name;
  std::string nonce;
  int rank = 0, ranks = 1;
  /// Most bytes a second; 0: as fast as the disk takes them.
  std::uint64_t rate = 0;
};

/// Writes one safetensors file: the boxes of `plan` that `job.rank` writes, of which `data[i]`
/// holds the i-th, row-major. Boxes that are not the whole tensor are named with their bounds, and
/// the metadata say where each lies ("tessera.shards"). A rank that has nothing to write makes no
/// file: the outcome's name is empty. Throws FileError; what was written until then is removed.
ShardOutcome write_shard(CheckpointIO& io, const ShardJob& job, const WritePlan& plan,
                         const std::vector<const void*>& data);

/// A save that is to be committed.
struct Commit {
  std::string name, nonce;
  std::uint64_t sequence = 0;
  /// No other job saves here meanwhile.
  bool locked = false;
  /// The manifest stands, or may come to stand though putting it has failed: nothing goes.
  bool may_stand = false;
};
/// Checks that the files are there with their sizes and puts the manifest of `outcomes` (one a
/// rank), then removes what earlier saves left in the folder; gives what could not be removed, a
/// sentence each. Throws FileError where a file cannot be seen from here: then the place is not
/// shared by the ranks; CheckpointLocked where another job has put a manifest by this name since.
/// Once the manifest is at its place nothing is thrown but that its folder could not be synced, and
/// then the new checkpoint may stand.
std::vector<std::string> commit_checkpoint(CheckpointIO& io, Commit& commit, const WritePlan& plan,
                                           const std::vector<ShardOutcome>& outcomes);
/// Removes the files of a save that failed, as far as that can be done. Not those that the manifest
/// in the folder names, and none at all if there is a manifest that cannot be read.
void discard_save(CheckpointIO& io, const std::string& name, const std::string& nonce);

}  // namespace tessera
