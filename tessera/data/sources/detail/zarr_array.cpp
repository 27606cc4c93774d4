#include "tessera/data/sources/detail/zarr_array.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/internal/file.h"
#include "tessera/base/text.h"
#include "tessera/files/json.h"
#include "tessera/files/read_file.h"

namespace tessera::detail {

namespace {

namespace fs = std::filesystem;
using Kind = Json::Kind;

// The kind of numpy ('f', 'i', 'u', 'b') and the bytes of an element; nullopt for others.
std::optional<at::ScalarType> type_of(char kind, std::uint64_t bytes) {
  const auto of = [&](std::initializer_list<std::pair<std::uint64_t, at::ScalarType>> sizes)
      -> std::optional<at::ScalarType> {
    for (const auto& [size, type] : sizes)
      if (size == bytes) return type;
    return std::nullopt;
  };
  switch (kind) {
    case 'f':
      return of({{2, at::kHalf}, {4, at::kFloat}, {8, at::kDouble}});
    case 'i':
      return of({{1, at::kChar}, {2, at::kShort}, {4, at::kInt}, {8, at::kLong}});
    case 'u':
      return of({{1, at::kByte}, {2, at::kUInt16}, {4, at::kUInt32}, {8, at::kUInt64}});
    case 'b':
      return of({{1, at::kBool}});
    default:
      return std::nullopt;
  }
}

at::ScalarType holding(at::ScalarType file_type) {
  switch (file_type) {
    case at::kUInt16:
      return at::kInt;
    case at::kUInt32:
    case at::kUInt64:
      return at::kLong;
    default:
      return file_type;
  }
}

std::optional<at::Scalar> scalar_of(const Json& value, at::ScalarType type) {
  if (value.is(Kind::null)) return std::nullopt;
  if (value.is(Kind::boolean)) return at::Scalar(value.boolean());
  if (value.is(Kind::string)) {
    const std::string& text = value.string();
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (text == "NaN") return at::Scalar(std::nan(""));
    if (text == "Infinity") return at::Scalar(kInfinity);
    if (text == "-Infinity") return at::Scalar(-kInfinity);
    throw InvalidArgument(concat("a fill value '", text, "'"));
  }
  if (at::isFloatingType(type)) return at::Scalar(value.real());
  if (value.real() < 0) return at::Scalar(static_cast<std::int64_t>(value.real()));
  return at::Scalar(static_cast<std::int64_t>(value.number()));
}

std::vector<std::int64_t> sizes_of(const Json& value, std::int64_t least) {
  std::vector<std::int64_t> sizes;
  for (const Json& n : value.items()) {
    sizes.push_back(n.index());
    if (sizes.back() < least) throw InvalidArgument(concat("a size of ", sizes.back()));
  }
  return sizes;
}

// Numbers, lists of them and text; others are left out.
std::map<std::string, Attribute> attributes_of(const Json& all) {
  std::map<std::string, Attribute> attributes;
  for (const auto& [name, value] : all.members()) {
    if (value.is(Kind::string)) {
      attributes[name] = value.string();
    } else if (value.is(Kind::number)) {
      attributes[name] = std::vector{value.real()};
    } else if (value.is(Kind::array) &&
               std::all_of(value.items().begin(), value.items().end(),
                           [](const Json& item) { return item.is(Kind::number); })) {
      std::vector<double> numbers;
      for (const Json& item : value.items()) numbers.push_back(item.real());
      attributes[name] = std::move(numbers);
    }
  }
  return attributes;
}

void name_dims(ZarrArray& array, const Json* names) {
  for (std::size_t d = 0; d < array.info.shape.size(); ++d) {
    const Json* name =
        names && names->is(Kind::array) && d < names->items().size() ? &names->items()[d] : nullptr;
    array.info.dims.push_back(name && name->is(Kind::string) ? name->string() : concat("dim", d));
  }
}

void refuse(ZarrArray& array, const std::string& what) {
  array.refused += concat(array.refused.empty() ? "" : ", ", what);
}

bool second_format(const Json& about, const Json& attributes, ZarrArray& array) {
  // "<f8"; other kinds are a list, of a structure.
  if (!about.at("dtype").is(Kind::string)) return false;
  const std::string& dtype = about.at("dtype").string();
  const auto type = dtype.size() == 3
                        ? type_of(dtype[1], static_cast<std::uint64_t>(dtype[2] - '0'))
                        : std::nullopt;
  if (!type) return false;
  array.file_type = *type;
  array.big_endian = dtype[0] == '>';
  array.info.shape = sizes_of(about.at("shape"), 0);
  array.chunk = sizes_of(about.at("chunks"), 1);
  array.column_major = about.at("order").string() == "F";
  array.fill = scalar_of(about.at("fill_value"), *type);
  array.separator =
      about.find("dimension_separator") ? about.at("dimension_separator").string() : ".";
  if (const Json& compressor = about.at("compressor"); !compressor.is(Kind::null))
    array.compressor = compressor.at("id").string();
  if (const Json* filters = about.find("filters"); filters && filters->is(Kind::array))
    for (const Json& filter : filters->items())
      refuse(array, concat("filter '", filter.at("id").string(), "'"));
  const Json* dims = attributes.find("_ARRAY_DIMENSIONS");
  name_dims(array, dims);
  if (dims) array.missing = array.fill;
  return true;
}

bool third_format(const Json& about, ZarrArray& array) {
  if (!about.at("data_type").is(Kind::string)) return false;
  const std::string& name = about.at("data_type").string();  // "float64", "uint8", "bool"
  const auto digits = name.find_first_of("0123456789");
  const std::uint64_t bits =
      digits == std::string::npos ? 8 : Json::parse(name.substr(digits)).number();
  const auto type = name.starts_with("complex") ? std::nullopt : type_of(name[0], bits / 8);
  if (!type) return false;
  array.file_type = *type;
  array.info.shape = sizes_of(about.at("shape"), 0);
  array.chunk = sizes_of(about.at("chunk_grid").at("configuration").at("chunk_shape"), 1);
  if (const std::string& grid = about.at("chunk_grid").at("name").string(); grid != "regular")
    refuse(array, concat("chunk grid '", grid, "'"));
  array.fill = scalar_of(about.at("fill_value"), *type);
  const Json& key = about.at("chunk_key_encoding");
  const bool second = key.at("name").string() == "v2";
  const Json* with = key.find("configuration");
  const Json* separator = with ? with->find("separator") : nullptr;
  array.separator = separator ? separator->string() : second ? "." : "/";
  if (!second) array.prefix = concat("c", array.info.shape.empty() ? "" : array.separator);
  for (const Json& codec : about.at("codecs").items()) {
    const std::string& id = codec.at("name").string();
    const Json* how = codec.find("configuration");
    if (id == "bytes")
      array.big_endian = how && how->find("endian") && how->at("endian").string() == "big";
    else if (array.compressor.empty() && (id == "gzip" || id == "zstd" || id == "blosc"))
      array.compressor = id;
    else
      refuse(array, concat("codec '", id, "'"));
  }
  name_dims(array, about.find("dimension_names"));
  return true;
}

std::optional<Json> json_of(const fs::path& file) {
  if (!fs::is_regular_file(file)) return std::nullopt;
  const ReadFile source(file.string());
  std::string text(source.size(), '\0');
  source.read(text.data(), text.size(), 0);
  try {
    return Json::parse(text);
  } catch (const InvalidArgument& e) {
    throw FileError(concat(file.string(), ": ", e.what()));
  }
}

// Nothing for a group; `known` becomes true for what is one of either.
std::optional<ZarrArray> array_in(const fs::path& folder, const std::string& name, bool& known) {
  ZarrArray array{.info = {name, {}, {}, at::kFloat, {}}, .folder = folder.string()};
  try {
    bool read = false;
    if (const auto third = json_of(folder / "zarr.json")) {
      known = true;
      if (third->at("node_type").string() != "array") return std::nullopt;
      if (const Json* own = third->find("attributes")) array.info.attributes = attributes_of(*own);
      read = third_format(*third, array);
    } else if (const auto second = json_of(folder / ".zarray")) {
      known = true;
      const auto own = json_of(folder / ".zattrs");
      const Json attributes = own ? *own : Json::parse("{}");
      array.info.attributes = attributes_of(attributes);
      read = second_format(*second, attributes, array);
    } else {
      known = known || fs::is_regular_file(folder / ".zgroup");
      return std::nullopt;
    }
    if (!read) return std::nullopt;
    if (array.chunk.size() != array.info.shape.size())
      throw InvalidArgument(
          concat("chunks of ", list(array.chunk), " and a shape of ", list(array.info.shape)));
  } catch (const InvalidArgument& e) {
    throw FileError(concat("the metadata of the Zarr array in ", folder.string(),
                           " cannot be understood: ", e.what()));
  }
  array.info.stored = holding(array.file_type);
  if (const auto own = array.info.attributes.find("_FillValue"); own != array.info.attributes.end())
    if (const auto* number = std::get_if<std::vector<double>>(&own->second);
        number && number->size() == 1)
      array.missing = at::isFloatingType(array.file_type)
                          ? at::Scalar(number->front())
                          : at::Scalar(static_cast<std::int64_t>(number->front()));
  return array;
}

}  // namespace

std::string ZarrArray::chunk_path(const std::vector<std::int64_t>& place) const {
  std::string path = concat(folder, "/", prefix);
  for (std::size_t d = 0; d < place.size(); ++d) path += concat(d == 0 ? "" : separator, place[d]);
  return place.empty() && prefix.empty() ? path + "0" : path;
}

std::vector<ZarrArray> zarr_arrays(const std::string& folder) {
  std::vector<ZarrArray> arrays;
  bool known = false;
  fs::path root = fs::path(folder).lexically_normal();
  if (!root.has_filename()) root = root.parent_path();  // "x.zarr/"
  const std::string name = root.filename().string();
  if (auto whole =
          array_in(root, name.ends_with(".zarr") ? name.substr(0, name.size() - 5) : name, known)) {
    arrays.push_back(std::move(*whole));
    return arrays;
  }
  if (!known)
    throw FileError(concat(folder,
                           " is no Zarr group or array: it has none of zarr.json, .zgroup "
                           "and .zarray"));
  for (auto it = fs::recursive_directory_iterator(root); it != fs::recursive_directory_iterator();
       ++it) {
    if (!it->is_directory()) continue;
    bool array_or_group = false;
    auto array =
        array_in(it->path(), fs::relative(it->path(), root).generic_string(), array_or_group);
    // Below an array are its chunks.
    if (array || !array_or_group) it.disable_recursion_pending();
    if (array) arrays.push_back(std::move(*array));
  }
  std::sort(arrays.begin(), arrays.end(),
            [](const ZarrArray& a, const ZarrArray& b) { return a.info.name < b.info.name; });
  return arrays;
}

}  // namespace tessera::detail
