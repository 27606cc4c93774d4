#pragma once
// The index of a folder of safetensors files, as Hugging Face's tools write and read it:
// model.safetensors.index.json says which file has each tensor, {"metadata": {"total_size": n},
// "weight_map": {name: file}}.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/files/internal/safetensors.h"

namespace tessera {

inline constexpr const char* kSafetensorsIndex = "model.safetensors.index.json";

/// A file that is open, and its header.
struct SafetensorsFile {
  std::shared_ptr<const ReadFile> file;
  SafetensorsHeader header;
};
/// What `path` names: one safetensors file, or the files that the index of a folder names, sorted.
/// Throws FileError as read_safetensors_header() does, for a folder without an index, an index that
/// is not of this format or names a file outside of its folder, and with the tensor where the files
/// do not hold what the index says, each in its file.
std::vector<SafetensorsFile> open_safetensors(const std::string& path);
/// The text of an index: the file of each tensor, by name.
std::string safetensors_index(const std::map<std::string, std::string>& files,
                              std::uint64_t total_bytes);

}  // namespace tessera
