#pragma once
// The safetensors format: eight bytes with the length of the header (little-endian), the header,
// which is a JSON object of dtype, shape and byte range by name, then the data. Only this file of
// the library knows it. Format: https://github.com/huggingface/safetensors (README, "Format").
//
//   const ReadFile file("net.safetensors");
//   const SafetensorsHeader header = read_safetensors_header(file);
//   header.tensors[0].name, .dtype, .shape, .begin    // bytes begin at header.data + begin
//
// Strict, as the format's own reader is: tensors cover the data without overlap and without gaps,
// and names are unique.

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/files/read_file.h"

namespace tessera {

/// A dtype of the format: its name in the header, and the bits of one element.
struct SafetensorsDtype {
  std::string_view name;
  int bits;
};
/// All dtypes of the format.
std::span<const SafetensorsDtype> safetensors_dtypes();
/// The dtype of this name; nullptr if the format does not have it.
const SafetensorsDtype* find_safetensors_dtype(std::string_view name);

struct SafetensorsTensor {
  std::string name;
  /// The name of the dtype in the header: "F32".
  std::string dtype;
  std::vector<std::int64_t> shape;
  /// Byte range of the data, counted from the end of the header.
  std::uint64_t begin = 0, end = 0;

  std::uint64_t bytes() const { return end - begin; }
};

struct SafetensorsHeader {
  /// All tensors in the order of the header.
  std::vector<SafetensorsTensor> tensors;
  /// The entry "__metadata__" of the header.
  std::map<std::string, std::string> metadata;
  /// Offset in the file at which the tensors' bytes begin.
  std::uint64_t data = 0;
  std::uint64_t data_bytes = 0;

  /// The tensor of this name, or nullptr.
  const SafetensorsTensor* find(std::string_view name) const;
};

/// The longest header that is read or written, in bytes, as in the format's own reader.
inline constexpr std::uint64_t kLongestSafetensorsHeader = 100'000'000;

/// Reads the header of a file. Throws FileError with the file, and with the tensor where it is
/// about one: a file that is too short or whose header is longer than the file or than the limit; a
/// header that is not the JSON of the format; an unknown dtype; sizes that overflow or do not fit
/// the byte range; ranges that overlap, leave gaps, or do not end where the file ends; a duplicate
/// name.
SafetensorsHeader read_safetensors_header(const ReadFile& file);
/// As above, from the JSON text alone. `path` is for messages.
SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                           const std::string& path);

/// The bytes of the header, its length included: a multiple of eight. Fills in begin and end of
/// each tensor: dtypes of more bits come first in the data, so that each tensor is aligned;
/// otherwise the order is kept. Throws InvalidArgument for a name that is duplicate, reserved or
/// not UTF-8, a dtype that the format does not have, negative or too large shapes, and a header
/// above the limit.
std::string write_safetensors_header(std::vector<SafetensorsTensor>& tensors,
                                     const std::map<std::string, std::string>& metadata = {});
/// Size of a tensor's data in bytes. Throws InvalidArgument as write_safetensors_header does.
std::uint64_t safetensors_bytes(const SafetensorsTensor& tensor);
/// Indices of the tensors in the order of their bytes.
std::vector<std::size_t> safetensors_data_order(const std::vector<SafetensorsTensor>& tensors);

// The index of a folder of safetensors files, as Hugging Face's tools write and read it:
// model.safetensors.index.json says which file has each tensor, {"metadata": {"total_size": n},
// "weight_map": {name: file}}.

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
