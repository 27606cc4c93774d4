#pragma once
// Checkpointer: saves a state that is spread over ranks, durably, from all of them at once.
//
//   Checkpointer checkpoints(manager, "runs/7", {.keep_last = 3});
//   checkpoints.save("step-100", state);        // returns when it is on the disk
//   checkpoints.start_save("step-200", state);  // returns when the state has been copied
//   ...
//   checkpoints.wait();                         // until the last one is on the disk
//
// Every rank writes what it owns into a safetensors file of its own; replicas share the work. The
// first rank writes a manifest with the place and the checksum of every piece once all files are on
// the disk. A folder without a manifest is not a checkpoint: whatever ends a save, and wherever,
// the checkpoints before it stay loadable. checkpoint_reader.h loads them, on any number of ranks.
//
// The folder is on a file system that all ranks share, or at any other place (checkpoint_io.h). Who
// only looks, here or by a reader, changes nothing there; who saves or removes holds a lock on the
// folder's ".lock" meanwhile, which dies with the process, so that a second job is told. Where
// there are no locks a store's conditional puts tell one of both; where there is neither, that one
// job saves there at a time is up to the user.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/checkpoint/checkpoint_io.h"
#include "tessera/checkpoint/state.h"
#include "tessera/comm/job/manager.h"
#include "tessera/files/operations.h"

namespace tessera {

/// A save that was refused because another one is in progress (CheckpointOptions::Busy::refuse).
class CheckpointBusy : public Error {
 public:
  using Error::Error;
};

/// The checkpoint to go on from cannot be read.
class CheckpointDamaged : public FileError {
 public:
  using FileError::FileError;
};

struct CheckpointOptions {
  /// A save removes all but so many of the latest checkpoints in the folder, whoever saved them; 0:
  /// none is. Damaged ones and those of protect() stay, and do not count.
  int keep_last = 0;
  /// What a save does while an earlier one is still being written.
  enum class Busy : unsigned char { wait, refuse };
  Busy busy = Busy::wait;
  /// Most bytes a second that a rank writes in the background, to leave the disk to others; 0: no
  /// limit.
  std::uint64_t background_rate = 0;
  /// Refuses to save plain tensors that differ between the ranks that have them. Otherwise such a
  /// set is that of the first rank, bit by bit. Values set by set() are always compared.
  bool check_replicas = false;
  /// The first save removes what interrupted saves have left in the folder, unless there are no
  /// locks.
  bool remove_incomplete = true;
  /// How long the ranks wait for the slowest one to have written.
  std::chrono::milliseconds timeout{std::chrono::hours(1)};
  /// Calls on a local folder that is given by its path go through these. Tests replace them.
  std::shared_ptr<FileOperations> operations = FileOperations::system();
};

/// All calls are collective over the ranks unless they say otherwise, and errors are thrown on all
/// of them: FileError for what cannot be written, with the path; InvalidArgument for states that do
/// not fit together; CheckpointLocked if another job saves or removes in the folder. A save that
/// throws leaves no checkpoint by its name, or the one that was there before. If only the last step
/// fails, which syncs the folder after the manifest was moved there, the new one may stand, and the
/// error says so.
class Checkpointer : Pinned {
 public:
  /// The ranks are all of the job, or these (global ranks, of which this is one). Makes the folder,
  /// as the first rank spells it; the other ranks may spell it otherwise. Throws MismatchError if
  /// the ranks' options differ.
  Checkpointer(const DistributedManager& manager, const std::string& folder,
               const CheckpointOptions& options = {}, const std::vector<int>& ranks = {});
  /// The folder is at any other place; each rank gives an object of its own for the same one.
  Checkpointer(const DistributedManager& manager, std::shared_ptr<CheckpointIO> io,
               const CheckpointOptions& options = {}, const std::vector<int>& ranks = {});
  /// Waits until this rank has written; an error that was never asked for is lost. Where ranks
  /// talk over MPI, a save that was not waited for is not committed.
  ~Checkpointer();

  /// This rank spells it so; another place gives CheckpointIO::where(""). Not collective.
  std::string folder() const;
  /// Where it saves; a reader takes it. Not collective.
  const std::shared_ptr<CheckpointIO>& io() const;

  /// Returns when the checkpoint is committed: on the disk, with its manifest. A checkpoint by the
  /// same name is replaced, and stays complete until then. Throws what an earlier start_save() has
  /// come to before anything else.
  void save(const std::string& name, const CheckpointState& state);
  /// Returns when this rank's share has been copied: the state may be changed from then on. The
  /// rest is done by a thread of its own, whose error the next call throws. While an earlier save
  /// is in progress it waits for that one first, or throws CheckpointBusy on every rank, as the
  /// options say. Where ranks talk over MPI, the thread writes and the next call commits. Where the
  /// system starts no thread, it returns when the checkpoint is on the disk, and warns.
  void start_save(const std::string& name, const CheckpointState& state);
  /// Waits until no save is in progress. Throws the error that one ended with.
  void wait();
  /// True while this rank is still writing. Not collective.
  bool saving() const;

  /// Complete checkpoints in the folder, earliest first, as the first rank sees them; `problems`
  /// gets what is wrong with damaged ones, a sentence each.
  std::vector<std::string> names(std::vector<std::string>* problems = nullptr) const;
  std::optional<std::string> latest(std::vector<std::string>* problems = nullptr) const;
  /// The one to go on from: the latest, or nothing if there is none. Throws CheckpointDamaged where
  /// it, or one that may be later, is damaged: never an older one in silence. The message names it,
  /// what is wrong with it, and those that are whole.
  std::optional<std::string> to_resume() const;
  /// Removes a checkpoint, its manifest first; of a link the link alone.
  void remove(const std::string& name);
  /// CheckpointOptions::keep_last neither removes nor counts these, from the next save that is
  /// committed on; replaces those given before. Give it on all ranks; not collective.
  void protect(const std::vector<std::string>& names);

  /// What went wrong beside the saves themselves, on the first rank: old checkpoints that could not
  /// be removed, folders that could not be read; on any rank: threads that did not start. Not
  /// collective.
  std::vector<std::string> warnings() const;
  /// Bytes of the file that this rank wrote in the last save that ended. Not collective.
  std::uint64_t bytes_written() const;
  /// How many saves this rank knows to be committed. Not collective.
  std::uint64_t saves() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
