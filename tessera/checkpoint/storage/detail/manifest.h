#pragma once
// Manifest: what a checkpoint holds and where, written last. A folder with a manifest whose files
// have the stated sizes is a checkpoint; anything else is what a save left behind.
//
//   step-100/manifest.json                                    the manifest
//   step-100/shard-00001-of-00004.<nonce>.safetensors         what rank 1 wrote
//
// Arithmetic and text: no torch, no communication.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/partition/interval.h"

namespace tessera {

/// The box of all elements.
inline Box whole_box(const std::vector<std::int64_t>& shape) {
  Box box;
  for (const std::int64_t n : shape) box.push_back({0, n});
  return box;
}

/// "begin,end", as lists of bounds in JSON have it.
inline std::string bounds_text(const Interval& i) {
  return std::to_string(i.begin) + ',' + std::to_string(i.end);
}

/// tensor: an array of which the records are boxes. value: bytes that are the same for all ranks.
/// rank_value: bytes of one rank.
enum class EntryKind : unsigned char { tensor, value, rank_value };

/// A box of an entry, row-major in one piece of a file.
struct Record {
  Box box;
  /// Index into Manifest::files.
  int file = 0;
  /// Bytes, from the beginning of the file.
  std::uint64_t begin = 0, bytes = 0;
  std::uint64_t checksum = 0;
  bool operator==(const Record&) const = default;
};

/// What is known of an entry before it is written.
struct EntryInfo {
  EntryKind kind = EntryKind::tensor;
  std::string name;
  /// Of a rank_value, else 0.
  int rank = 0;
  /// As in safetensors ("F32").
  std::string dtype;
  /// Global; in elements of libtorch, of which one of F4 is a byte.
  std::vector<std::int64_t> shape;
  /// How it lay on its mesh, as JSON; empty: replicated, or by hand.
  std::string layout;
  bool operator==(const EntryInfo&) const = default;
};

struct Entry {
  EntryInfo info;
  /// Disjoint; together the whole shape.
  std::vector<Record> records;
  bool operator==(const Entry&) const = default;
};

struct ManifestFile {
  std::string name;
  std::uint64_t bytes = 0;
  bool operator==(const ManifestFile&) const = default;
};

struct Manifest {
  /// Higher than that of every checkpoint that was in the folder before.
  std::uint64_t sequence = 0;
  /// That saved it.
  int ranks = 0;
  std::vector<ManifestFile> files;
  std::vector<Entry> entries;

  /// nullptr if there is none.
  const Entry* find(EntryKind kind, std::string_view name, int rank = 0) const;
  bool operator==(const Manifest&) const = default;
};

inline constexpr const char* kManifestName = "manifest.json";

/// Bytes of one element. Throws InvalidArgument for a dtype that libtorch does not have.
std::size_t element_bytes(std::string_view dtype);
/// "shard-00001-of-00004.<nonce>.safetensors".
std::string shard_name(int rank, int ranks, const std::string& nonce);
/// True for names of shard files, of manifests, and of what writing either leaves behind: all that
/// a checkpoint ever puts into its folder.
bool is_checkpoint_file(std::string_view name);

/// A checksum of the rest comes first in the text, which names the digest of its checksums.
std::string to_json(const Manifest& manifest);
/// Throws FileError, with `path`, for a text that is truncated, changed, of another format, of a
/// later version or with checksums of another digest than XXH64, and for records that overlap,
/// leave holes, or lie outside their files.
Manifest parse_manifest(std::string_view text, const std::string& path);

/// Throws FileError with the tensor where boxes leave the shape, overlap or leave holes. `where` is
/// for messages.
void check_boxes(const std::vector<Box>& boxes, const EntryInfo& info, const std::string& where);

}  // namespace tessera
