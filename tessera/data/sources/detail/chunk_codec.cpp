#include "tessera/data/sources/detail/chunk_codec.h"

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
#include <iterator>
#include <limits>

namespace tessera::detail {

namespace {

using Decompress = bool (*)(std::string& packed, void* out, std::size_t size,
                            const std::string& whose);

#ifdef TESSERA_HAS_ZLIB
bool of_zlib(std::string& packed, void* out, std::size_t size, const std::string& whose) {
  constexpr std::size_t kMost = std::numeric_limits<uInt>::max();
  if (packed.size() > kMost || size > kMost)
    throw NotAvailable("the chunks of ", whose,
                       " are compressed by zlib and larger than 4 GiB, which cannot be read: "
                       "write the array with smaller chunks");
  z_stream stream{};
  stream.next_in = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_in = static_cast<uInt>(packed.size());
  stream.next_out = static_cast<Bytef*>(out);
  stream.avail_out = static_cast<uInt>(size);
  // 32: whether it is zlib's or gzip's header is for the library to see.
  if (inflateInit2(&stream, 15 + 32) != Z_OK) return false;
  const int status = inflate(&stream, Z_FINISH);
  inflateEnd(&stream);
  return status == Z_STREAM_END && stream.avail_out == 0 && stream.avail_in == 0;
}
#else
constexpr Decompress of_zlib = nullptr;
#endif

#ifdef TESSERA_HAS_ZSTD
bool of_zstd(std::string& packed, void* out, std::size_t size, const std::string& /*whose*/) {
  return ZSTD_decompress(out, size, packed.data(), packed.size()) == size;
}
#else
constexpr Decompress of_zstd = nullptr;
#endif

#ifdef TESSERA_HAS_BLOSC
bool of_blosc(std::string& packed, void* out, std::size_t size, const std::string& /*whose*/) {
  // Its header says how much it holds: more must not be written.
  std::size_t held = 0;
  if (blosc_cbuffer_validate(packed.data(), packed.size(), &held) != 0 || held != size)
    return false;
  // Readers have threads of their own.
  return size == 0 ||
         blosc_decompress_ctx(packed.data(), out, size, 1) == static_cast<std::int64_t>(size);
}
#else
constexpr Decompress of_blosc = nullptr;
#endif

struct Codec {
  const char* name;
  Decompress decompress;
  const char* library;
  const char* package;
};
constexpr Codec kCodecs[] = {
    {"zlib", of_zlib, "zlib", "zlib1g-dev"},
    {"gzip", of_zlib, "zlib", "zlib1g-dev"},
    {"zstd", of_zstd, "zstd", "libzstd-dev"},
    {"blosc", of_blosc, "blosc", "libblosc-dev"},
};

const Codec* find_codec(const std::string& name) {
  const auto* const found = std::find_if(std::begin(kCodecs), std::end(kCodecs),
                                         [&](const Codec& codec) { return codec.name == name; });
  return found == std::end(kCodecs) ? nullptr : found;
}

}  // namespace

bool is_chunk_codec(const std::string& name) { return find_codec(name) != nullptr; }

bool decompress_chunk(const std::string& codec, std::string& packed, void* out, std::size_t size,
                      const std::string& whose) {
  const Codec& with = *find_codec(codec);
  if (!with.decompress)
    throw NotAvailable("this Tessera was built without ", with.library, ", and the chunks of ",
                       whose, " are compressed by ", codec, ": install ", with.library,
                       " (Debian: ", with.package, ") and configure again");
  return with.decompress(packed, out, size, whose);
}

}  // namespace tessera::detail
