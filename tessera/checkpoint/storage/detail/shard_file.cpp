#include "tessera/checkpoint/storage/detail/shard_file.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <set>
#include <thread>

#include "tessera/base/deadline.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/json_text.h"
#include "tessera/base/text.h"
#include "tessera/files/internal/checksum.h"
#include "tessera/files/json.h"
#include "tessera/files/read_file.h"
#include "tessera/files/safetensors.h"

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
    std::string offset;
    for (const Interval& i : a.box) {
      t.shape.push_back(i.size());
      offset += (offset.empty() ? "" : ",") + std::to_string(i.begin);
    }
    if (t.dtype == "F4") t.shape.back() *= 2;
    if (!is_full(info, a.box)) t.name += concat(' ', list(a.box));
    while (!names.insert(t.name).second) t.name += '\'';
    std::string shape;
    for (const std::int64_t n : info.shape) shape += (shape.empty() ? "" : ",") + std::to_string(n);
    if (info.kind == EntryKind::tensor)
      shards += concat(shards.size() > 1 ? "," : "", json_text(t.name),
                       ":{\"tensor\":", json_text(info.name), ",\"offset\":[", offset,
                       "],\"shape\":[", shape, "]}");
    tensors.push_back(std::move(t));
  }
  shards += '}';
  return tensors;
}

Manifest manifest_of(const std::string& folder, std::uint64_t sequence, const WritePlan& plan,
                     const std::vector<ShardOutcome>& outcomes) {
  Manifest manifest;
  manifest.sequence = sequence;
  manifest.ranks = static_cast<int>(outcomes.size());
  for (const EntryInfo& info : plan.entries) manifest.entries.push_back({info, {}});
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    const ShardOutcome& o = outcomes[r];
    if (o.file.empty()) continue;
    std::error_code error;
    const auto size = std::filesystem::file_size(concat(folder, '/', o.file), error);
    if (error || size != o.bytes)
      throw FileError(concat(
          "'", folder, '/', o.file, "', which rank ", r, " has written (", o.bytes, " bytes), ",
          error ? "cannot be seen from the first rank: " : "has another size for the first rank: ",
          error ? error.message() : std::to_string(size),
          "; the folder must be on a file system that all ranks share"));
    const int file = static_cast<int>(manifest.files.size());
    manifest.files.push_back({o.file, o.bytes});
    const auto& boxes = plan.ranks[r];
    if (boxes.size() != o.pieces.size())
      throw Error(
          concat("rank ", r, " reports ", o.pieces.size(), " boxes, planned were ", boxes.size()));
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

}  // namespace

std::string to_text(const ShardOutcome& outcome) {
  std::string text = concat("[", json_text(outcome.file), ',', outcome.bytes, ",[");
  for (std::size_t i = 0; i < outcome.pieces.size(); ++i)
    text += concat(i > 0 ? "," : "", '[', outcome.pieces[i].begin, ",\"",
                   to_hex(outcome.pieces[i].checksum), "\"]");
  return text + "]]";
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

ShardOutcome write_shard(const ShardJob& job, const WritePlan& plan,
                         const std::vector<const void*>& data,
                         const std::shared_ptr<FileOperations>& operations) {
  const auto& boxes = plan.ranks.at(static_cast<std::size_t>(job.rank));
  ShardOutcome outcome;
  if (boxes.empty()) return outcome;
  std::string shards;
  std::vector<SafetensorsTensor> tensors = file_tensors(plan, boxes, shards);
  const std::string header = write_safetensors_header(tensors, {{"tessera.shards", shards}});
  outcome.file = shard_name(job.rank, job.ranks, job.nonce);
  outcome.pieces.resize(boxes.size());
  AtomicFile file(concat(job.folder, '/', outcome.file), operations, job.nonce);
  file.write(header);
  const auto start = std::chrono::steady_clock::now();
  for (const std::size_t i : safetensors_data_order(tensors)) {
    const auto* at = static_cast<const char*>(data.at(i));
    Checksum sum;
    outcome.pieces[i].begin = file.size();
    for (std::uint64_t left = tensors[i].bytes(); left > 0;) {
      const std::size_t part = std::min<std::uint64_t>(left, kWriteChunk);
      sum.add(at, part);
      file.write(at, part);
      at += part;
      left -= part;
      if (job.rate > 0)
        std::this_thread::sleep_until(
            deadline_after(std::chrono::duration<double>(static_cast<double>(file.size()) /
                                                         static_cast<double>(job.rate)),
                           start));
    }
    outcome.pieces[i].checksum = sum.value();
  }
  outcome.bytes = file.size();
  file.commit();
  return outcome;
}

std::vector<std::string> commit_checkpoint(const std::string& folder, std::uint64_t sequence,
                                           const WritePlan& plan,
                                           const std::vector<ShardOutcome>& outcomes,
                                           const std::string& nonce,
                                           const std::shared_ptr<FileOperations>& operations) {
  const Manifest manifest = manifest_of(folder, sequence, plan, outcomes);
  const std::string text = to_json(manifest);
  AtomicFile file(concat(folder, '/', kManifestName), operations, nonce);
  file.write(text);
  file.commit();
  // From here on the checkpoint stands; what is left of an earlier save by this name goes.
  std::set<std::string> keep{kManifestName};
  for (const ManifestFile& f : manifest.files) keep.insert(f.name);
  std::vector<std::string> warnings;
  std::vector<std::string> names;
  try {
    names = names_in(folder);
  } catch (const FileError& e) {
    warnings.push_back(e.what());
  }
  for (const std::string& name : names) {
    if (!is_checkpoint_file(name) || keep.contains(name)) continue;
    try {
      operations->remove(concat(folder, '/', name));
    } catch (const FileError& e) {
      warnings.push_back(e.what());
    }
  }
  return warnings;
}

void discard_save(const std::string& folder, const std::string& nonce, FileOperations& operations) {
  try {
    const std::string manifest = concat(folder, '/', kManifestName);
    std::error_code error;
    const auto type = std::filesystem::status(manifest, error).type();
    if (type != std::filesystem::file_type::not_found) {
      // What cannot be read may name the files of this very save: then they stay.
      if (error) return;
      const ReadFile opened(manifest);
      std::string text(opened.size(), '\0');
      opened.read(text.data(), text.size(), 0);
      if (text.find(nonce) != std::string::npos) return;
    }
    for (const std::string& name : names_in(folder))
      if (is_checkpoint_file(name) && name.find(nonce) != std::string::npos)
        operations.remove(concat(folder, '/', name));
    if (names_in(folder).empty()) operations.remove(folder);
  } catch (const FileError&) {
    // The disk is in trouble: what stays behind has names that no reader trusts.
  }
}

}  // namespace tessera
