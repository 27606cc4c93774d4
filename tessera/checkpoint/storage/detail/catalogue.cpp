#include "tessera/checkpoint/storage/detail/catalogue.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/files/json.h"

namespace tessera {
namespace {

constexpr std::uint64_t kLongestManifest = std::uint64_t{1} << 32;

// The folder too, if everything that was ours is gone.
void remove_ours(CheckpointIO& io, const std::string& name) {
  bool foreign = false;
  for (const std::string& file : io.list(name))
    if (is_checkpoint_file(file))
      io.remove(concat(name, '/', file));
    else
      foreign = true;
  if (!foreign) io.remove(name);
}

// Names that no checkpoint of ours has.
bool is_foreign(const std::string& name) { return name[0] == '.' || name.size() > 200; }

std::string manifest_file(const std::string& name) { return concat(name, '/', kManifestName); }

// Throws FileError for a file of the manifest that is not there, or has another size.
void check_files(CheckpointIO& io, const std::string& name, const Manifest& manifest) {
  for (const ManifestFile& f : manifest.files) {
    const std::string file = concat(name, '/', f.name);
    const auto size = io.size(file);
    if (!size)
      throw FileError("'", io.where(file), "' of checkpoint '", printable(name),
                      "' cannot be found: there is no such file");
    if (*size != f.bytes)
      throw FileError("'", io.where(file), "' of checkpoint '", printable(name), "' has ", *size,
                      " bytes, written were ", f.bytes);
  }
}

// Looks at a checkpoint that another job may replace or remove at this moment: what is wrong twice
// with one and the same manifest is damage. False if there is no manifest, or none any more. Throws
// FileError; `sequence` is that of the manifest, as far as it could be read.
bool is_whole(CheckpointIO& io, const std::string& name, std::optional<std::uint64_t>& sequence) {
  for (std::string before; io.size(manifest_file(name));) {
    std::string text;
    sequence.reset();
    try {
      text = manifest_text(io, name).value_or("");
      const Manifest manifest = parse_manifest(text, io.where(manifest_file(name)));
      sequence = manifest.sequence;
      check_files(io, name, manifest);
      if (!is_utf8(name))
        throw FileError("'", io.where(name),
                        "' is passed over: the name of a checkpoint is UTF-8; rename it");
      return true;
    } catch (const FileError&) {
      if (text == before && io.size(manifest_file(name))) throw;
      before = text;
    }
  }
  return false;
}

}  // namespace

void check_checkpoint_name(const std::string& name) {
  if (name.empty() || name.size() > 200 || name[0] == '.' ||
      name.find_first_of(std::string("/\0", 2)) != std::string::npos || !is_utf8(name))
    throw InvalidArgument("'", printable(name),
                          "' cannot be the name of a checkpoint: it is the name "
                          "of a folder, of 1 to 200 bytes of UTF-8, without '/' and without "
                          "a dot in front");
}

void check_place(const std::shared_ptr<CheckpointIO>& io) {
  if (!io) throw InvalidArgument("the CheckpointIO is null");
  if (io->where("").empty()) throw InvalidArgument("the folder of checkpoints has no name");
}

Manifest read_manifest(CheckpointIO& io, const std::string& name) {
  check_checkpoint_name(name);
  const auto text = manifest_text(io, name);
  if (!text)
    throw FileError("'", io.where(name), "' is not a checkpoint: it has no ", kManifestName,
                    ", so that saving it has never ended, or not begun");
  Manifest manifest = parse_manifest(*text, io.where(manifest_file(name)));
  check_files(io, name, manifest);
  return manifest;
}

std::optional<std::string> manifest_text(CheckpointIO& io, const std::string& name) {
  const std::string file = manifest_file(name);
  if (!io.size(file)) return std::nullopt;
  const auto opened = io.open(file);
  if (opened->size() > kLongestManifest)
    throw FileError("'", io.where(file), "' is not the manifest of a checkpoint: it has ",
                    opened->size(), " bytes");
  std::string text(opened->size(), '\0');
  opened->read(text.data(), text.size(), 0);
  return text;
}

std::uint64_t highest_sequence(CheckpointIO& io, std::vector<std::string>& unread) {
  std::uint64_t highest = 0;
  for (const std::string& name : io.list("")) {
    if (is_foreign(name)) continue;
    std::optional<std::string> text;
    try {
      text = manifest_text(io, name);
    } catch (const FileError& e) {
      unread.push_back(e.what());
    }
    try {
      if (text)
        highest = std::max(highest, parse_manifest(*text, io.where(manifest_file(name))).sequence);
    } catch (const FileError&) {
      // Damaged for good: no reader will ever ask for its place in the order.
    }
  }
  return highest;
}

std::vector<CheckpointName> list_checkpoints(CheckpointIO& io,
                                             std::vector<DamagedCheckpoint>* damaged) {
  std::vector<CheckpointName> all;
  for (const std::string& name : io.list("")) {
    if (is_foreign(name)) continue;
    std::optional<std::uint64_t> sequence;
    try {
      if (is_whole(io, name, sequence)) all.push_back({name, *sequence});
    } catch (const FileError& e) {
      if (damaged) damaged->push_back({name, e.what(), sequence});
    }
  }
  std::ranges::stable_sort(all, [](const CheckpointName& a, const CheckpointName& b) {
    return a.sequence < b.sequence;
  });
  return all;
}

void remove_checkpoint(CheckpointIO& io, const std::string& name) {
  check_checkpoint_name(name);
  if (io.is_link(name)) {
    // What it leads to is somebody else's.
    io.remove(name);
  } else if (!io.list(name).empty()) {
    io.remove(manifest_file(name));
    io.sync(name);
    remove_ours(io, name);
  }
  io.sync("");
}

std::vector<std::string> remove_incomplete(CheckpointIO& io) {
  std::vector<std::string> left;
  for (const std::string& name : io.list("")) {
    try {
      if (name[0] == '.' || io.size(manifest_file(name)) || io.is_link(name)) continue;
      const auto files = io.list(name);
      if (std::ranges::find(files, kManifestName) == files.end() &&
          std::ranges::any_of(files, [](const auto& f) { return is_checkpoint_file(f); }))
        remove_ours(io, name);
    } catch (const FileError& e) {
      left.push_back(e.what());
    }
  }
  return left;
}

}  // namespace tessera
