#include "tessera/checkpoint/storage/catalogue.h"

#include <algorithm>
#include <filesystem>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
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

bool is_folder(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

bool exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

}  // namespace

void check_checkpoint_name(const std::string& name) {
  if (name.empty() || name.size() > 200 || name[0] == '.' ||
      name.find_first_of(std::string("/\0", 2)) != std::string::npos)
    throw InvalidArgument(concat("'", name,
                                 "' cannot be the name of a checkpoint: it is the name "
                                 "of a folder, of 1 to 200 bytes, without '/' and without a dot "
                                 "in front"));
}

Manifest read_manifest(const std::string& folder, const std::string& name) {
  check_checkpoint_name(name);
  const std::string path = concat(folder, '/', name), file = concat(path, '/', kManifestName);
  if (is_folder(path) && !exists(file))
    throw FileError(concat("'", path, "' is not a checkpoint: it has no ", kManifestName,
                           ", so that saving it has never ended"));
  const ReadFile opened(file);
  if (opened.size() > kLongestManifest)
    throw FileError(concat("'", file, "' is not the manifest of a checkpoint: it has ",
                           opened.size(), " bytes"));
  std::string text(opened.size(), '\0');
  opened.read(text.data(), text.size(), 0);
  Manifest manifest = parse_manifest(text, file);
  for (const ManifestFile& f : manifest.files) {
    std::error_code error;
    const auto size = std::filesystem::file_size(concat(path, '/', f.name), error);
    if (error)
      throw FileError(concat("'", path, '/', f.name, "' of checkpoint '", name,
                             "' cannot be found: ", error.message()));
    if (size != f.bytes)
      throw FileError(concat("'", path, '/', f.name, "' of checkpoint '", name, "' has ", size,
                             " bytes, written were ", f.bytes));
  }
  return manifest;
}

std::vector<CheckpointName> list_checkpoints(const std::string& folder,
                                             std::vector<std::string>* problems) {
  std::vector<CheckpointName> all;
  for (const std::string& name : names_in(folder)) {
    if (name[0] == '.' || name.size() > 200 ||
        !exists(concat(folder, '/', name, '/', kManifestName)))
      continue;
    try {
      all.push_back({name, read_manifest(folder, name).sequence});
    } catch (const FileError& e) {
      if (problems) problems->push_back(e.what());
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const CheckpointName& a, const CheckpointName& b) {
    return a.sequence < b.sequence;
  });
  return all;
}

std::optional<std::string> latest_checkpoint(const std::string& folder,
                                             std::vector<std::string>* problems) {
  const auto all = list_checkpoints(folder, problems);
  return all.empty() ? std::nullopt : std::optional(all.back().name);
}

void remove_checkpoint(const std::string& folder, const std::string& name,
                       FileOperations& operations) {
  check_checkpoint_name(name);
  const std::string path = concat(folder, '/', name);
  if (!is_folder(path)) return;
  operations.remove(concat(path, '/', kManifestName));
  operations.sync_folder(path);
  remove_ours(path, operations);
  operations.sync_folder(folder);
}

void remove_incomplete(const std::string& folder, FileOperations& operations) {
  for (const std::string& name : names_in(folder)) {
    const std::string path = concat(folder, '/', name);
    if (name[0] == '.' || !is_folder(path) || exists(concat(path, '/', kManifestName))) continue;
    const auto files = names_in(path);
    if (std::any_of(files.begin(), files.end(),
                    [](const auto& f) { return is_checkpoint_file(f); }))
      remove_ours(path, operations);
  }
}

}  // namespace tessera
