#include "tessera/sampling/batch_mapping.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {

BatchMapping::BatchMapping(std::vector<int> mesh, const std::vector<int>& processes,
                           const std::vector<int>& batch_axes)
    : mesh_(std::move(mesh)), batch_axes_(batch_axes) {
  std::int64_t devices = 1;
  for (int size : mesh_) {
    if (size < 1) throw InvalidArgument("a mesh axis of size ", size, "; give at least 1");
    devices *= size;
    if (devices > static_cast<std::int64_t>(processes.size())) break;
  }
  if (devices != static_cast<std::int64_t>(processes.size()))
    throw InvalidArgument("a mesh of ", list(mesh_), " devices, but the processes of ",
                          processes.size(), " devices were given");
  std::vector<bool> named(mesh_.size(), false);
  for (int axis : batch_axes_) {
    if (axis < 0 || axis >= static_cast<int>(mesh_.size()))
      throw InvalidArgument("batch axis ", axis, " of a mesh with ", mesh_.size(), " axes");
    if (named[axis]) throw InvalidArgument("batch axis ", axis, " is named twice");
    named[axis] = true;
    coordinates_ *= mesh_[axis];
  }
  for (int axis : batch_axes_) {
    int stride = 1;
    for (std::size_t a = axis + 1; a < mesh_.size(); ++a) stride *= mesh_[a];
    batch_strides_.push_back(stride);
  }
  std::vector<std::uint64_t> pairs(processes.size());  // process and coordinate, to be sorted
  for (std::size_t device = 0; device < processes.size(); ++device) {
    if (processes[device] < 0)
      throw InvalidArgument("device ", device, " is said to belong to process ", processes[device],
                            "; processes are numbered from 0");
    pairs[device] = static_cast<std::uint64_t>(processes[device]) << 32 |
                    static_cast<std::uint64_t>(coordinate(static_cast<int>(device)));
  }
  std::ranges::sort(pairs);
  pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
  held_.reserve(pairs.size());
  for (const std::uint64_t pair : pairs) {
    const int process = static_cast<int>(pair >> 32);
    if (processes_.empty() || processes_.back() != process) {
      processes_.push_back(process);
      first_.push_back(held_.size());
    }
    held_.push_back(static_cast<int>(pair & 0xffffffffu));
  }
  first_.push_back(held_.size());
  find_shards();
}

int BatchMapping::coordinate(int device) const {
  int c = 0;
  for (std::size_t i = 0; i < batch_axes_.size(); ++i)
    c = c * mesh_[batch_axes_[i]] + device / batch_strides_[i] % mesh_[batch_axes_[i]];
  return c;
}

std::size_t BatchMapping::index_of(int process) const {
  const auto at = std::ranges::lower_bound(processes_, process);
  if (at == processes_.end() || *at != process)
    throw InvalidArgument("process ", process, " has no device in the mesh");
  return static_cast<std::size_t>(at - processes_.begin());
}

std::vector<BatchSlice> BatchMapping::slices(int process, std::int64_t size) const {
  if (size < 0) throw InvalidArgument("a global batch of ", size, " samples; give at least 0");
  const auto coordinates = held_by(process);
  const std::int64_t each = size / coordinates_, longer = size % coordinates_;
  // as Partition::even divides, without its list
  auto begin = [&](std::int64_t c) { return c * each + std::min(c, longer); };
  std::vector<BatchSlice> slices;
  slices.reserve(coordinates.size());
  std::int64_t slot = 0;
  for (const int c : coordinates) {
    slices.push_back({c, {begin(c), begin(c + 1)}, slot});
    slot += slices.back().samples.size();
  }
  return slices;
}

void BatchMapping::find_shards() {
  constexpr std::size_t none = ~std::size_t{0};
  // the first process that holds a coordinate
  std::vector<std::size_t> owner(static_cast<std::size_t>(coordinates_), none);
  int shards = 0;
  for (std::size_t p = 0; p < processes_.size(); ++p) {
    const auto mine = held(p);
    const std::size_t first = owner[mine.front()];
    for (const int c : mine) {
      std::size_t& holder = owner[c];
      if (holder != first) {
        conflict_ = {holder == none ? first : holder, p};
        return;
      }
      if (first == none) holder = p;
    }
    if (first == none && mine.size() != held(0).size()) conflict_ = {0, p};
    if (first != none && !std::ranges::equal(held(first), mine)) conflict_ = {first, p};
    if (conflict_) return;
    shard_.push_back(first == none ? shards++ : shard_[first]);
  }
}

void BatchMapping::require_shards() const {
  if (!conflict_) return;
  const auto [a, b] = *conflict_;
  throw InvalidArgument("process ", processes_[a], " holds batch coordinates ", list(held(a)),
                        " and process ", processes_[b], " holds ", list(held(b)),
                        "; loader shards must be equal or disjoint, and of one size. Use "
                        "BatchMapping::slices, which serves every mesh");
}

std::map<int, int> BatchMapping::process_mesh_mapping() const {
  require_shards();
  std::map<int, int> shard;
  for (std::size_t p = 0; p < processes_.size(); ++p)
    shard.emplace_hint(shard.end(), processes_[p], shard_[p]);
  return shard;
}

std::map<int, int> BatchMapping::local_device_mapping(int process) const {
  require_shards();
  std::map<int, int> slots;
  for (const int c : held_by(process))
    slots.emplace_hint(slots.end(), c, static_cast<int>(slots.size()));
  return slots;
}

}  // namespace tessera
