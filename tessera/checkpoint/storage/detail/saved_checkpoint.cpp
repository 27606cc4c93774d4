#include "tessera/checkpoint/storage/detail/saved_checkpoint.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/storage/detail/catalogue.h"
#include "tessera/files/internal/checksum.h"
#include "tessera/files/internal/safetensors.h"

namespace tessera {
namespace {

constexpr std::size_t kFewestOpen = 8, kMostOpen = 4096;
// What is read at once where a checksum is computed: the checksum finds the bytes in a cache.
constexpr std::size_t kPiece = std::size_t{1} << 20;

// True if `part` is one run of bytes in `box`; `offset` in elements.
bool contiguous_in(const Box& part, const Box& box, std::int64_t& offset) {
  std::size_t d = box.size();
  while (d > 0 && part[d - 1] == box[d - 1]) --d;
  for (std::size_t outer = 0; outer + 1 < d; ++outer)
    if (part[outer].size() != 1) return false;
  offset = 0;
  for (std::size_t k = 0; k < box.size(); ++k)
    offset = offset * box[k].size() + part[k].begin - box[k].begin;
  return true;
}

}  // namespace

void each_run(const Box& part, const Box& box, std::size_t element,
              const std::function<void(std::size_t offset, std::size_t bytes)>& each) {
  std::size_t inner = box.size();
  std::size_t run = element;
  while (inner > 0 && part[inner - 1] == box[inner - 1])
    run *= static_cast<std::size_t>(box[--inner].size());
  if (inner > 0) run *= static_cast<std::size_t>(part[--inner].size());
  std::vector<std::size_t> steps(box.size());
  std::size_t step = element;
  for (std::size_t d = box.size(); d-- > 0; step *= static_cast<std::size_t>(box[d].size()))
    steps[d] = step;
  std::vector<std::int64_t> index(inner, 0);
  std::size_t first = 0;
  for (std::size_t d = 0; d < box.size(); ++d)
    first += static_cast<std::size_t>(part[d].begin - box[d].begin) * steps[d];
  while (true) {
    std::size_t at = first;
    for (std::size_t d = 0; d < inner; ++d) at += static_cast<std::size_t>(index[d]) * steps[d];
    each(at, run);
    std::size_t d = inner;
    while (d > 0 && ++index[d - 1] == part[d - 1].size()) index[--d] = 0;
    if (d == 0) return;
  }
}

SavedCheckpoint::SavedCheckpoint(std::shared_ptr<CheckpointIO> io, const std::string& name)
    : SavedCheckpoint(io, name, read_manifest(*io, name)) {}

SavedCheckpoint::SavedCheckpoint(std::shared_ptr<CheckpointIO> io, std::string name,
                                 Manifest manifest)
    : io_(std::move(io)), name_(std::move(name)), manifest_(std::move(manifest)) {}

SavedCheckpoint::SavedCheckpoint(const std::string& path) : name_(path), has_checksums_(false) {
  manifest_.ranks = 1;
  for (const SafetensorsFile& one : open_safetensors(path)) {
    const int number = static_cast<int>(manifest_.files.size());
    manifest_.files.push_back({one.file->path(), one.file->size()});
    for (const SafetensorsTensor& t : one.header.tensors) {
      Entry e{{EntryKind::tensor, t.name, 0, t.dtype, t.shape, {}}, {}};
      if (t.dtype == "F4" && !t.shape.empty() && t.shape.back() % 2 == 0) e.info.shape.back() /= 2;
      e.records.push_back(
          {whole_box(e.info.shape), number, one.header.data + t.begin, t.bytes(), 0});
      manifest_.entries.push_back(std::move(e));
    }
    header_bytes_ += one.file->bytes_read();
    if (files_.size() < most_open())
      files_[number] = {one.file, 0};
    else
      closed_bytes_ += one.file->bytes_read();
  }
}

std::size_t SavedCheckpoint::most_open() {
  rlimit allowed{};
  if (::getrlimit(RLIMIT_NOFILE, &allowed) != 0) return kFewestOpen;
  return std::clamp<std::size_t>(allowed.rlim_cur / 4, kFewestOpen, kMostOpen);
}

std::shared_ptr<const ReadFile> SavedCheckpoint::file(int index) const {
  const std::lock_guard lock(mutex_);
  if (const auto found = files_.find(index); found != files_.end()) {
    found->second.used = ++uses_;
    return found->second.file;
  }
  const ManifestFile& known = manifest_.files.at(static_cast<std::size_t>(index));
  if (files_.size() >= most_open()) {
    // Not one that another thread reads, whose bytes are still being counted.
    auto oldest = files_.end();
    for (auto it = files_.begin(); it != files_.end(); ++it)
      if (it->second.file.use_count() == 1 &&
          (oldest == files_.end() || it->second.used < oldest->second.used))
        oldest = it;
    if (oldest != files_.end()) {
      closed_bytes_ += oldest->second.file->bytes_read();
      files_.erase(oldest);
    }
  }
  const auto fresh = io_ ? io_->open(concat(name_, '/', known.name))
                         : std::make_shared<const ReadFile>(known.name);
  if (fresh->size() != known.bytes)
    throw FileError("'", fresh->path(), "' has ", fresh->size(), " bytes, written were ",
                    known.bytes);
  files_[index] = {fresh, ++uses_};
  return fresh;
}

std::uint64_t SavedCheckpoint::bytes_read() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t all = closed_bytes_;
  for (const auto& [index, opened] : files_) all += opened.file->bytes_read();
  return all - header_bytes_;
}

std::vector<SavedCheckpoint::Use> SavedCheckpoint::uses(const Entry& entry, const Box& box) {
  std::vector<Use> used;
  for (std::size_t i = 0; i < entry.records.size(); ++i) {
    const Box& there = entry.records[i].box;
    const Box both = intersect(there, box);
    if (volume(both) > 0) used.push_back({i, both == there});
  }
  return used;
}

void SavedCheckpoint::need_checksum(const Entry& entry, const Record& record,
                                    std::uint64_t sum) const {
  if (has_checksums_ && sum != record.checksum)
    throw FileError("'", file(record.file)->path(), "': the bytes of '", printable(entry.info.name),
                    "' ", list(record.box), " (", record.bytes, " from ", record.begin,
                    ") are not those that were written: the file is damaged");
}

void SavedCheckpoint::read(const Entry& entry, const Box& box, void* out, double max_over_read,
                           bool compare) const {
  const std::size_t element = element_bytes(entry.info.dtype);
  std::vector<char> scratch;
  for (const Use& use : uses(entry, box)) {
    const Record& record = entry.records[use.record];
    const Box part = intersect(record.box, box);
    const auto bytes = static_cast<std::size_t>(volume(part)) * element;
    std::int64_t offset = 0;
    const bool direct = contiguous_in(part, box, offset);
    if (!direct) scratch.resize(bytes);
    char* to = direct ? static_cast<char*>(out) + static_cast<std::size_t>(offset) * element
                      : scratch.data();
    std::vector<std::int64_t> shape;
    std::vector<ReadFile::Range> ranges;
    for (std::size_t d = 0; d < part.size(); ++d) {
      shape.push_back(record.box[d].size());
      ranges.push_back({part[d].begin - record.box[d].begin, part[d].size(), 1});
    }
    const auto from = file(record.file);
    if (use.whole && has_checksums_ && compare) {
      Checksum sum;
      for (std::size_t at = 0; at < bytes; at += kPiece) {
        const std::size_t n = std::min(kPiece, bytes - at);
        from->read(to + at, n, record.begin + at);
        sum.add(to + at, n);
      }
      need_checksum(entry, record, sum.value());
    } else {
      from->read_box(to, element, record.begin, shape, ranges, max_over_read);
    }
    if (direct) continue;
    const char* packed = scratch.data();
    each_run(part, box, element, [&](std::size_t at, std::size_t run) {
      std::memcpy(static_cast<char*>(out) + at, packed, run);
      packed += run;
    });
  }
}

void SavedCheckpoint::verify(const Entry& entry, std::size_t index,
                             std::vector<char>& scratch) const {
  const Record& record = entry.records.at(index);
  const auto from = file(record.file);
  const std::size_t piece = std::min<std::uint64_t>(record.bytes, kPiece);
  if (scratch.size() < piece) scratch.resize(piece);
  Checksum sum;
  for (std::uint64_t at = 0; at < record.bytes; at += piece) {
    const std::size_t n = std::min<std::uint64_t>(piece, record.bytes - at);
    from->read(scratch.data(), n, record.begin + at);
    sum.add(scratch.data(), n);
  }
  need_checksum(entry, record, sum.value());
}

}  // namespace tessera
