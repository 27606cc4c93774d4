#include "tessera/files/internal/safetensors_index.h"

#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/internal/json_text.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/files/json.h"

namespace tessera {

namespace {

bool is_folder(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

// A name that leads nowhere else.
bool in_folder(const std::string& file) {
  return !file.empty() && file != "." && file != ".." && file.find('/') == std::string::npos &&
         file.find('\0') == std::string::npos;
}

// The names of the tensors in each file, by the file's path.
std::map<std::string, std::set<std::string>> names_by_file(const std::string& folder) {
  const std::string path = concat(folder, '/', kSafetensorsIndex);
  const ReadFile file(path);
  std::string text(file.size(), '\0');
  file.read(text.data(), text.size(), 0);
  std::map<std::string, std::set<std::string>> files;
  try {
    const Json json = Json::parse(text);
    for (const auto& [name, value] : json.at("weight_map").members()) {
      if (!in_folder(value.string()))
        throw InvalidArgument(concat("'", printable(name), "' is in a file outside of the folder: ",
                                     printable(value.string())));
      files[concat(folder, '/', value.string())].insert(name);
    }
  } catch (const InvalidArgument& e) {
    throw FileError(concat("'", path, "' cannot be read: ", e.what()));
  }
  return files;
}

SafetensorsFile opened(const std::string& path) {
  auto file = std::make_shared<const ReadFile>(path);
  SafetensorsHeader header = read_safetensors_header(*file);
  return {std::move(file), std::move(header)};
}

}  // namespace

std::vector<SafetensorsFile> open_safetensors(const std::string& path) {
  if (!is_folder(path)) return {opened(path)};
  std::vector<SafetensorsFile> all;
  for (auto& [file, names] : names_by_file(path)) {
    all.push_back(opened(file));
    for (const SafetensorsTensor& t : all.back().header.tensors)
      if (names.erase(t.name) == 0)
        throw FileError(concat("'", file, "' holds '", printable(t.name), "', which ",
                               kSafetensorsIndex, " beside it has nowhere, or in another file"));
    if (!names.empty())
      throw FileError(concat("'", file, "' does not hold '", printable(*names.begin()), "', as ",
                             kSafetensorsIndex, " beside it says"));
  }
  return all;
}

std::string safetensors_index(const std::map<std::string, std::string>& files,
                              std::uint64_t total_bytes) {
  std::string text =
      concat("{\n  \"metadata\": {\"total_size\": ", total_bytes, "},\n  \"weight_map\": {");
  const char* before = "\n    ";
  for (const auto& [name, file] : files) {
    text += concat(before, json_text(name), ": ", json_text(file));
    before = ",\n    ";
  }
  return text + "\n  }\n}\n";
}

}  // namespace tessera
