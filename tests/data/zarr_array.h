#pragma once
// Zarr arrays as the specifications of both formats say, written for tests, and ones whose metadata
// is altered.

#include <gtest/gtest.h>
#include <torch/torch.h>
#ifdef TESSERA_HAS_BLOSC
#include <blosc.h>
#endif
#ifdef TESSERA_HAS_ZLIB
#include <zlib.h>
#endif
#ifdef TESSERA_HAS_ZSTD
#include <zstd.h>
#endif

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "../support/folder.h"
#include "tessera/base/text.h"
#include "tessera/data/sources/zarr_source.h"

namespace tessera::zarr_source_test {

using testing::Folder;
using Sizes = std::vector<std::int64_t>;

inline void write(const std::string& path, const std::string& bytes) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  testing::put(path, bytes);
}

struct Layout {
  int format = 2;
  Sizes chunk = {};
  std::string type = "<f8", compressor = {}, separator = ".";
  bool column_major = false;
  std::string fill = "0", attributes = "{}";
  /// Chunks of fill alone are not written.
  bool sparse = false;
};

inline std::string packed(const std::string& bytes, const std::string& compressor) {
  if (compressor.empty()) return bytes;
#ifdef TESSERA_HAS_ZSTD
  if (compressor == "zstd") {
    std::string out(ZSTD_compressBound(bytes.size()), '\0');
    out.resize(ZSTD_compress(out.data(), out.size(), bytes.data(), bytes.size(), 3));
    return out;
  }
#endif
#ifdef TESSERA_HAS_BLOSC
  if (compressor == "blosc") {
    std::string out(bytes.size() + BLOSC_MAX_OVERHEAD, '\0');
    const char* const names[] = {"lz4", "zstd", "zlib", "blosclz"};
    const int size = blosc_compress_ctx(5, BLOSC_SHUFFLE, 4, bytes.size(), bytes.data(), out.data(),
                                        out.size(), names[bytes.size() % 4], 0, 1);
    if (size < 1) throw Error("blosc_compress_ctx");
    out.resize(static_cast<std::size_t>(size));
    return out;
  }
#endif
#ifdef TESSERA_HAS_ZLIB
  z_stream stream{};
  if (deflateInit2(&stream, 5, Z_DEFLATED, compressor == "gzip" ? 31 : 15, 8, 0) != Z_OK)
    throw Error("deflateInit2");
  std::string from = bytes, out(deflateBound(&stream, bytes.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(from.data());
  stream.avail_in = static_cast<uInt>(from.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
#else
  throw Error("not compressed by this build");
#endif
}

inline std::string bytes_of(at::Tensor chunk, const Layout& as) {
  const std::map<std::string, at::ScalarType> types{
      {"f2", at::kHalf},   {"f4", at::kFloat},  {"f8", at::kDouble}, {"i1", at::kChar},
      {"i2", at::kShort},  {"i4", at::kInt},    {"i8", at::kLong},   {"u1", at::kByte},
      {"u2", at::kUInt16}, {"u4", at::kUInt32}, {"u8", at::kLong},   {"b1", at::kBool}};
  Sizes order;
  for (std::int64_t d = chunk.dim(); d-- > 0;) order.push_back(d);
  if (as.column_major) chunk = chunk.permute(order);
  chunk = chunk.to(types.at(as.type.substr(1))).contiguous();
  std::string bytes(static_cast<const char*>(chunk.const_data_ptr()), chunk.nbytes());
  if (const auto n = chunk.element_size(); as.type[0] == '>')
    for (auto i = bytes.begin(); i != bytes.end(); i += static_cast<std::ptrdiff_t>(n))
      std::reverse(i, i + static_cast<std::ptrdiff_t>(n));
  return packed(bytes, as.compressor);
}

inline std::string metadata(const Sizes& shape, const Layout& as) {
  if (as.format == 2)
    return concat(R"({"zarr_format": 2, "shape": )", list(shape), R"(, "chunks": )", list(as.chunk),
                  R"(, "dtype": ")", as.type, R"(", "order": ")", as.column_major ? "F" : "C",
                  R"(", "fill_value": )", as.fill, R"(, "dimension_separator": ")", as.separator,
                  R"(", "filters": null)", R"(, "compressor": )",
                  as.compressor.empty() ? "null" : concat(R"({"id": ")", as.compressor, "\"}"),
                  "}");
  const std::map<char, std::string> kinds{{'f', "float"}, {'i', "int"}, {'u', "uint"}};
  const std::string type =
      as.type[1] == 'b' ? "bool" : concat(kinds.at(as.type[1]), 8 * (as.type[2] - '0'));
  return concat(R"({"zarr_format": 3, "node_type": "array", "shape": )", list(shape),
                R"(, "data_type": ")", type,
                R"(", "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": )",
                list(as.chunk), R"(}}, "chunk_key_encoding": {"name": "default", )",
                R"("configuration": {"separator": ")", as.separator, R"("}}, "fill_value": )",
                as.fill, R"(, "codecs": [{"name": "bytes", "configuration": {"endian": ")",
                as.type[0] == '>' ? "big" : "little", "\"}}",
                as.compressor.empty() ? "" : concat(R"(, {"name": ")", as.compressor, "\"}"),
                "], \"attributes\": ", as.attributes, "}");
}

// An array of a group, as the specifications say.
inline void write_array(const std::string& folder, const std::string& name, const at::Tensor& data,
                        const Layout& as) {
  const std::string root = concat(folder, "/", name);
  write(folder + (as.format == 2 ? "/.zgroup" : "/zarr.json"),
        as.format == 2 ? R"({"zarr_format": 2})" : R"({"zarr_format": 3, "node_type": "group"})");
  write(root + (as.format == 2 ? "/.zarray" : "/zarr.json"), metadata(data.sizes().vec(), as));
  if (as.format == 2) write(root + "/.zattrs", as.attributes);
  Sizes place(as.chunk.size(), 0);
  const auto key = [&] {
    std::string key = as.format == 3 ? "c" : "";
    for (const std::int64_t i : place) key += concat(key.empty() ? "" : as.separator, i);
    return concat(root, "/", key.empty() ? "0" : key);
  };
  for (bool more = data.numel() > 0; more;) {
    at::Tensor chunk = at::full(as.chunk, std::stod(as.fill), data.options()), box = data;
    at::Tensor part = chunk;
    for (std::size_t i = 0; i < place.size(); ++i) {
      const auto d = static_cast<std::int64_t>(i);
      box = box.slice(d, place[i] * as.chunk[i], (place[i] + 1) * as.chunk[i]);
      part = part.narrow(d, 0, box.size(d));
    }
    part.copy_(box);
    if (!as.sparse || !chunk.eq(std::stod(as.fill)).all().item<bool>())
      write(key(), bytes_of(chunk, as));
    more = false;
    for (std::size_t d = place.size(); d-- > 0 && !more;) {
      more = (place[d] + 1) * as.chunk[d] < data.size(static_cast<std::int64_t>(d));
      place[d] = more ? place[d] + 1 : 0;
    }
  }
}

// An array of format 2 or 3 with the text `from` of its metadata replaced, and what it reads.
struct Altered {
  Folder folder;
  Altered(const at::Tensor& data, const Layout& as, const std::string& from = {},
          const std::string& to = {}) {
    write_array(folder.path(), "u", data, as);
    std::string text = metadata(data.sizes().vec(), as);
    if (const auto at = text.find(from); !from.empty()) {
      EXPECT_NE(at, std::string::npos) << from;
      text.replace(at, from.size(), to);
    }
    write(folder / (as.format == 2 ? "u/.zarray" : "u/zarr.json"), text);
  }
  at::Tensor read(const ReadOptions& options = {.dtype = at::kDouble}) const {
    return ZarrSource(folder.path()).read("u", {}, options);
  }
};

}  // namespace tessera::zarr_source_test
