// Packages of AOTInductor: what their record says, whether inputs fit it, and running them.

#include "tessera/c/detail/packages.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#if __has_include(<torch/csrc/inductor/aoti_package/model_package_loader.h>)
#define TESSERA_HAS_PACKAGES
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#endif

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>

#include "tessera/c/detail/call.h"
#include "tessera/files/json.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::c {
namespace {

using caffe2::serialize::PyTorchStreamReader;

constexpr const char* kRecord = "extra/tessera_inputs.json";
constexpr const char* kFolder = "data/aotinductor/model/";
constexpr const char* kMake =
    ": write it in Python with tessera.save_package(torch.export.export(...), \"net.pt2\")";

constexpr std::pair<const char*, at::ScalarType> kNames[] = {
    {"float32", at::kFloat}, {"float64", at::kDouble}, {"int32", at::kInt}, {"int64", at::kLong}};

// times * value + plus; the value is that of a name, which a fixed size has not.
struct Size {
  std::string of;
  std::int64_t times = 1, plus = 0;
};

struct Input {
  std::string name, dtype;
  std::vector<Size> sizes;
  /// Its dims as they lie in memory, the contiguous one last.
  std::vector<std::size_t> order;
};

struct Range {
  std::int64_t least, most;
};

// What a package was compiled for.
struct Record {
  std::vector<Input> inputs;
  /// Of the files of its code, by their names.
  std::map<std::string, std::uint32_t> sums;
  std::map<std::string, Range> ranges;
  std::string instructions;
};

// What the sizes of the inputs so far have made of names.
using Known = std::map<std::string, std::int64_t>;

Size size_of(const Json& json) {
  if (json.is(Json::Kind::number)) return {"", 1, json.index()};
  const auto& parts = json.items();
  const Size size{parts.at(1).string(), parts.at(0).index(), parts.at(2).integer().value()};
  if (size.times < 1) throw InvalidArgument("a size is ", size.times, " times ", size.of);
  return size;
}

Input input_of(const Json& json) {
  Input input{json.at("name").string(), json.at("dtype").string(), {}, {}};
  for (const Json& size : json.at("sizes").items()) input.sizes.push_back(size_of(size));
  std::set<std::size_t> dims;
  for (const Json& d : json.at("order").items()) {
    input.order.push_back(d.number());
    if (d.number() < input.sizes.size()) dims.insert(d.number());
  }
  if (dims.size() != input.sizes.size() || input.order.size() != dims.size())
    throw InvalidArgument("order is ", list(input.order), " of ", input.sizes.size(), " dims");
  return input;
}

// CRC-32 as zlib has it (polynomial 0xEDB88320): libtorch's reader compares none.
std::uint32_t sum_of(std::string_view bytes) {
  static const auto table = [] {
    std::array<std::uint32_t, 256> made{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      made[i] = i;
      for (int bit = 0; bit < 8; ++bit) made[i] = (made[i] >> 1) ^ (made[i] & 1 ? 0xEDB88320U : 0U);
    }
    return made;
  }();
  std::uint32_t sum = ~0U;
  for (const char c : bytes) sum = (sum >> 8) ^ table[(sum ^ static_cast<unsigned char>(c)) & 255];
  return ~sum;
}

Record record_of(const std::string& text) {
  const Json outer = Json::parse(text);
  if (outer.at("sum").number() != sum_of(outer.at("record").string()))
    throw InvalidArgument("its sum is another");
  const Json json = Json::parse(outer.at("record").string());
  Record record;
  for (const auto& [name, sum] : json.at("sums").members())
    record.sums[name] = static_cast<std::uint32_t>(sum.number());
  record.instructions = json.at("instructions").string();
  for (const auto& [name, range] : json.at("ranges").members())
    record.ranges[name] = {range.items().at(0).index(), range.items().at(1).index()};
  for (const Json& input : json.at("inputs").items()) {
    record.inputs.push_back(input_of(input));
    for (const Size& size : record.inputs.back().sizes)
      if (!size.of.empty() && !record.ranges.contains(size.of))
        throw InvalidArgument("'", size.of, "' has no range");
  }
  return record;
}

std::string text_of(const Size& size) {
  if (size.of.empty()) return concat(size.plus);
  return concat(size.times == 1 ? "" : concat(size.times, "*"), size.of,
                size.plus == 0 ? "" : concat(size.plus < 0 ? "" : "+", size.plus));
}

// "float32 of shape [1, 2*h], h from 2 to 64"
std::string text_of(const Record& record, const Input& input, const Known& values) {
  std::vector<std::string> sizes;
  std::string where;
  std::set<std::string> said;
  for (const Size& size : input.sizes) {
    sizes.push_back(text_of(size));
    if (size.of.empty() || !said.insert(size.of).second) continue;
    const auto value = values.find(size.of);
    const Range& range = record.ranges.at(size.of);
    where += value != values.end()
                 ? concat(", ", size.of, " ", value->second, " as before")
                 : concat(", ", size.of, " from ", range.least, " to ", range.most);
  }
  return concat(input.dtype, " of shape ", list(sizes), where);
}

bool fits(const Record& record, const Size& size, std::int64_t given, Known& values) {
  if (size.of.empty()) return given == size.plus;
  if ((given - size.plus) % size.times != 0) return false;
  const std::int64_t value = (given - size.plus) / size.times;
  const Range& range = record.ranges.at(size.of);
  return value >= range.least && value <= range.most &&
         values.emplace(size.of, value).first->second == value;
}

// This rank's memory of an input. What is divided lacks the cells that its neighbours have.
at::Tensor plain(const at::Tensor& given, const std::string& which) {
  if (!is_sharded(given)) return given;
  const ShardSpec where = spec(given);
  for (int axis = 0; axis < where.mesh_dims(); ++axis)
    if (!where.placements()[axis].is_replicate() && where.mesh().mesh().size(axis) > 1)
      refuse(
          which, " is ", where.to_string(),
          ": a package takes what this rank has and exchanges nothing; give the rank's own cells "
          "and those around them, by tessera_halo()");
  return to_local(given);
}

at::Tensor checked(const Record& record, std::size_t i, const at::Tensor& given, Known& values) {
  const Input& input = record.inputs[i];
  const std::string which = concat("input ", i, " ('", input.name, "')");
  const at::Tensor tensor = plain(given.detach(), which);
  const auto* its = std::ranges::find_if(
      kNames, [&](const auto& known) { return known.second == tensor.scalar_type(); });
  if (!tensor.is_cpu()) refuse(which, " lies on ", tensor.device(), ": memory is the host's");
  const Known before = values;
  bool right = its != std::end(kNames) && input.dtype == its->first &&
               tensor.dim() == static_cast<std::int64_t>(input.sizes.size());
  for (std::size_t d = 0; right && d < input.sizes.size(); ++d)
    right = fits(record, input.sizes[d], tensor.size(static_cast<std::int64_t>(d)), values);
  if (!right)
    refuse(which, " is ", its != std::end(kNames) ? its->first : toString(tensor.scalar_type()),
           " of shape ", list(tensor.sizes()), ", the package was compiled for ",
           text_of(record, input, before));
  std::int64_t step = 1;
  std::vector<std::int64_t> strides(input.order.size(), 0);
  for (auto at = input.order.rbegin(); at != input.order.rend(); step *= tensor.size(*at++))
    strides[*at] = step;
  for (std::size_t d = 0; d < strides.size() && tensor.numel() > 0; ++d)
    if (tensor.size(d) > 1 && tensor.stride(d) != strides[d])
      refuse(which, " has the strides ", list(tensor.strides()), ", the package was compiled for ",
             list(strides), ": export it with an example that lies in memory as this one");
  return tensor;
}

bool has_instructions(const std::string& name) {
#if defined(__x86_64__)
  if (name == "avx512") return __builtin_cpu_supports("avx512f");
  if (name == "avx2") return __builtin_cpu_supports("avx2");
#endif
  return name.empty();
}

std::string read(PyTorchStreamReader& archive, const std::string& name) {
  const auto [data, size] = archive.getRecord(name);
  return {static_cast<const char*>(data.get()), size};
}

// The record of a package whose files are those that it was written with.
Record intact(PyTorchStreamReader& archive, const std::string& file) {
  const auto names = archive.getAllRecords();
  const auto is_code = [](const std::string& name) { return name.starts_with(kFolder); };
  if (std::ranges::none_of(
          names, [&](const auto& name) { return is_code(name) && name.ends_with(".so"); }))
    throw FileError(file, " holds no compiled network", kMake);
  if (!archive.hasRecord(kRecord))
    throw FileError(file,
                    " does not say which inputs it was compiled for, and would read others "
                    "beyond their end",
                    kMake);
  Record record = record_of(read(archive, kRecord));
  for (const std::string& name : names) {
    if (!is_code(name)) continue;
    const auto sum = record.sums.find(name.substr(std::strlen(kFolder)));
    if (sum == record.sums.end() || sum->second != sum_of(read(archive, name)))
      throw FileError(file, " is damaged: the sum of ", name, " is not that of the record");
  }
  return record;
}

#ifdef TESSERA_HAS_PACKAGES
Package open_package(const std::string& file) {
  PyTorchStreamReader archive(file);
  const auto record = std::make_shared<const Record>(intact(archive, file));
  if (!has_instructions(record->instructions))
    throw NotAvailable(file, " was compiled for ", record->instructions,
                       ", instructions that this CPU has not: compile it on this machine");
  const auto network = std::make_shared<torch::inductor::AOTIModelPackageLoader>(file);
  const auto forward = [record, network](const std::vector<at::Tensor>& given) {
    if (at::GradMode::is_enabled())
      refuse("a compiled package has no backward: tessera_predict() runs it");
    if (given.size() != record->inputs.size())
      refuse("inputs is ", given.size(), ", the package takes ", record->inputs.size());
    std::vector<at::Tensor> inputs;
    Known values;
    for (std::size_t i = 0; i < given.size(); ++i)
      inputs.push_back(checked(*record, i, given[i], values));
    return network->run(inputs);
  };
  return {concat("the package of contents ", archive.serializationId()), forward};
}
#endif

}  // namespace

bool is_package(const std::string& file) {
  try {
    return PyTorchStreamReader(file).hasRecord("archive_format");
  } catch (const c10::Error&) {
    return false;  // the reader of TorchScript says why
  }
}

Package load_package(const std::string& file) {
#ifdef TESSERA_HAS_PACKAGES
  try {
    return open_package(file);
  } catch (const InvalidArgument& error) {
    throw FileError(file, ": its ", kRecord, " cannot be read: ", error.what(), kMake);
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& error) {
    throw FileError(file, ": no package that can be run: ", error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw FileError(file, ": no package that can be run: ", error.what());
  }
#else
  throw NotAvailable(file, " is a package of AOTInductor, which this libtorch does not run");
#endif
}

}  // namespace tessera::c
