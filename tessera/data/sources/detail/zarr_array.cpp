#include "tessera/data/sources/detail/zarr_array.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/internal/file.h"
#include "tessera/base/text.h"
#include "tessera/data/sources/detail/chunk_codec.h"
#include "tessera/files/json.h"
#include "tessera/files/read_file.h"

namespace tessera::detail {

namespace {

namespace fs = std::filesystem;
using Kind = Json::Kind;

// A type as numpy has it: kind and bytes of an element, its name in format 3, and the dtypes of the
// file and of what holds every value of it.
struct NumpyType {
  char kind;
  int bytes;
  const char* name;
  at::ScalarType in_file, holding;
};
constexpr NumpyType kNumpyTypes[] = {
    {'f', 2, "float16", at::kHalf, at::kHalf},     {'f', 4, "float32", at::kFloat, at::kFloat},
    {'f', 8, "float64", at::kDouble, at::kDouble}, {'i', 1, "int8", at::kChar, at::kChar},
    {'i', 2, "int16", at::kShort, at::kShort},     {'i', 4, "int32", at::kInt, at::kInt},
    {'i', 8, "int64", at::kLong, at::kLong},       {'u', 1, "uint8", at::kByte, at::kByte},
    {'u', 2, "uint16", at::kUInt16, at::kInt},     {'u', 4, "uint32", at::kUInt32, at::kLong},
    {'u', 8, "uint64", at::kUInt64, at::kLong},    {'b', 1, "bool", at::kBool, at::kBool},
};

// Those of text, bytes, complex numbers and others are not there.
template <class Is>
const NumpyType* numpy_type(const Is& is) {
  const auto* const found = std::ranges::find_if(kNumpyTypes, is);
  return found == std::end(kNumpyTypes) ? nullptr : found;
}

// The words that JSON has not, as text.
std::optional<double> special(const std::string& text) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (text == "NaN") return std::nan("");
  if (text == "Infinity") return kInfinity;
  if (text == "-Infinity") return -kInfinity;
  return std::nullopt;
}

// A floating-point number by its bits, "0x7fc00000".
std::optional<at::Scalar> of_bits(const std::string& text, at::ScalarType type) {
  std::uint64_t bits = 0;
  const char* const end = text.data() + text.size();
  if (!text.starts_with("0x") || text.size() != 2 + 2 * c10::elementSize(type)) return std::nullopt;
  if (const auto [at, error] = std::from_chars(text.data() + 2, end, bits, 16);
      error != std::errc() || at != end)
    return std::nullopt;
  if (type == at::kDouble) return at::Scalar(std::bit_cast<double>(bits));
  if (type == at::kFloat) return at::Scalar(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  return at::Scalar(c10::Half(static_cast<std::uint16_t>(bits), c10::Half::from_bits()));
}

bool fits(std::int64_t value, at::ScalarType type) {
  if (!at::isIntegralType(type, false) || type == at::kLong) return true;
  if (type == at::kUInt64) return value >= 0;
  const bool is_signed = at::isSignedType(type);
  const auto bits = 8 * static_cast<int>(c10::elementSize(type)) - (is_signed ? 1 : 0);
  return value >= (is_signed ? -(std::int64_t{1} << bits) : 0) && value < std::int64_t{1} << bits;
}

// A fill value; absent: there is none, or none that 63 bits hold.
std::optional<at::Scalar> scalar_of(const Json& value, at::ScalarType type) {
  if (value.is(Kind::null)) return std::nullopt;
  if (value.is(Kind::boolean)) return at::Scalar(value.boolean());
  if (value.is(Kind::string)) {
    if (const auto word = special(value.string()); word && at::isFloatingType(type))
      return at::Scalar(*word);
    if (const auto bits = at::isFloatingType(type) ? of_bits(value.string(), type) : std::nullopt)
      return bits;
    throw InvalidArgument("a fill value '", value.string(), "'");
  }
  if (at::isFloatingType(type)) return at::Scalar(value.real());
  if (type == at::kUInt64 && value.real() >= 0x1p63) return std::nullopt;
  const auto number = value.integer();
  if (!number || !fits(*number, type)) throw InvalidArgument("a fill value that is none of ", type);
  return at::Scalar(*number);
}

// A double in base64, as xarray writes _FillValue into arrays of format 3.
std::optional<double> of_base64(const std::string& text) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  if (text.size() != 12 || text.back() != '=') return std::nullopt;
  std::uint64_t low = 0;
  unsigned int held = 0, have = 0, taken = 0;
  for (const char c : text.substr(0, 11)) {
    const auto digit = kDigits.find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    held = held << 6 | static_cast<unsigned int>(digit);
    for (have += 6; have >= 8 && taken < 8; ++taken) {
      have -= 8;
      low |= static_cast<std::uint64_t>(held >> have & 0xff) << 8 * taken;
    }
  }
  return taken == 8 ? std::optional(std::bit_cast<double>(low)) : std::nullopt;
}

// What the attribute _FillValue marks as missing. A number that the array cannot hold marks none.
void read_mark(ZarrArray& array, const Json& attributes) {
  const Json* own = attributes.find("_FillValue");
  if (!own) return;
  array.missing.reset();
  const bool real = at::isFloatingType(array.file_type);
  if (own->is(Kind::number) && real) {
    array.missing = own->real();
  } else if (own->is(Kind::number)) {
    if (const auto mark = own->integer(); mark && fits(*mark, array.file_type))
      array.missing = *mark;
  } else {
    auto number = own->is(Kind::string) ? special(own->string()) : std::nullopt;
    if (own->is(Kind::string) && !number) number = of_base64(own->string());
    if (number && real)
      array.missing = *number;
    else
      array.unmarked = "its attribute _FillValue is no number";
  }
}

std::vector<std::int64_t> sizes_of(const Json& value) {
  std::vector<std::int64_t> sizes;
  for (const Json& n : value.items()) sizes.push_back(n.index());
  return sizes;
}

// Numbers, lists of them and text; others are left out.
std::map<std::string, Attribute> attributes_of(const Json& all) {
  std::map<std::string, Attribute> attributes;
  for (const auto& [name, value] : all.members()) {
    if (value.is(Kind::string)) {
      if (const auto word = special(value.string()))
        attributes[name] = std::vector{*word};
      else
        attributes[name] = value.string();
    } else if (value.is(Kind::number)) {
      attributes[name] = std::vector{value.real()};
    } else if (value.is(Kind::array) && std::ranges::all_of(value.items(), [](const Json& item) {
                 return item.is(Kind::number);
               })) {
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

void use_separator(ZarrArray& array, const std::string& separator) {
  if (separator != "." && separator != "/")
    throw InvalidArgument("a separator '", separator, "' in names of chunks");
  array.separator = separator;
}

bool second_format(const Json& about, const Json& attributes, ZarrArray& array) {
  // "<f8"; other kinds are a list, of a structure.
  if (!about.at("dtype").is(Kind::string)) return false;
  const std::string& dtype = about.at("dtype").string();
  const NumpyType* type = numpy_type([&](const NumpyType& t) {
    return dtype.size() == 3 && t.kind == dtype[1] && t.bytes == dtype[2] - '0';
  });
  if (!type) return false;
  array.file_type = type->in_file;
  array.info.stored = type->holding;
  array.big_endian = dtype[0] == '>';
  array.info.shape = sizes_of(about.at("shape"));
  array.chunk = sizes_of(about.at("chunks"));
  array.column_major = about.at("order").string() == "F";
  array.fill = scalar_of(about.at("fill_value"), type->in_file);
  use_separator(array,
                about.find("dimension_separator") ? about.at("dimension_separator").string() : ".");
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
  const std::string& name = about.at("data_type").string();
  const NumpyType* type = numpy_type([&](const NumpyType& t) { return name == t.name; });
  if (!type) return false;
  array.file_type = type->in_file;
  array.info.stored = type->holding;
  array.info.shape = sizes_of(about.at("shape"));
  array.chunk = sizes_of(about.at("chunk_grid").at("configuration").at("chunk_shape"));
  if (const std::string& grid = about.at("chunk_grid").at("name").string(); grid != "regular")
    refuse(array, concat("chunk grid '", grid, "'"));
  array.fill = scalar_of(about.at("fill_value"), type->in_file);
  const Json& key = about.at("chunk_key_encoding");
  const bool second = key.at("name").string() == "v2";
  if (!second && key.at("name").string() != "default")
    refuse(array, concat("chunk key encoding '", key.at("name").string(), "'"));
  if (const Json* further = about.find("storage_transformers");
      further && !further->items().empty())
    refuse(array, "storage transformers");
  const Json* with = key.find("configuration");
  const Json* separator = with ? with->find("separator") : nullptr;
  use_separator(array, separator ? separator->string() : second ? "." : "/");
  if (!second) array.prefix = concat("c", array.info.shape.empty() ? "" : array.separator);
  for (const Json& codec : about.at("codecs").items()) {
    const bool brief = codec.is(Kind::string);  // without a configuration
    const std::string& id = brief ? codec.string() : codec.at("name").string();
    const Json* how = brief ? nullptr : codec.find("configuration");
    if (id == "bytes")
      array.big_endian = how && how->find("endian") && how->at("endian").string() == "big";
    else if (array.compressor.empty() && is_chunk_codec(id))
      array.compressor = id;
    else
      refuse(array, concat("codec '", id, "'"));
  }
  name_dims(array, about.find("dimension_names"));
  return true;
}

// Python writes NaN and Infinity as bare words, which JSON has not: as text.
std::string with_quoted_words(const std::string& text) {
  std::string out;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size();) {
    std::string_view word;
    for (const std::string_view w : {"-Infinity", "Infinity", "NaN"})
      if (!quoted && word.empty() && text.compare(i, w.size(), w) == 0) word = w;
    if (!word.empty()) {
      out += concat('"', word, '"');
      i += word.size();
      continue;
    }
    if (quoted && text[i] == '\\' && i + 1 < text.size())
      out += text[i++];
    else if (text[i] == '"')
      quoted = !quoted;
    out += text[i++];
  }
  return out;
}

std::optional<Json> json_of(const fs::path& file) {
  std::error_code none;
  if (!fs::is_regular_file(file, none)) return std::nullopt;
  const ReadFile source(file.string());
  std::string text(source.size(), '\0');
  source.read(text.data(), text.size(), 0);
  try {
    return Json::parse(with_quoted_words(text));
  } catch (const InvalidArgument& e) {
    throw FileError(file.string(), ": ", e.what());
  }
}

void require_format(const Json& about, std::uint64_t format) {
  if (about.at("zarr_format").number() != format)
    throw InvalidArgument("format ", about.at("zarr_format").number(), " where format ", format,
                          " is expected");
}

// Bytes of a chunk must be a number that a tensor can have.
void check_chunk(ZarrArray& array) {
  if (array.chunk.size() != array.info.shape.size())
    throw InvalidArgument("chunks of ", list(array.chunk), " and a shape of ",
                          list(array.info.shape));
  auto left = std::numeric_limits<std::int64_t>::max() / 8;
  for (std::size_t d = 0; d < array.chunk.size(); ++d) {
    if (array.chunk[d] == 0 && array.info.shape[d] == 0) array.chunk[d] = 1;
    if (array.chunk[d] < 1 || array.chunk[d] > left)
      throw InvalidArgument("a size of ", array.chunk[d], " in chunks of ", list(array.chunk));
    left /= array.chunk[d];
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
      require_format(*third, 3);
      const Json* own = third->find("attributes");
      if (own) array.info.attributes = attributes_of(*own);
      read = third_format(*third, array);
      if (read && own) read_mark(array, *own);
    } else if (const auto second = json_of(folder / ".zarray")) {
      known = true;
      const auto own = json_of(folder / ".zattrs");
      const Json attributes = own ? *own : Json::parse("{}");
      require_format(*second, 2);
      array.info.attributes = attributes_of(attributes);
      read = second_format(*second, attributes, array);
      if (read) read_mark(array, attributes);
    } else {
      std::error_code none;
      known = known || fs::is_regular_file(folder / ".zgroup", none);
      return std::nullopt;
    }
    if (!read) return std::nullopt;
    check_chunk(array);
  } catch (const InvalidArgument& e) {
    throw FileError("the metadata of the Zarr array in ", folder.string(),
                    " cannot be understood: ", e.what());
  }
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
    throw FileError(folder,
                    " is no Zarr group or array: it has none of zarr.json, .zgroup "
                    "and .zarray");
  for (auto it = fs::recursive_directory_iterator(root); it != fs::recursive_directory_iterator();
       ++it) {
    std::error_code none;
    if (!it->is_directory(none)) continue;
    bool array_or_group = false;
    auto array =
        array_in(it->path(), fs::relative(it->path(), root).generic_string(), array_or_group);
    // Below an array are its chunks.
    if (array || !array_or_group) it.disable_recursion_pending();
    if (array) arrays.push_back(std::move(*array));
  }
  std::ranges::sort(
      arrays, [](const ZarrArray& a, const ZarrArray& b) { return a.info.name < b.info.name; });
  return arrays;
}

}  // namespace tessera::detail
