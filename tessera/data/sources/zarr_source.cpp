#include "tessera/data/sources/zarr_source.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <filesystem>
#include <list>
#include <map>
#include <mutex>
#include <numeric>

#include "tessera/base/internal/file.h"
#include "tessera/base/text.h"
#include "tessera/data/sources/detail/cf_values.h"
#include "tessera/data/sources/detail/chunk_codec.h"
#include "tessera/data/sources/detail/zarr_array.h"
#include "tessera/files/read_file.h"

namespace tessera {

namespace {

using detail::ZarrArray;

void require_known(const ZarrArray& array) {
  const bool known = array.compressor.empty() || detail::is_chunk_codec(array.compressor);
  if (known && array.refused.empty()) return;
  throw NotAvailable("the chunks of ", array.folder, " have ",
                     known ? array.refused : concat("compressor '", array.compressor, "'"),
                     ", which ZarrSource cannot read: write the array with zlib, gzip, zstd, blosc "
                     "or no compressor, or read it in Python by the package zarr");
}

// Whether a chunk was written. Throws FileError where that cannot be told: the array itself may be
// gone, as with its disk.
bool is_there(const ZarrArray& array, const std::string& path) {
  namespace fs = std::filesystem;
  const auto type = [](const std::string& of) {
    std::error_code error;
    const fs::file_status status = fs::symlink_status(of, error);
    if (error && status.type() != fs::file_type::not_found)
      throw FileError(of, ": ", error.message());
    return status.type();
  };
  if (type(path) != fs::file_type::not_found) return true;
  if (type(array.folder + "/zarr.json") == fs::file_type::not_found &&
      type(array.folder + "/.zarray") == fs::file_type::not_found)
    throw FileError(path, ": the array of this chunk is not there any more");
  return false;
}

// The chunk in the dtype that the variable has in memory; one number for all of one that is not
// there.
at::Tensor chunk_of(const ZarrArray& array, const std::vector<std::int64_t>& place) {
  const std::string path = array.chunk_path(place);
  if (!is_there(array, path)) {
    if (!array.fill)
      throw FileError(path,
                      ": this chunk is not there, and the array has no fill value, or one "
                      "above 2^63 - 1");
    return at::full({}, *array.fill, array.info.stored).expand(array.chunk);
  }
  const std::vector<std::int64_t> shape =
      array.column_major ? std::vector<std::int64_t>(array.chunk.rbegin(), array.chunk.rend())
                         : array.chunk;
  // A byte of a bool may be any number.
  at::Tensor values = at::empty(shape, array.file_type == at::kBool ? at::kByte : array.file_type);
  const ReadFile file(path);
  bool complete = file.size() == values.nbytes();
  if (array.compressor.empty()) {
    if (complete) file.read(values.mutable_data_ptr(), values.nbytes(), 0);
  } else {
    std::string packed(file.size(), '\0');
    file.read(packed.data(), packed.size(), 0);
    complete = detail::decompress_chunk(array.compressor, packed, values.mutable_data_ptr(),
                                        values.nbytes(), array.folder);
  }
  if (!complete)
    throw FileError(path, ": this chunk of ", file.size(), " bytes is damaged or cut off; ",
                    values.nbytes(), " bytes were to come",
                    array.compressor.empty() ? "" : concat(" out of ", array.compressor));
  if (array.big_endian && values.element_size() > 1)
    values =
        at::from_blob(values.mutable_data_ptr(), {values.numel(), values.element_size()}, at::kByte)
            .flip(1)
            .view(array.file_type)
            .view(shape);
  if (array.column_major) {
    std::vector<std::int64_t> reversed(shape.size());
    std::iota(reversed.rbegin(), reversed.rend(), 0);
    values = values.permute(reversed);
  }
  values = array.file_type == at::kBool ? values.ne(0) : values.to(array.info.stored);
  if (array.file_type == at::kUInt64 && values.lt(0).any().item<bool>())
    throw FileError(path, ": unsigned values above 2^63 - 1 cannot be held");
  return values;
}

}  // namespace

struct ZarrSource::Arrays {
  Arrays(const std::string& path, std::int64_t keep) : all(detail::zarr_arrays(path)), keep(keep) {}

  // Two threads may read a chunk at the same time; one of them is kept.
  at::Tensor chunk(const ZarrArray& array, const std::vector<std::int64_t>& place) {
    const Key key{&array, place};
    {
      const std::lock_guard lock(mutex);
      if (const auto found = kept.find(key); found != kept.end()) {
        order.splice(order.end(), order, found->second.last);
        return found->second.values;
      }
    }
    const at::Tensor values = chunk_of(array, place);
    const std::int64_t bytes = held_by(values);
    const std::lock_guard lock(mutex);
    if (bytes > keep || kept.contains(key)) return values;
    order.push_back(key);
    kept.emplace(key, Kept{values, std::prev(order.end())});
    for (held += bytes; held > keep; order.pop_front()) {
      const auto oldest = kept.find(order.front());
      held -= held_by(oldest->second.values);
      kept.erase(oldest);
    }
    return values;
  }

  using Key = std::pair<const ZarrArray*, std::vector<std::int64_t>>;
  // The oldest first.
  std::list<Key> order;
  struct Kept {
    at::Tensor values;
    std::list<Key>::iterator last;
  };
  // With what a small one needs around it.
  static std::int64_t held_by(const at::Tensor& values) {
    return static_cast<std::int64_t>(values.storage().nbytes()) + 512;
  }
  const std::vector<ZarrArray> all;
  const std::int64_t keep;
  std::mutex mutex;
  std::map<Key, Kept> kept;
  std::int64_t held = 0;
};

ZarrSource::ZarrSource(const std::string& path, std::int64_t keep)
    : ListedSource(path, "numeric array"), arrays_(std::make_unique<Arrays>(path, keep)) {
  for (const ZarrArray& a : arrays_->all) add(a.info);
}
ZarrSource::~ZarrSource() = default;

const std::vector<std::int64_t>& ZarrSource::chunk_shape(const std::string& variable) const {
  return arrays_->all[place(variable)].chunk;
}

at::Tensor ZarrSource::read_box(const VariableInfo& about, const Hyperslab& slab,
                                const ReadOptions& options) const {
  const ZarrArray& array = arrays_->all[place(about.name)];
  require_known(array);
  const std::size_t dims = array.chunk.size();
  at::Tensor stored = at::empty(slab.count, about.stored);
  // Of each dim the box' indices [begin, end) that lie in the chunk at `place`, which counts on
  // like the digits of a number.
  std::vector<std::int64_t> begin(dims, 0), place(dims), end(dims);
  const auto enter = [&](std::size_t d) {
    place[d] = (slab.start[d] + begin[d] * slab.stride[d]) / array.chunk[d];
    const std::int64_t last = (place[d] + 1) * array.chunk[d] - 1;
    end[d] = std::min(slab.count[d], (last - slab.start[d]) / slab.stride[d] + 1);
  };
  for (std::size_t d = 0; d < dims; ++d) enter(d);
  for (bool more = true; more;) {
    at::Tensor from = arrays_->chunk(array, place), to = stored;
    for (std::size_t i = 0; i < dims; ++i) {
      const auto d = static_cast<std::int64_t>(i);
      const std::int64_t first =
          slab.start[i] + begin[i] * slab.stride[i] - place[i] * array.chunk[i];
      const std::int64_t count = end[i] - begin[i];
      from = from.slice(d, first, first + (count - 1) * slab.stride[i] + 1, slab.stride[i]);
      to = to.narrow(d, begin[i], count);
    }
    to.copy_(from);
    more = false;
    for (std::size_t d = dims; d-- > 0 && !more;) {
      more = end[d] < slab.count[d];
      begin[d] = more ? end[d] : 0;
      enter(d);
    }
  }
  if (!options.decode) return stored.to(options.dtype);
  if (!array.unmarked.empty())
    throw VariableError(about.name, " in ", name(), ": ", array.unmarked,
                        ": read it with ReadOptions::decode = false");
  return detail::cf_values(stored, about, array.missing, options, name());
}

}  // namespace tessera
