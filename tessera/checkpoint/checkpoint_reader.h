#pragma once
// CheckpointReader: loads what a Checkpointer saved, on any number of ranks and any mesh.
//
//   CheckpointReader saved(manager.world(), "runs/7", "step-100");
//   saved.load(state);  // into the tensors of a CheckpointState, wherever they lie
//   at::Tensor w = saved.read("net.weight", ShardSpec(mesh, {4, 5}, {Shard(0)}));
//   saved.export_file("net.safetensors");  // all tensors in one file, which other programs read
//
// Each rank reads the bytes that it needs, and not one byte more. Nothing has to be said about it
// when saving. All calls are collective over the group unless they say otherwise; errors of any
// rank are thrown on all: FileError for files that are absent, truncated or damaged, with their
// path.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/checkpoint/checkpoint_io.h"
#include "tessera/checkpoint/file.h"
#include "tessera/checkpoint/state.h"
#include "tessera/comm/group/group.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera {

/// How long the ranks wait for the slowest one where a call is given no other limit: who has little
/// to read waits for who has most.
inline constexpr std::chrono::milliseconds kReadLimit = std::chrono::hours(1);

struct LoadOptions {
  /// Compares the checksum of every piece of which something is used: pieces that a rank needs in
  /// full by that rank, the others by one rank each, which reads them for that.
  bool verify = true;
  /// No tensor changes, on any rank, before everything has been read and verified: what goes
  /// straight into a tensor's memory is read twice, the second time as a rule from the page cache;
  /// anything else waits in memory of its own. False: everything is read once, for checkpoints that
  /// are larger than the memory of the host; after an error tensors hold what had been read so far.
  /// The same on all ranks, as `verify` is.
  bool all_or_nothing = true;
  /// Tensors that all_or_nothing would read twice wait in memory of their own as well, as long as a
  /// rank needs no more than so many bytes for them: they are read once. It is for file systems
  /// whose second read is not from the page cache. What fits can no longer be half loaded.
  std::uint64_t staging_bytes = 0;
  /// Threads that read and verify on each rank, a tensor at a time; 0: the rank's share of the
  /// cores of its host, if that had all ranks, at most 4.
  int threads = 0;
  /// Tensors of the checkpoint that the state does not have are no error.
  bool allow_extra = false;
  /// Tensors of the state that the checkpoint does not have are no error, and stay as they are.
  bool allow_missing = false;
  /// Values are converted to the dtype of the tensor they are loaded into; otherwise another dtype
  /// is an error.
  bool convert = false;
  /// Runs of bytes near each other are read at once if that reads at most so many times what is
  /// needed. Above 1, columns of a matrix load in fewer and larger reads.
  double max_over_read = 1;
  /// How long the ranks wait for the slowest one to have read.
  std::chrono::milliseconds timeout = kReadLimit;
};

/// What a checkpoint has under a name.
struct SavedTensor {
  std::string name;
  at::ScalarType dtype;
  /// Global.
  std::vector<std::int64_t> shape;
  /// Absent for tensors that were plain.
  std::optional<SavedLayout> layout;
};

class CheckpointReader : Pinned {
 public:
  /// The checkpoint `name` in `folder`. The manifest is read by the first rank alone.
  CheckpointReader(const Group& group, const std::string& folder, const std::string& name)
      : CheckpointReader(group, local_folder(folder), name) {}
  /// The checkpoint is at any other place; each rank gives an object of its own for the same one.
  CheckpointReader(const Group& group, const std::shared_ptr<CheckpointIO>& io,
                   const std::string& name);
  /// A safetensors file of any program, or a folder of such with the index of Hugging Face's tools
  /// (model.safetensors.index.json); it has no checksums and no values.
  CheckpointReader(const Group& group, const std::string& path);
  ~CheckpointReader();

  // ---- what it has; not collective ----

  std::vector<SavedTensor> tensors() const;
  /// Nothing if there is no such tensor.
  std::optional<SavedTensor> find(const std::string& name) const;
  const Group& group() const;
  /// Ranks that saved it.
  int saved_ranks() const;
  /// Names of set() and of set_of_rank(), sorted.
  std::vector<std::string> value_names() const;
  std::vector<std::string> rank_value_names() const;

  // ---- reading ----

  /// Every tensor of the state, into its memory. Values that all ranks share become the state's; of
  /// a rank's own values those of the rank of the same number, if there was one. Nothing is
  /// changed, on any rank, before everything has been read and verified (all_or_nothing). Throws
  /// InvalidArgument with all names that are missing, left over, of another shape or dtype, or that
  /// cannot be written to, and for ranks with other options; an error of the second reading, after
  /// everything was verified, says that tensors are half loaded.
  void load(CheckpointState& state, const LoadOptions& options = {}) const;
  /// One tensor, sharded by `spec`, on the manager's device. Throws InvalidArgument for another
  /// shape, an unknown name, or a partial spec.
  at::Tensor read(const std::string& name, const ShardSpec& spec,
                  const LoadOptions& options = {}) const;
  /// Every tensor, sharded as it was saved as far as that fits the mesh; `misfits` gets what does
  /// not, a sentence each, and without it the first one throws InvalidArgument (fit_layout()).
  std::vector<std::pair<std::string, at::Tensor>> read_as_saved(
      const DeviceMesh& mesh, std::vector<std::string>* misfits = nullptr,
      const LoadOptions& options = {}) const;
  /// Throws InvalidArgument for an unknown name.
  std::string value(const std::string& name) const;
  std::int64_t integer(const std::string& name) const;
  double real(const std::string& name) const;
  /// All ranks' values that were saved, by rank; nothing for those that had none.
  std::map<int, std::string> values_of_ranks(const std::string& name) const;

  /// Compares every checksum; each rank reads its share of the bytes.
  void verify(std::chrono::milliseconds timeout = kReadLimit) const;
  /// All tensors into one safetensors file, by their names, written by all ranks; no rank holds
  /// more than one piece of a tensor. At its place complete or not at all.
  void export_file(const std::string& path,
                   const std::shared_ptr<FileOperations>& operations = FileOperations::system(),
                   std::chrono::milliseconds timeout = kReadLimit) const;

  /// Bytes of tensors and values that this rank has read so far, checksums included. Not
  /// collective.
  std::uint64_t bytes_read() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
