#pragma once
// BatchMapping: which process reads what: from a mesh of devices, the axes that shard the batch,
// and the process of each device, the slices of the global batch that each process reads.
//
// A device's batch coordinate is its position on the batch axes, row-major in the order given
// (batch index = data index * fsdp size + fsdp index). Devices with the same coordinate get the
// same samples, devices with different coordinates different ones. A process reads the union of its
// devices' slices, each once; which processes share slices follows from the coordinates, never from
// where a process runs.
//
//   data axis 4, second axis 4, processes {{0,0,1,1},{2,2,3,3},{0,0,1,1},{2,2,3,3}}, batch axes
//     {0}:
//   held_by(0) = {0, 2}, held_by(2) = {1, 3};  slices(2, 8) = {1: [2, 4) at 0, 3: [6, 8) at 2}

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "tessera/partition/partition.h"

namespace tessera {

/// A slice of the global batch that a process reads.
struct BatchSlice {
  /// Batch coordinate.
  int coordinate;
  /// Positions in the global batch.
  Interval samples;
  /// Where the slice starts in the process' loaded batch.
  std::int64_t slot;
  bool operator==(const BatchSlice&) const = default;
};

class BatchMapping {
 public:
  /// `mesh`: sizes of the axes. `processes`: the process of each device, row-major, any numbers >=
  /// 0; processes may hold unequal numbers of devices, anywhere. `batch_axes`: the axes that shard
  /// the batch, outermost first; none: every device gets the whole batch. Throws InvalidArgument
  /// where counts do not match, or an axis is unknown or named twice.
  BatchMapping(std::vector<int> mesh, const std::vector<int>& processes,
               const std::vector<int>& batch_axes);

  int coordinates() const { return coordinates_; }
  /// Batch coordinate of a device, by its row-major position.
  int coordinate(int device) const;
  /// The processes that hold a device, ascending.
  const std::vector<int>& processes() const { return processes_; }
  /// Batch coordinates that a process holds, ascending; valid as long as this object. Throws
  /// InvalidArgument for an unknown process.
  std::span<const int> held_by(int process) const { return held(index_of(process)); }

  /// The slices that `process` reads of a global batch of `size` samples, which is divided evenly
  /// over the coordinates (the first ones have one more if it does not divide). Valid for every
  /// mesh. Slices follow each other in the loaded batch, by ascending coordinate.
  std::vector<BatchSlice> slices(int process, std::int64_t size) const;

  /// The form as two functions, for loaders whose shards are equal in size and either the same or
  /// disjoint. Returns, for each process, the id of its loader shard, numbered in ascending order
  /// of the processes. Throws InvalidArgument, naming two processes, if the mesh has no such form
  /// (some of their coordinates are shared and others are not, or their numbers differ); use
  /// slices() then.
  std::map<int, int> process_mesh_mapping() const;
  /// The slot, counted in slices, that each batch coordinate of this process has in its loaded
  /// batch.
  std::map<int, int> local_device_mapping(int process) const;

 private:
  std::size_t index_of(int process) const;
  std::span<const int> held(std::size_t index) const {
    return std::span(held_).subspan(first_[index], first_[index + 1] - first_[index]);
  }
  void find_shards();
  void require_shards() const;

  std::vector<int> mesh_, batch_axes_, batch_strides_;
  int coordinates_ = 1;
  // By index in processes_: its coordinates are held_[first_[index]] to held_[first_[index + 1]].
  std::vector<int> processes_, held_;
  std::vector<std::size_t> first_;
  // of the two-function form, by index
  std::vector<int> shard_;
  std::optional<std::pair<std::size_t, std::size_t>> conflict_;  // two processes that have none
};

}  // namespace tessera
