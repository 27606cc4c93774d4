#pragma once
// SavedCheckpoint: a checkpoint that is there, read box by box. Plain safetensors files, and
// folders of them with an index, are read in the same way, as checkpoints of full tensors without
// checksums.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint_io.h"
#include "tessera/checkpoint/storage/detail/manifest.h"

namespace tessera {

/// Calls each(offset, bytes) for the runs of bytes that `part`, which is not empty, has in the
/// row-major bytes of `box` around it, in their order.
void each_run(const Box& part, const Box& box, std::size_t element,
              const std::function<void(std::size_t offset, std::size_t bytes)>& each);

/// Its const members may be called from several threads.
class SavedCheckpoint {
 public:
  /// Reads the manifest. Throws FileError as read_manifest() does.
  SavedCheckpoint(std::shared_ptr<CheckpointIO> io, const std::string& name);
  /// From a manifest that another rank has read; files are opened when they are needed.
  SavedCheckpoint(std::shared_ptr<CheckpointIO> io, std::string name, Manifest manifest);
  /// A safetensors file, or a folder of such with an index. Throws FileError as open_safetensors().
  explicit SavedCheckpoint(const std::string& path);

  const Manifest& manifest() const { return manifest_; }
  /// For messages: the folder of the checkpoint, or the file.
  std::string path() const { return io_ ? io_->where(name_) : name_; }
  bool has_checksums() const { return has_checksums_; }

  /// The indices of the entry's records of which a box needs something, and whether it needs all.
  struct Use {
    std::size_t record = 0;
    bool whole = false;
  };
  static std::vector<Use> uses(const Entry& entry, const Box& box);

  /// The elements of `box`, packed row-major, into `out`. No other bytes are read, unless
  /// `max_over_read` allows it (ReadFile::read_box). The checksums of records that are read whole
  /// are compared, unless `compare` is false. Throws FileError with the file and the entry.
  void read(const Entry& entry, const Box& box, void* out, double max_over_read = 1,
            bool compare = true) const;
  /// Reads a record and compares its checksum, through `scratch`, which is kept for the next call.
  /// Throws FileError with the file and the entry.
  void verify(const Entry& entry, std::size_t record, std::vector<char>& scratch) const;
  /// How many files it keeps open at most, beside those that are being read; a quarter of what the
  /// process may have open.
  static std::size_t most_open();
  /// Bytes that were asked of the system for the above, header and manifest not counted.
  std::uint64_t bytes_read() const;

 private:
  /// Stays open while it is held.
  std::shared_ptr<const ReadFile> file(int index) const;
  void need_checksum(const Entry& entry, const Record& record, std::uint64_t sum) const;

  // None for a safetensors file or a folder with an index, of which the name is the path.
  std::shared_ptr<CheckpointIO> io_;
  std::string name_;
  bool has_checksums_ = true;
  Manifest manifest_;
  // Those used last stay open. Guarded by the mutex.
  struct Opened {
    std::shared_ptr<const ReadFile> file;
    std::uint64_t used = 0;
  };
  mutable std::mutex mutex_;
  mutable std::map<int, Opened> files_;
  mutable std::uint64_t uses_ = 0, closed_bytes_ = 0;
  std::uint64_t header_bytes_ = 0;
};

}  // namespace tessera
