#pragma once
// The header of a safetensors file: eight bytes of its length (little-endian), a JSON object of
// dtype, shape and byte range by name, then the data. Format:
// https://github.com/huggingface/safetensors (README, "Format").

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::detail {

struct StoredTensor {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // bytes, from the end of the header
};

/// "F32"; throws InvalidArgument for a dtype that the format does not have.
std::string stored_dtype(at::ScalarType dtype, const std::string& name);
/// Length and JSON; begin and end are filled in, one tensor after the other. Throws InvalidArgument
/// for a name that stands twice.
std::string write_header(std::vector<StoredTensor>& tensors);
/// From the JSON alone. Throws InvalidArgument where it is not what the format says, ranges overlap
/// the end of `data_bytes` or do not fit the shapes.
std::vector<StoredTensor> read_header(const std::string& json, std::uint64_t data_bytes);

}  // namespace tessera::detail
