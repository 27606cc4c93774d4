#include "tessera/partition/batch_mapping.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {

BatchMapping::BatchMapping(std::vector<int> mesh, std::vector<int> processes, const std::vector<int>& batch_axes)
    : mesh_(std::move(mesh)), batch_axes_(batch_axes) {
  std::int64_t devices = 1;
  for (int size : mesh_) {
    if (size < 1) throw InvalidArgument(concat("a mesh axis of size ", size, "; give at least 1"));
    devices *= size;
    if (devices > static_cast<std::int64_t>(processes.size())) break;
  }
  if (devices != static_cast<std::int64_t>(processes.size()))
    throw InvalidArgument(concat("a mesh of ", list(mesh_), " devices, but the processes of ", processes.size(), " devices were given"));
  std::vector<bool> named(mesh_.size(), false);
  for (int axis : batch_axes_) {
    if (axis < 0 || axis >= static_cast<int>(mesh_.size()))
      throw InvalidArgument(concat("batch axis ", axis, " of a mesh with ", mesh_.size(), " axes"));
    if (named[axis]) throw InvalidArgument(concat("batch axis ", axis, " is named twice"));
    named[axis] = true;
    coordinates_ *= mesh_[axis];
  }
  for (int axis : batch_axes_) {
    int stride = 1;
    for (std::size_t a = axis + 1; a < mesh_.size(); ++a) stride *= mesh_[a];
    batch_strides_.push_back(stride);
  }
  for (std::size_t device = 0; device < processes.size(); ++device) {
    if (processes[device] < 0)
      throw InvalidArgument(concat("device ", device, " is said to belong to process ", processes[device], "; processes are numbered from 0"));
    held_[processes[device]].push_back(coordinate(static_cast<int>(device)));
  }
  for (auto& [process, coordinates] : held_) {
    std::sort(coordinates.begin(), coordinates.end());
    coordinates.erase(std::unique(coordinates.begin(), coordinates.end()), coordinates.end());
  }
}

int BatchMapping::coordinate(int device) const {
  int c = 0;
  for (std::size_t i = 0; i < batch_axes_.size(); ++i) c = c * mesh_[batch_axes_[i]] + device / batch_strides_[i] % mesh_[batch_axes_[i]];
  return c;
}

const std::vector<int>& BatchMapping::held_by(int process) const {
  const auto at = held_.find(process);
  if (at == held_.end()) throw InvalidArgument(concat("process ", process, " has no device in the mesh"));
  return at->second;
}

std::vector<BatchSlice> BatchMapping::slices(int process, std::int64_t size) const {
  const Partition partition = Partition::even(size, coordinates_);
  std::vector<BatchSlice> slices;
  std::int64_t slot = 0;
  for (int c : held_by(process)) {
    slices.push_back({c, partition.interval(c), slot});
    slot += partition.size(c);
  }
  return slices;
}

std::map<int, int> BatchMapping::process_mesh_mapping() const {
  auto refuse = [](int a, const std::vector<int>& of_a, int b, const std::vector<int>& of_b) {
    throw InvalidArgument(concat("process ", a, " holds batch coordinates ", list(of_a), " and process ", b, " holds ", list(of_b),
                                 "; loader shards must be equal or disjoint, and of one size. Use BatchMapping::slices, which serves every mesh"));
  };
  std::vector<int> owner(coordinates_, -1);  // the first process that holds a coordinate
  std::map<int, int> shard;
  int shards = 0;
  for (const auto& [process, coordinates] : held_) {
    const int first = owner[coordinates.front()];
    for (int c : coordinates) {
      if (owner[c] != first) refuse(owner[c] < 0 ? first : owner[c], held_.at(owner[c] < 0 ? first : owner[c]), process, coordinates);
      if (first < 0) owner[c] = process;
    }
    if (first >= 0 && held_.at(first) != coordinates) refuse(first, held_.at(first), process, coordinates);
    if (first < 0 && coordinates.size() != held_.begin()->second.size()) refuse(held_.begin()->first, held_.begin()->second, process, coordinates);
    shard[process] = first < 0 ? shards++ : shard.at(first);
  }
  return shard;
}

std::map<int, int> BatchMapping::local_device_mapping(int process) const {
  process_mesh_mapping();  // refuses what the two-function form cannot say
  std::map<int, int> slots;
  for (int c : held_by(process)) slots.emplace(c, static_cast<int>(slots.size()));
  return slots;
}

}  // namespace tessera
