// The functions of HDF5 1.10, which later versions keep under this name.
#define H5_USE_110_API

#include "tessera/data/sources/hdf5_source.h"

#include <ATen/ops/empty.h>
#include <hdf5.h>

#include <algorithm>
#include <optional>

#include "tessera/base/pinned.h"
#include "tessera/base/text.h"
#include "tessera/data/sources/detail/hdf5_lock.h"

namespace tessera {
namespace {

// Holds the library's lock, silences its own printing, and knows why a call failed.
class Library {
 public:
  Library() : lock_(detail::hdf5_library()) {
    H5Eget_auto2(H5E_DEFAULT, &print_, &data_);
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  ~Library() { H5Eset_auto2(H5E_DEFAULT, print_, data_); }

  template <class Result>
  Result check(Result result, const std::string& what) const {
    if (result >= 0) return result;
    std::string why;
    H5Ewalk2(
        H5E_DEFAULT, H5E_WALK_UPWARD,
        [](unsigned, const H5E_error2_t* error, void* text) -> herr_t {
          auto& all = *static_cast<std::string*>(text);
          if (error->desc && all.size() < 300) all += concat(all.empty() ? "" : "; ", error->desc);
          return 0;
        },
        &why);
    throw FileError(what, ": ", why);
  }

 private:
  std::lock_guard<std::mutex> lock_;
  H5E_auto2_t print_ = nullptr;
  void* data_ = nullptr;
};

// An identifier of the library that closes itself; the lock is held at that time.
class Id : Pinned {
 public:
  Id(hid_t id, herr_t (*close)(hid_t)) : id_(id), close_(close) {}
  ~Id() { close_(id_); }
  operator hid_t() const { return id_; }

 private:
  hid_t id_;
  herr_t (*close_)(hid_t);
};

struct Kind {
  at::ScalarType stored;
  hid_t memory;
};

std::optional<Kind> kind_of(hid_t type) {
  const std::size_t size = H5Tget_size(type);
  if (H5Tget_class(type) == H5T_FLOAT && size <= 8)
    return size <= 4 ? Kind{at::kFloat, H5T_NATIVE_FLOAT} : Kind{at::kDouble, H5T_NATIVE_DOUBLE};
  if (H5Tget_class(type) != H5T_INTEGER) return std::nullopt;
  const bool negative = H5Tget_sign(type) != H5T_SGN_NONE;
  switch (size) {
    case 1:
      return negative ? Kind{at::kChar, H5T_NATIVE_INT8} : Kind{at::kByte, H5T_NATIVE_UINT8};
    case 2:
      return negative ? Kind{at::kShort, H5T_NATIVE_INT16} : Kind{at::kInt, H5T_NATIVE_INT32};
    case 4:
      return negative ? Kind{at::kInt, H5T_NATIVE_INT32} : Kind{at::kLong, H5T_NATIVE_INT64};
    case 8:  // a value beyond 2^63 - 1 shows as a negative one
      return negative ? Kind{at::kLong, H5T_NATIVE_INT64} : Kind{at::kLong, H5T_NATIVE_UINT64};
    default:
      return std::nullopt;
  }
}

}  // namespace

struct Hdf5Source::File {
  explicit File(const std::string& path) : path(path) {
    const Library library;
    id = library.check(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT),
                       concat("'", path, "' cannot be opened as an HDF5 file"));
  }
  ~File() {
    const Library library;
    H5Fclose(id);
  }

  // Its numeric datasets.
  std::vector<VariableInfo> read_structure() const {
    const Library library;
    std::vector<VariableInfo> variables;
    std::vector<std::string> names;
    library.check(H5Ovisit(
                      id, H5_INDEX_NAME, H5_ITER_INC,
                      [](hid_t, const char* name, const H5O_info_t* about, void* list) -> herr_t {
                        if (about->type == H5O_TYPE_DATASET)
                          static_cast<std::vector<std::string>*>(list)->emplace_back(name);
                        return 0;
                      },
                      &names),
                  concat("the contents of '", path, "' cannot be listed"));
    for (const std::string& name : names) {
      const Id set(
          library.check(H5Dopen2(id, name.c_str(), H5P_DEFAULT), concat(name, " in '", path, "'")),
          H5Dclose);
      const Id type(library.check(H5Dget_type(set), concat("the type of ", name)), H5Tclose);
      const Id space(library.check(H5Dget_space(set), concat("the shape of ", name)), H5Sclose);
      const auto kind = kind_of(type);
      if (!kind || H5Sget_simple_extent_type(space) == H5S_NULL) continue;
      std::vector<hsize_t> shape(static_cast<std::size_t>(
          library.check(H5Sget_simple_extent_ndims(space), concat("the shape of ", name))));
      library.check(H5Sget_simple_extent_dims(space, shape.data(), nullptr),
                    concat("the shape of ", name));
      VariableInfo info{name, {}, {}, kind->stored, {}};
      for (const hsize_t n : shape) {
        info.dims.push_back(concat("dim", info.dims.size()));
        info.shape.push_back(static_cast<std::int64_t>(n));
      }
      read_attributes(library, set, info);
      variables.push_back(std::move(info));
    }
    return variables;
  }

  // Attributes that are numbers or text; others are left out.
  void read_attributes(const Library& library, hid_t set, VariableInfo& info) const {
    H5O_info_t about;
    library.check(H5Oget_info(set, &about), concat("the attributes of ", info.name));
    for (hsize_t a = 0; a < about.num_attrs; ++a) {
      const Id attribute(library.check(H5Aopen_by_idx(set, ".", H5_INDEX_NAME, H5_ITER_INC, a,
                                                      H5P_DEFAULT, H5P_DEFAULT),
                                       concat("an attribute of ", info.name)),
                         H5Aclose);
      std::string name(
          static_cast<std::size_t>(std::max<ssize_t>(H5Aget_name(attribute, 0, nullptr), 0)), '\0');
      H5Aget_name(attribute, name.size() + 1, name.data());
      const Id type(H5Aget_type(attribute), H5Tclose), space(H5Aget_space(attribute), H5Sclose);
      const auto count =
          static_cast<std::size_t>(std::max<hssize_t>(H5Sget_simple_extent_npoints(space), 0));
      if (kind_of(type)) {
        std::vector<double> numbers(count);
        if (count > 0)
          library.check(H5Aread(attribute, H5T_NATIVE_DOUBLE, numbers.data()),
                        concat("attribute ", name, " of ", info.name));
        info.attributes[name] = std::move(numbers);
      } else if (H5Tget_class(type) == H5T_STRING && count == 1) {
        std::string text;
        if (H5Tis_variable_str(type) > 0) {
          char* read = nullptr;
          library.check(H5Aread(attribute, type, &read),
                        concat("attribute ", name, " of ", info.name));
          if (read) text = read;
          H5free_memory(read);
        } else {
          text.resize(H5Tget_size(type));
          library.check(H5Aread(attribute, type, text.data()),
                        concat("attribute ", name, " of ", info.name));
          text.resize(std::min(text.size(), text.find('\0')));
        }
        info.attributes[name] = std::move(text);
      }
    }
  }

  std::string path;
  hid_t id = -1;
};

Hdf5Source::Hdf5Source(const std::string& path)
    : ListedSource(path, "numeric dataset"), file_(std::make_unique<File>(path)) {
  for (VariableInfo& v : file_->read_structure()) add(std::move(v));
}
Hdf5Source::~Hdf5Source() = default;

at::Tensor Hdf5Source::read_box(const VariableInfo& variable, const Hyperslab& slab,
                                const ReadOptions& options) const {
  const std::string what = concat("reading ", variable.name, " of '", path_, "' from ",
                                  list(slab.start), ", count ", list(slab.count));
  at::Tensor out = at::empty(slab.count, variable.stored);
  bool natural = false;
  {
    const Library library;
    const Id set(library.check(H5Dopen2(file_->id, variable.name.c_str(), H5P_DEFAULT), what),
                 H5Dclose);
    const Id type(library.check(H5Dget_type(set), what), H5Tclose),
        space(library.check(H5Dget_space(set), what), H5Sclose);
    const std::vector<hsize_t> start(slab.start.begin(), slab.start.end()),
        count(slab.count.begin(), slab.count.end()), stride(slab.stride.begin(), slab.stride.end());
    const int dims = static_cast<int>(count.size());
    const Id memory(library.check(dims == 0 ? H5Screate(H5S_SCALAR)
                                            : H5Screate_simple(dims, count.data(), nullptr),
                                  what),
                    H5Sclose);
    if (dims > 0)
      library.check(H5Sselect_hyperslab(space, H5S_SELECT_SET, start.data(), stride.data(),
                                        count.data(), nullptr),
                    what);
    const Kind kind = *kind_of(type);
    library.check(H5Dread(set, kind.memory, memory, space, H5P_DEFAULT, out.mutable_data_ptr()),
                  what);
    natural = H5Tget_class(type) == H5T_INTEGER && H5Tget_size(type) == 8 &&
              H5Tget_sign(type) == H5T_SGN_NONE;
  }
  if (natural && out.lt(0).any().item<bool>())
    throw FileError(what, ": unsigned values above 2^63 - 1 cannot be held");
  return out.to(options.dtype);
}

}  // namespace tessera
