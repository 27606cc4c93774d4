// Folders of several safetensors files with an index.

#include <filesystem>
#include <map>
#include <set>
#include <system_error>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/detail/ranks.h"
#include "tessera/checkpoint/file.h"
#include "tessera/files/internal/safetensors.h"
#include "tessera/files/operations.h"

namespace tessera {
namespace {

// In files of at most so many bytes, or of one tensor.
std::vector<NamedTensors> in_files(const NamedTensors& tensors, std::uint64_t max_bytes) {
  std::vector<NamedTensors> files;
  std::set<std::string> names;
  std::uint64_t bytes = 0;
  for (const auto& [name, t] : tensors) {
    if (!t.defined() || !names.insert(name).second)
      throw InvalidArgument("save: '", name,
                            t.defined() ? "' is there twice" : "' is an undefined tensor");
    const auto size = static_cast<std::uint64_t>(t.numel()) * t.element_size();
    if (files.empty() || size > max_bytes || bytes > max_bytes - size) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += size;
    files.back().emplace_back(name, t);
  }
  return files;
}

}  // namespace

void save_folder(const NamedTensors& tensors, const DeviceMesh& mesh, const std::string& folder,
                 std::uint64_t max_bytes) {
  const std::vector<NamedTensors> files = in_files(tensors, max_bytes);
  const detail::Ranks ranks = detail::ranks_of_file(mesh);
  const std::string index = concat(folder, '/', kSafetensorsIndex);
  // An index of before would name files that are replaced one by one.
  ranks.first("save", [&] {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) throw FileError("'", folder, "' cannot be made: ", error.message());
    if (FileOperations::system()->remove(index)) FileOperations::system()->sync_folder(folder);
  });
  std::map<std::string, std::string> file_of;
  std::uint64_t total = 0;
  const auto number = [](std::size_t n) {
    const std::string digits = std::to_string(n);
    return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
  };
  for (std::size_t f = 0; f < files.size(); ++f) {
    const std::string file =
        concat("model-", number(f + 1), "-of-", number(files.size()), ".safetensors");
    save(files[f], mesh, concat(folder, '/', file));
    for (const auto& [name, t] : files[f]) {
      file_of[name] = file;
      total += static_cast<std::uint64_t>(t.numel()) * t.element_size();
    }
  }
  ranks.first("save", [&] {
    AtomicFile file(index);
    file.write(safetensors_index(file_of, total));
    file.commit();
  });
}

}  // namespace tessera
