#pragma once
// The safetensors format: eight bytes with the length of the header (little-endian), the header,
// a JSON object of dtype, shape and byte range by name, then the data. This is the one place of the
// library that knows it. Format: https://github.com/huggingface/safetensors (README, "Format").
//
//   const ReadFile file("net.safetensors");
//   const SafetensorsHeader header = read_safetensors_header(file);
//   header.tensors[0].name, .dtype, .shape, .begin    // bytes begin at header.data + begin
//
// Strict, as the format's own reader is: tensors cover the data without overlap and without holes,
// and names are unique.

#include <cstdint>
#include <map>
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
/// All dtypes that the format has.
std::span<const SafetensorsDtype> safetensors_dtypes();
/// nullptr for a name that the format does not have.
const SafetensorsDtype* find_safetensors_dtype(std::string_view name);

struct SafetensorsTensor {
  std::string name;
  /// As in the header: "F32".
  std::string dtype;
  std::vector<std::int64_t> shape;
  /// Bytes, counted from the end of the header.
  std::uint64_t begin = 0, end = 0;

  std::uint64_t bytes() const { return end - begin; }
};

struct SafetensorsHeader {
  /// In the order of the header.
  std::vector<SafetensorsTensor> tensors;
  /// "__metadata__".
  std::map<std::string, std::string> metadata;
  /// Offset in the file at which the tensors' bytes begin.
  std::uint64_t data = 0;
  std::uint64_t data_bytes = 0;

  /// nullptr if there is no such tensor.
  const SafetensorsTensor* find(std::string_view name) const;
};

/// The longest header that is read or written, in bytes, as in the format's own reader.
inline constexpr std::uint64_t kLongestSafetensorsHeader = 100'000'000;

/// Throws FileError with the file, and with the tensor where it is one: a file that is too short or
/// whose header is longer than the file or than the limit; a header that is not the JSON of the
/// format; an unknown dtype; sizes that overflow or do not fit the byte range; ranges that overlap,
/// leave holes, or do not end where the file ends; a name that occurs twice.
SafetensorsHeader read_safetensors_header(const ReadFile& file);
/// The same from the JSON text alone. `path` is for messages.
SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                           const std::string& path);

/// The bytes of the header, its length included: a multiple of eight. Fills in begin and end of
/// each tensor: dtypes of more bits come first in the data, so that each tensor is aligned; else
/// the order stays. Throws InvalidArgument for a name that occurs twice, is reserved or is not
/// UTF-8, a dtype that the format does not have, negative or too large shapes, and a header above
/// the limit.
std::string write_safetensors_header(std::vector<SafetensorsTensor>& tensors,
                                     const std::map<std::string, std::string>& metadata = {});
/// The bytes that a tensor takes. Throws InvalidArgument as write_safetensors_header does.
std::uint64_t safetensors_bytes(const SafetensorsTensor& tensor);
/// Indices of the tensors in the order of their bytes.
std::vector<std::size_t> safetensors_data_order(const std::vector<SafetensorsTensor>& tensors);

}  // namespace tessera
