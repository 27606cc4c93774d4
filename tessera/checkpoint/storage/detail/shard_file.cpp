#include "tessera/checkpoint/storage/detail/shard_file.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>
#include <thread>

#include "tessera/base/deadline.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/json_text.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/storage/detail/catalogue.h"
#include "tessera/files/internal/checksum.h"
#include "tessera/files/internal/safetensors.h"
#include "tessera/files/json.h"

namespace tessera {
namespace {

// Small enough that the checksum leaves the bytes in a cache for the write.
constexpr std::size_t kWriteChunk = std::size_t{1} << 20;

// The entries of the file, and the metadata that say what they are.
std::vector<SafetensorsTensor> file_tensors(const WritePlan& plan,
                                            const std::vector<AssignedBox>& boxes,
                                            std::string& shards) {
  std::vector<SafetensorsTensor> tensors;
  std::set<std::string> names;
  shards = "{";
  for (const AssignedBox& a : boxes) {
    const EntryInfo& info = plan.entries[a.entry];
    SafetensorsTensor t;
    t.name = info.name;
    if (info.kind == EntryKind::value) t.name = "value:" + info.name;
    if (info.kind == EntryKind::rank_value)
      t.name = concat("value of rank ", info.rank, ":", info.name);
    t.dtype = info.dtype;
    std::vector<std::int64_t> offset;
    for (const Interval& i : a.box) {
      t.shape.push_back(i.size());
      offset.push_back(i.begin);
    }
    if (t.dtype == "F4") t.shape.back() *= 2;
    if (!is_full(info, a.box)) t.name += concat(' ', list(a.box));
    while (!names.insert(t.name).second) t.name += '\'';
    if (info.kind == EntryKind::tensor)
      shards += concat(shards.size() > 1 ? "," : "", json_text(t.name),
                       ":{\"tensor\":", json_text(info.name), ",\"offset\":", json_list(offset),
                       ",\"shape\":", json_list(info.shape), '}');
    tensors.push_back(std::move(t));
  }
  shards += '}';
  return tensors;
}

Manifest manifest_of(CheckpointIO& io, const Commit& commit, const WritePlan& plan,
                     const std::vector<ShardOutcome>& outcomes) {
  Manifest manifest;
  manifest.sequence = commit.sequence;
  manifest.ranks = static_cast<int>(outcomes.size());
  for (const EntryInfo& info : plan.entries) manifest.entries.push_back({info, {}});
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    const ShardOutcome& o = outcomes[r];
    if (o.file.empty()) continue;
    const std::string name = concat(commit.name, '/', o.file);
    const auto size = io.size(name);
    if (size != o.bytes)
      throw FileError("'", io.where(name), "', which rank ", r, " has written (", o.bytes,
                      " bytes), ",
                      size ? concat("has another size for the first rank: ", *size)
                           : "cannot be seen from the first rank: there is no such file",
                      "; checkpoints are at a place that all ranks share");
    const int file = static_cast<int>(manifest.files.size());
    manifest.files.push_back({o.file, o.bytes});
    const auto& boxes = plan.ranks[r];
    if (boxes.size() != o.pieces.size())
      throw Error("rank ", r, " reports ", o.pieces.size(), " boxes, planned were ", boxes.size());
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      const EntryInfo& info = plan.entries[boxes[i].entry];
      const std::uint64_t bytes =
          static_cast<std::uint64_t>(volume(boxes[i].box)) * element_bytes(info.dtype);
      manifest.entries[boxes[i].entry].records.push_back(
          {boxes[i].box, file, o.pieces[i].begin, bytes, o.pieces[i].checksum});
    }
  }
  return manifest;
}

// Puts it unless somebody else has put one by this name meanwhile, as far as that can be told.
void put_manifest(CheckpointIO& io, Commit& commit, const std::string& text, bool replaces) {
  const std::string file = concat(commit.name, '/', kManifestName);
  commit.may_stand = !commit.locked;
  if (!commit.locked && !replaces) {
    try {
      if (io.put(file, text, true)) return;
      commit.may_stand = false;
      throw CheckpointLocked("'", io.where(file),
                             "': another job has saved a checkpoint by this name since");
    } catch (const NotAvailable&) {
      // That one job saves at a time is up to the user, who has been told.
    }
  }
  io.put(file, text, false);
}

}  // namespace

std::string to_text(const ShardOutcome& outcome) {
  const std::string pieces = json_list(outcome.pieces, [](const ShardOutcome::Piece& piece) {
    return concat('[', piece.begin, ",\"", to_hex(piece.checksum), "\"]");
  });
  return concat('[', json_text(outcome.file), ',', outcome.bytes, ',', pieces, ']');
}

ShardOutcome outcome_from(std::string_view text) {
  const Json json = Json::parse(text);
  if (json.items().size() != 3) throw InvalidArgument("a broken report of a shard file");
  ShardOutcome outcome{json.items()[0].string(), json.items()[1].number(), {}};
  for (const Json& piece : json.items()[2].items()) {
    if (piece.items().size() != 2) throw InvalidArgument("a broken report of a shard file");
    outcome.pieces.push_back({piece.items()[0].number(), from_hex(piece.items()[1].string())});
  }
  return outcome;
}

ShardOutcome write_shard(CheckpointIO& io, const ShardJob& job, const WritePlan& plan,
                         const std::vector<const void*>& data) {
  const auto& boxes = plan.ranks.at(static_cast<std::size_t>(job.rank));
  ShardOutcome outcome;
  if (boxes.empty()) return outcome;
  std::string shards;
  std::vector<SafetensorsTensor> tensors = file_tensors(plan, boxes, shards);
  const std::string header = write_safetensors_header(tensors, {{"tessera.shards", shards}});
  outcome.file = shard_name(job.rank, job.ranks, job.nonce);
  outcome.pieces.resize(boxes.size());
  const auto file = io.create(concat(job.name, '/', outcome.file));
  file->write(header.data(), header.size());
  outcome.bytes = header.size();
  const auto start = std::chrono::steady_clock::now();
  for (const std::size_t i : safetensors_data_order(tensors)) {
    const auto* at = static_cast<const char*>(data.at(i));
    Checksum sum;
    outcome.pieces[i].begin = outcome.bytes;
    for (std::uint64_t left = tensors[i].bytes(); left > 0;) {
      const std::size_t part = std::min<std::uint64_t>(left, kWriteChunk);
      sum.add(at, part);
      file->write(at, part);
      outcome.bytes += part;
      at += part;
      left -= part;
      if (job.rate > 0)
        std::this_thread::sleep_until(
            deadline_after(std::chrono::duration<double>(static_cast<double>(outcome.bytes) /
                                                         static_cast<double>(job.rate)),
                           start));
    }
    outcome.pieces[i].checksum = sum.value();
  }
  file->commit();
  return outcome;
}

std::vector<std::string> commit_checkpoint(CheckpointIO& io, Commit& commit, const WritePlan& plan,
                                           const std::vector<ShardOutcome>& outcomes) {
  const Manifest manifest = manifest_of(io, commit, plan, outcomes);
  // Without a lock what the earlier manifest does not name may be another job's, which is saving.
  std::optional<std::string> before;
  if (!commit.locked) before = manifest_text(io, commit.name);
  put_manifest(io, commit, to_json(manifest), before.has_value());
  commit.may_stand = true;
  // From here on the checkpoint stands; what is left of an earlier save by this name goes.
  std::set<std::string> keep{kManifestName};
  for (const ManifestFile& f : manifest.files) keep.insert(f.name);
  std::vector<std::string> warnings;
  std::vector<std::string> names;
  try {
    names = io.list(commit.name);
  } catch (const std::exception& e) {
    warnings.push_back(e.what());
  }
  for (const std::string& name : names) {
    if (!is_checkpoint_file(name) || keep.contains(name)) continue;
    if (!commit.locked && (!before || before->find(name) == std::string::npos)) continue;
    try {
      io.remove(concat(commit.name, '/', name));
    } catch (const std::exception& e) {
      warnings.push_back(e.what());
    }
  }
  return warnings;
}

void discard_save(CheckpointIO& io, const std::string& name, const std::string& nonce) {
  try {
    // What cannot be read may name the files of this very save: then they stay.
    const auto manifest = manifest_text(io, name);
    if (manifest && manifest->find(nonce) != std::string::npos) return;
    for (const std::string& file : io.list(name))
      if (is_checkpoint_file(file) && file.find(nonce) != std::string::npos)
        io.remove(concat(name, '/', file));
    if (io.list(name).empty()) io.remove(name);
  } catch (const std::exception&) {
    // The store is in trouble: what stays behind has names that no reader trusts.
  }
}

}  // namespace tessera
