#include "tessera/checkpoint/storage/detail/catalogue.h"

#include <algorithm>
#include <filesystem>

#include "tessera/base/error.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/files/json.h"
#include "tessera/files/read_file.h"

namespace tessera {

namespace {

constexpr std::uint64_t kLongestManifest = std::uint64_t{1} << 32;

// True if everything that was ours is gone and the folder with it.
void remove_ours(const std::string& path, FileOperations& operations) {
  bool foreign = false;
  for (const std::string& file : names_in(path)) {
    if (is_checkpoint_file(file))
      operations.remove(concat(path, '/', file));
    else
      foreign = true;
  }
  if (!foreign) operations.remove(path);
}

// What stands there, if anything. Only "no such file" says that it is absent: a stale handle, a
// disk error or a refusal says nothing.
std::filesystem::file_type type_of(const std::string& path) {
  std::error_code error;
  const auto type = std::filesystem::status(path, error).type();
  if (error && type != std::filesystem::file_type::not_found)
    throw FileError(concat("'", path, "' cannot be looked at: ", error.message()));
  return type;
}

bool is_folder(const std::string& path) {
  return type_of(path) == std::filesystem::file_type::directory;
}

bool is_link(const std::string& path) {
  std::error_code unknown;
  return std::filesystem::is_symlink(std::filesystem::symlink_status(path, unknown));
}

bool exists(const std::string& path) {
  return type_of(path) != std::filesystem::file_type::not_found;
}

// Names that no checkpoint of ours has.
bool is_foreign(const std::string& name) { return name[0] == '.' || name.size() > 200; }

std::string manifest_text(const std::string& file) {
  const ReadFile opened(file);
  if (opened.size() > kLongestManifest)
    throw FileError(concat("'", file, "' is not the manifest of a checkpoint: it has ",
                           opened.size(), " bytes"));
  std::string text(opened.size(), '\0');
  opened.read(text.data(), text.size(), 0);
  return text;
}

// Throws FileError for a file of the manifest that is not there, or has another size.
void check_files(const std::string& path, const std::string& name, const Manifest& manifest) {
  for (const ManifestFile& f : manifest.files) {
    std::error_code error;
    const auto size = std::filesystem::file_size(concat(path, '/', f.name), error);
    if (error)
      throw FileError(concat("'", path, '/', f.name, "' of checkpoint '", printable(name),
                             "' cannot be found: ", error.message()));
    if (size != f.bytes)
      throw FileError(concat("'", path, '/', f.name, "' of checkpoint '", printable(name), "' has ",
                             size, " bytes, written were ", f.bytes));
  }
}

// Looks at a checkpoint that another job may replace or remove at this moment: what is wrong twice
// with one and the same manifest is damage. False if there is no manifest, or none any more. Throws
// FileError; `sequence` is that of the manifest, as far as it could be read.
bool is_whole(const std::string& folder, const std::string& name,
              std::optional<std::uint64_t>& sequence) {
  const std::string path = concat(folder, '/', name), file = concat(path, '/', kManifestName);
  for (std::string before; has_manifest(folder, name);) {
    std::string text;
    sequence.reset();
    try {
      text = manifest_text(file);
      const Manifest manifest = parse_manifest(text, file);
      sequence = manifest.sequence;
      check_files(path, name, manifest);
      if (!is_utf8(name))
        throw FileError(
            concat("'", path, "' is passed over: the name of a checkpoint is UTF-8; rename it"));
      return true;
    } catch (const FileError&) {
      if (text == before && has_manifest(folder, name)) throw;
      before = text;
    }
  }
  return false;
}

}  // namespace

void check_checkpoint_name(const std::string& name) {
  if (name.empty() || name.size() > 200 || name[0] == '.' ||
      name.find_first_of(std::string("/\0", 2)) != std::string::npos || !is_utf8(name))
    throw InvalidArgument(concat("'", printable(name),
                                 "' cannot be the name of a checkpoint: it is the name "
                                 "of a folder, of 1 to 200 bytes of UTF-8, without '/' and without "
                                 "a dot in front"));
}

Manifest read_manifest(const std::string& folder, const std::string& name) {
  check_checkpoint_name(name);
  const std::string path = concat(folder, '/', name), file = concat(path, '/', kManifestName);
  if (is_folder(path) && !has_manifest(folder, name))
    throw FileError(concat("'", path, "' is not a checkpoint: it has no ", kManifestName,
                           ", so that saving it has never ended"));
  Manifest manifest = parse_manifest(manifest_text(file), file);
  check_files(path, name, manifest);
  return manifest;
}

bool has_manifest(const std::string& folder, const std::string& name) {
  const std::string path = concat(folder, '/', name);
  return is_folder(path) && exists(concat(path, '/', kManifestName));
}

std::uint64_t highest_sequence(const std::string& folder, std::vector<std::string>& unread) {
  std::uint64_t highest = 0;
  for (const std::string& name : names_in(folder)) {
    if (is_foreign(name)) continue;
    const std::string file = concat(folder, '/', name, '/', kManifestName);
    std::string text;
    try {
      if (!has_manifest(folder, name)) continue;
      text = manifest_text(file);
    } catch (const FileError& e) {
      unread.push_back(e.what());
      continue;
    }
    try {
      highest = std::max(highest, parse_manifest(text, file).sequence);
    } catch (const FileError&) {
      // Damaged for good: no reader will ever ask for its place in the order.
    }
  }
  return highest;
}

std::vector<CheckpointName> list_checkpoints(const std::string& folder,
                                             std::vector<DamagedCheckpoint>* damaged) {
  std::vector<CheckpointName> all;
  for (const std::string& name : names_in(folder)) {
    if (is_foreign(name)) continue;
    std::optional<std::uint64_t> sequence;
    try {
      if (is_whole(folder, name, sequence)) all.push_back({name, *sequence});
    } catch (const FileError& e) {
      if (damaged) damaged->push_back({name, e.what(), sequence});
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const CheckpointName& a, const CheckpointName& b) {
    return a.sequence < b.sequence;
  });
  return all;
}

void remove_checkpoint(const std::string& folder, const std::string& name,
                       FileOperations& operations) {
  check_checkpoint_name(name);
  const std::string path = concat(folder, '/', name);
  if (!is_folder(path)) return;
  if (is_link(path)) {
    // What it leads to is somebody else's.
    operations.remove(path);
    return operations.sync_folder(folder);
  }
  operations.remove(concat(path, '/', kManifestName));
  operations.sync_folder(path);
  remove_ours(path, operations);
  operations.sync_folder(folder);
}

std::vector<std::string> remove_incomplete(const std::string& folder, FileOperations& operations) {
  std::vector<std::string> left;
  for (const std::string& name : names_in(folder)) {
    const std::string path = concat(folder, '/', name);
    try {
      if (name[0] == '.' || !is_folder(path) || is_link(path) || has_manifest(folder, name))
        continue;
      const auto files = names_in(path);
      if (std::find(files.begin(), files.end(), kManifestName) == files.end() &&
          std::any_of(files.begin(), files.end(),
                      [](const auto& f) { return is_checkpoint_file(f); }))
        remove_ours(path, operations);
    } catch (const FileError& e) {
      left.push_back(e.what());
    }
  }
  return left;
}

}  // namespace tessera
