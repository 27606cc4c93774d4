#include "tessera/files/internal/safetensors.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <set>
#include <system_error>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/internal/json_text.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/files/json.h"

namespace tessera {
namespace {

constexpr std::array<SafetensorsDtype, 22> kDtypes = {{
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},
    {"I8", 8},      {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E5M2FNUZ", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E8M0", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},        {"BF16", 16},
    {"I32", 32},    {"U32", 32},    {"F32", 32},    {"C64", 64},        {"F64", 64},
    {"I64", 64},    {"U64", 64},
}};

constexpr const char* kMetadata = "__metadata__";

// `why` quotes names of the file, which may hold anything.
[[noreturn]] void refuse_header(const std::string& path, const std::string& why) {
  throw FileError("'", path,
                  "' is not a safetensors file, or a damaged one: ", printable(why, 2000));
}

SafetensorsTensor parse_tensor(const std::string& name, const Json& about) {
  SafetensorsTensor t;
  t.name = name;
  t.dtype = about.at("dtype").string();
  for (const Json& n : about.at("shape").items()) t.shape.push_back(n.index());
  const auto& range = about.at("data_offsets").items();
  if (range.size() != 2) throw InvalidArgument("data_offsets are two numbers");
  t.begin = range[0].number();
  t.end = range[1].number();
  return t;
}

}  // namespace

std::span<const SafetensorsDtype> safetensors_dtypes() { return kDtypes; }

const SafetensorsDtype* find_safetensors_dtype(std::string_view name) {
  for (const SafetensorsDtype& dtype : safetensors_dtypes())
    if (dtype.name == name) return &dtype;
  return nullptr;
}

const SafetensorsTensor* SafetensorsHeader::find(std::string_view name) const {
  for (const SafetensorsTensor& t : tensors)
    if (t.name == name) return &t;
  return nullptr;
}

std::uint64_t safetensors_bytes(const SafetensorsTensor& tensor) {
  const SafetensorsDtype* dtype = find_safetensors_dtype(tensor.dtype);
  if (!dtype)
    throw InvalidArgument("the dtype ", tensor.dtype,
                          ", which the safetensors format does not have");
  // Zeros come last: a product that overflows is refused even if it ends in zero.
  std::uint64_t bits = static_cast<std::uint64_t>(dtype->bits);
  bool empty = false;
  for (const std::int64_t n : tensor.shape) {
    if (n < 0) throw InvalidArgument("the negative shape ", list(tensor.shape));
    empty = empty || n == 0;
    if (n > 0 && bits > (std::uint64_t{1} << 62) / static_cast<std::uint64_t>(n))
      throw InvalidArgument("the shape ", list(tensor.shape), ", which is too large");
    bits *= static_cast<std::uint64_t>(std::max<std::int64_t>(n, 1));
  }
  if (empty) return 0;
  if (bits % 8 != 0)
    throw InvalidArgument("the shape ", list(tensor.shape), " of ", dtype->name,
                          ", which does not fill whole bytes");
  return bits / 8;
}

std::vector<std::size_t> safetensors_data_order(const std::vector<SafetensorsTensor>& tensors) {
  std::vector<std::size_t> order = numbers_below(tensors.size());
  std::ranges::stable_sort(
      order, {}, [&](std::size_t i) { return std::pair(tensors[i].begin, tensors[i].end); });
  return order;
}

SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                           const std::string& path) {
  SafetensorsHeader header;
  header.data_bytes = data_bytes;
  header.data = 8 + json.size();
  Json root;
  try {
    root = Json::parse(json, 8);
    root.members();
  } catch (const InvalidArgument& e) {
    refuse_header(path, concat("its header: ", e.what()));
  }
  for (const auto& [name, about] : root.members()) {
    const std::string what = concat(name == kMetadata ? "" : "tensor ", "'", name, "': ");
    try {
      if (name == kMetadata) {
        for (const auto& [key, value] : about.members()) header.metadata[key] = value.string();
        continue;
      }
      SafetensorsTensor t = parse_tensor(name, about);
      const std::uint64_t bytes = [&] {
        try {
          return safetensors_bytes(t);
        } catch (const InvalidArgument& e) {
          throw InvalidArgument("it has ", e.what());
        }
      }();
      if (t.begin > t.end || t.end > data_bytes)
        throw InvalidArgument("it lies in bytes ", t.begin, " to ", t.end,
                              " of the data, of which the file holds ", data_bytes,
                              ": the file is truncated or damaged");
      if (t.bytes() != bytes)
        throw InvalidArgument("its shape ", list(t.shape), " of ", t.dtype, " takes ", bytes,
                              " bytes, its data_offsets hold ", t.bytes());
      header.tensors.push_back(std::move(t));
    } catch (const InvalidArgument& e) {
      refuse_header(path, what + e.what());
    }
  }
  std::uint64_t at = 0;
  const std::string* before = nullptr;
  for (const std::size_t i : safetensors_data_order(header.tensors)) {
    const SafetensorsTensor& t = header.tensors[i];
    if (t.begin < at)
      refuse_header(path, concat("tensor '", t.name, "' begins at byte ", t.begin,
                                 " of the data, inside tensor '", before ? *before : "", "'"));
    if (t.begin > at)
      refuse_header(path, concat("no tensor holds bytes ", at, " to ", t.begin,
                                 " of the data, before tensor '", t.name, "'"));
    at = t.end;
    before = &t.name;
  }
  if (at != data_bytes)
    refuse_header(path, concat("its tensors end at byte ", at,
                               " of the data, of which the file "
                               "holds ",
                               data_bytes));
  return header;
}

SafetensorsHeader read_safetensors_header(const ReadFile& file) {
  unsigned char length[8];
  if (file.size() < sizeof length)
    refuse_header(file.path(), concat("it has ", file.size(),
                                      " bytes, fewer than the eight of the header's length"));
  file.read(length, sizeof length, 0);
  std::uint64_t bytes = 0;
  for (int i = 7; i >= 0; --i) bytes = bytes << 8 | length[i];
  if (bytes > kLongestSafetensorsHeader || bytes > file.size() - 8)
    refuse_header(file.path(), concat("a header of ", bytes, " bytes in a file of ", file.size(),
                                      " (at most ", kLongestSafetensorsHeader, ")"));
  std::string json(bytes, '\0');
  file.read(json.data(), json.size(), 8);
  return parse_safetensors_header(json, file.size() - 8 - bytes, file.path());
}

std::string write_safetensors_header(std::vector<SafetensorsTensor>& tensors,
                                     const std::map<std::string, std::string>& metadata) {
  std::set<std::string> names;
  std::vector<std::uint64_t> sizes;
  for (const SafetensorsTensor& t : tensors) {
    if (t.name == kMetadata || !names.insert(t.name).second)
      throw InvalidArgument("the tensor name '", t.name, "' is ",
                            t.name == kMetadata ? "reserved" : "given twice",
                            ": give each tensor a name of its own");
    if (!is_utf8(t.name))
      throw InvalidArgument("the tensor name '", t.name, "' is not valid UTF-8");
    try {
      sizes.push_back(safetensors_bytes(t));
    } catch (const InvalidArgument& e) {
      throw InvalidArgument("tensor '", t.name, "' has ", e.what());
    }
  }
  std::vector<std::size_t> order = numbers_below(tensors.size());
  std::ranges::stable_sort(order, std::ranges::greater(), [&](std::size_t i) {
    return find_safetensors_dtype(tensors[i].dtype)->bits;
  });
  std::uint64_t at = 0;
  for (const std::size_t i : order) {
    tensors[i].begin = at;
    tensors[i].end = at += sizes[i];
  }
  std::string json = "{";
  if (!metadata.empty()) {
    std::string pairs;
    for (const auto& [key, value] : metadata) {
      if (!is_utf8(key) || !is_utf8(value))
        throw InvalidArgument("the metadata of '", key, "' are not valid UTF-8");
      pairs += concat(pairs.empty() ? "" : ",", json_text(key), ':', json_text(value));
    }
    json += concat('"', kMetadata, "\":{", pairs, '}');
  }
  for (const SafetensorsTensor& t : tensors) {
    json += concat(json.size() > 1 ? "," : "", json_text(t.name), ":{\"dtype\":\"", t.dtype,
                   "\",\"shape\":", json_list(t.shape), ",\"data_offsets\":[", t.begin, ',', t.end,
                   "]}");
  }
  json += '}';
  json.resize((json.size() + 7) / 8 * 8, ' ');
  if (json.size() > kLongestSafetensorsHeader)
    throw InvalidArgument("a safetensors header of ", json.size(), " bytes, of at most ",
                          kLongestSafetensorsHeader,
                          ": save fewer tensors or metadata in one file");
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(json.size() >> 8 * i & 0xff);
  return out + json;
}

namespace {

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
        throw InvalidArgument("'", printable(name),
                              "' is in a file outside of the folder: ", printable(value.string()));
      files[concat(folder, '/', value.string())].insert(name);
    }
  } catch (const InvalidArgument& e) {
    throw FileError("'", path, "' cannot be read: ", e.what());
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
  std::error_code absent;
  if (!std::filesystem::is_directory(path, absent)) return {opened(path)};
  std::vector<SafetensorsFile> all;
  for (auto& [file, names] : names_by_file(path)) {
    all.push_back(opened(file));
    for (const SafetensorsTensor& t : all.back().header.tensors)
      if (names.erase(t.name) == 0)
        throw FileError("'", file, "' holds '", printable(t.name), "', which ", kSafetensorsIndex,
                        " beside it has nowhere, or in another file");
    if (!names.empty())
      throw FileError("'", file, "' does not hold '", printable(*names.begin()), "', as ",
                      kSafetensorsIndex, " beside it says");
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
