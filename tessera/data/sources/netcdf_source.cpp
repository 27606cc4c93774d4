#include "tessera/data/sources/netcdf_source.h"

#include <ATen/ops/empty.h>
#include <c10/core/DynamicCast.h>
#include <c10/core/Scalar.h>
#include <netcdf.h>

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/data/sources/detail/cf_values.h"
#include "tessera/data/sources/detail/hdf5_lock.h"

namespace tessera {
namespace {

// A numeric type: the dtype of its values, and the one that libtorch computes with and that holds
// them all.
struct NumericType {
  nc_type type;
  at::ScalarType exact, stored;
};
constexpr NumericType kNumericTypes[] = {
    {NC_BYTE, at::kChar, at::kChar},    {NC_UBYTE, at::kByte, at::kByte},
    {NC_SHORT, at::kShort, at::kShort}, {NC_USHORT, at::kUInt16, at::kInt},
    {NC_INT, at::kInt, at::kInt},       {NC_UINT, at::kUInt32, at::kLong},
    {NC_INT64, at::kLong, at::kLong},   {NC_UINT64, at::kUInt64, at::kLong},
    {NC_FLOAT, at::kFloat, at::kFloat}, {NC_DOUBLE, at::kDouble, at::kDouble},
};

// Nothing for text and user-defined types.
const NumericType* numeric_type(nc_type type) {
  for (const NumericType& one : kNumericTypes)
    if (one.type == type) return &one;
  return nullptr;
}

std::optional<at::Scalar> fill_of(int file, int variable, const NumericType& type, bool stated) {
  // All 256 values of a byte are data, unless the file says otherwise. The library's fill value for
  // unsigned 64-bit is too large to be read.
  const bool byte = type.type == NC_BYTE || type.type == NC_UBYTE;
  if ((byte && !stated) || type.type == NC_UINT64) return std::nullopt;
  int no_fill = 0;
  alignas(double) char value[sizeof(double)] = {};
  if (nc_inq_var_fill(file, variable, &no_fill, value) != NC_NOERR || (no_fill && !stated))
    return std::nullopt;
  if (at::isFloatingType(type.exact)) return c10::fetch_and_cast<double>(type.exact, value);
  return c10::fetch_and_cast<std::int64_t>(type.exact, value);
}

}  // namespace

// An open netCDF file: its structure, and raw reads. All calls into the library are here, under
// one lock.
struct NetcdfSource::File {
  struct Variable {
    VariableInfo info;
    int id = -1;
    // The stored value of an element without a value: _FillValue, else the library's own, if it has
    // one for the type.
    std::optional<at::Scalar> fill;
  };

  explicit File(const std::string& path) : path(path) {
    const std::lock_guard lock(detail::hdf5_library());
    check(nc_open(path.c_str(), NC_NOWRITE, &id), "cannot be opened as a netCDF file");
  }
  ~File() {
    const std::lock_guard lock(detail::hdf5_library());
    nc_close(id);
  }

  void check(int status, const std::string& what) const {
    if (status != NC_NOERR) throw FileError(path, ": ", what, ": ", nc_strerror(status));
  }

  // Fills in the variables, and returns the attributes of the file.
  std::map<std::string, Attribute> read_structure() {
    const std::lock_guard lock(detail::hdf5_library());
    int count = 0, count_attributes = 0;
    check(nc_inq(id, nullptr, &count, &count_attributes, nullptr), "its contents cannot be listed");
    auto attributes = read_attributes(NC_GLOBAL, count_attributes);
    for (int v = 0; v < count; ++v) {
      char name[NC_MAX_NAME + 1];
      nc_type type = 0;
      int dims = 0, own = 0;
      check(nc_inq_var(id, v, name, &type, &dims, nullptr, &own), concat("variable number ", v));
      const NumericType* numeric = numeric_type(type);
      if (!numeric) continue;
      Variable variable{{name, {}, {}, numeric->stored, read_attributes(v, own)}, v, {}};
      variable.fill = fill_of(id, v, *numeric, variable.info.attributes.count("_FillValue") != 0);
      std::vector<int> ids(static_cast<std::size_t>(dims));
      check(nc_inq_vardimid(id, v, ids.data()), concat("dimensions of ", name));
      for (const int d : ids) {
        char dim[NC_MAX_NAME + 1];
        std::size_t size = 0;
        check(nc_inq_dim(id, d, dim, &size), concat("dimensions of ", name));
        variable.info.dims.emplace_back(dim);
        variable.info.shape.push_back(static_cast<std::int64_t>(size));
      }
      variables.push_back(std::move(variable));
    }
    return attributes;
  }

  std::map<std::string, Attribute> read_attributes(int variable, int count) const {
    std::map<std::string, Attribute> all;
    for (int a = 0; a < count; ++a) {
      char name[NC_MAX_NAME + 1];
      nc_type type = 0;
      std::size_t size = 0;
      check(nc_inq_attname(id, variable, a, name), "an attribute's name");
      check(nc_inq_att(id, variable, name, &type, &size), concat("attribute ", name));
      if (type == NC_CHAR) {
        std::string text(size, '\0');
        check(nc_get_att_text(id, variable, name, text.data()), concat("attribute ", name));
        while (!text.empty() && text.back() == '\0') text.pop_back();
        all[name] = std::move(text);
      } else if (type == NC_STRING) {
        std::vector<char*> parts(size);
        check(nc_get_att_string(id, variable, name, parts.data()), concat("attribute ", name));
        std::string text;
        for (const char* part : parts) text += concat(text.empty() ? "" : "\n", part ? part : "");
        nc_free_string(size, parts.data());
        all[name] = std::move(text);
      } else if (numeric_type(type)) {
        std::vector<double> numbers(size);
        check(nc_get_att_double(id, variable, name, numbers.data()), concat("attribute ", name));
        all[name] = std::move(numbers);
      }
    }
    return all;
  }

  // The stored values of a complete, non-empty slab, in the variable's `stored` dtype.
  at::Tensor read(const Variable& variable, const Hyperslab& slab) const {
    at::Tensor out = at::empty(slab.count, variable.info.stored);
    const std::vector<std::size_t> start(slab.start.begin(), slab.start.end()),
        count(slab.count.begin(), slab.count.end());
    const std::vector<std::ptrdiff_t> stride(slab.stride.begin(), slab.stride.end());
    const std::lock_guard lock(detail::hdf5_library());
    // The call names the type in memory; an unsigned type stored in a wider tensor is converted by
    // the library.
    const auto get = [&](auto* function, auto* into) {
      return function(id, variable.id, start.data(), count.data(), stride.data(), into);
    };
    const int status = [&] {
      switch (variable.info.stored) {
        case at::kChar:
          return get(nc_get_vars_schar, out.mutable_data_ptr<std::int8_t>());
        case at::kByte:
          return get(nc_get_vars_uchar, out.mutable_data_ptr<std::uint8_t>());
        case at::kShort:
          return get(nc_get_vars_short, out.mutable_data_ptr<std::int16_t>());
        case at::kInt:
          return get(nc_get_vars_int, out.mutable_data_ptr<std::int32_t>());
        case at::kLong:
          return get(nc_get_vars_longlong,
                     reinterpret_cast<long long*>(out.mutable_data_ptr<std::int64_t>()));
        case at::kFloat:
          return get(nc_get_vars_float, out.mutable_data_ptr<float>());
        default:
          return get(nc_get_vars_double, out.mutable_data_ptr<double>());
      }
    }();
    check(status, concat("reading ", variable.info.name, " from ", list(slab.start), ", count ",
                         list(slab.count), ", stride ", list(slab.stride)));
    return out;
  }

  std::string path;
  int id = -1;
  std::vector<Variable> variables;
};

NetcdfSource::NetcdfSource(const std::string& path)
    : ListedSource(path, "numeric variable"), file_(std::make_unique<File>(path)) {
  attributes_ = file_->read_structure();
  for (const File::Variable& v : file_->variables) add(v.info);
}
NetcdfSource::~NetcdfSource() = default;

at::Tensor NetcdfSource::read_box(const VariableInfo& about, const Hyperslab& slab,
                                  const ReadOptions& options) const {
  const File::Variable& variable = file_->variables[place(about.name)];
  const at::Tensor stored = file_->read(variable, slab);
  if (!options.decode) return stored.to(options.dtype);
  return detail::cf_values(stored, about, variable.fill, options, name());
}

}  // namespace tessera
