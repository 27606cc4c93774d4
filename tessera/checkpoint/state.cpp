#include "tessera/checkpoint/state.h"

#include <bit>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/files/internal/checksum.h"
#include "tessera/files/json.h"

namespace tessera {
namespace {

const std::string& value_named(const std::map<std::string, std::string>& values,
                               const std::string& name) {
  const auto found = values.find(name);
  if (found == values.end())
    throw InvalidArgument("the checkpoint state has no value '", printable(name), "'");
  return found->second;
}

}  // namespace

std::string integer_bytes(std::int64_t value) { return std::to_string(value); }
std::string real_bytes(double value) { return to_hex(std::bit_cast<std::uint64_t>(value)); }

std::int64_t integer_from_bytes(const std::string& bytes, const std::string& name) {
  try {
    const std::int64_t value = std::stoll(bytes);
    if (integer_bytes(value) == bytes) return value;
  } catch (const std::exception&) {
  }
  throw InvalidArgument("the value '", name, "' is not an integer");
}

double real_from_bytes(const std::string& bytes, const std::string& name) {
  try {
    return std::bit_cast<double>(from_hex(bytes));
  } catch (const InvalidArgument&) {
    throw InvalidArgument("the value '", name, "' is not a real number");
  }
}

CheckpointState& CheckpointState::add(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined())
    throw InvalidArgument("'", name, "' is an undefined tensor: it cannot be saved");
  if (!is_utf8(name)) throw InvalidArgument("the name '", printable(name), "' is not valid UTF-8");
  if (!names_.emplace(name, tensors_.size()).second)
    throw InvalidArgument("the checkpoint state has two tensors '", printable(name), "'");
  tensors_.push_back({name, tensor, std::nullopt});
  return *this;
}

CheckpointState& CheckpointState::add(const std::string& name, const at::Tensor& tensor,
                                      const HandShard& shard) {
  const auto refuse = [&](const std::string& why) { throw InvalidArgument("'", name, "': ", why); };
  if (!tensor.defined()) refuse("an undefined tensor");
  const auto sizes = tensor.sizes();
  if (shard.shape.size() != sizes.size() || shard.offset.size() != sizes.size())
    refuse(concat("a shard of ", sizes.size(), " dims, of a shape of ", shard.shape.size(),
                  " dims, with an offset of ", shard.offset.size()));
  for (std::size_t d = 0; d < sizes.size(); ++d)
    if (shard.offset[d] < 0 || shard.offset[d] > shard.shape[d] ||
        sizes[d] > shard.shape[d] - shard.offset[d])
      refuse(concat("the shard ", sizes, " at ", list(shard.offset), " leaves the shape ",
                    list(shard.shape)));
  add(name, tensor);
  tensors_.back().shard = shard;
  return *this;
}

CheckpointState& CheckpointState::add(const std::string& name, const at::Tensor& tensor,
                                      const HandShards& shards, const std::string& key) {
  const auto shard = shards.find(key);
  return shard == shards.end() ? add(name, tensor) : add(name, tensor, shard->second);
}

CheckpointState& CheckpointState::add(const std::string& prefix, const torch::nn::Module& module,
                                      const HandShards& shards) {
  std::set<const void*> seen;
  std::set<std::string> known;
  const auto take = [&](const std::string& name, const at::Tensor& t) {
    known.insert(name);
    if (!t.defined() || !seen.insert(t.unsafeGetTensorImpl()).second) return;
    add(prefix + name, t, shards, name);
  };
  for (const auto& p : module.named_parameters()) take(p.key(), p.value());
  for (const auto& b : module.named_buffers()) take(b.key(), b.value());
  for (const auto& [name, shard] : shards)
    if (!known.contains(name))
      throw InvalidArgument("the module has no parameter or buffer '", name,
                            "', which is said to be sharded by hand");
  return *this;
}

CheckpointState& CheckpointState::set(const std::string& name, const std::string& bytes) {
  if (!is_utf8(name)) throw InvalidArgument("the name '", printable(name), "' is not valid UTF-8");
  values_[name] = bytes;
  return *this;
}
CheckpointState& CheckpointState::set_integer(const std::string& name, std::int64_t value) {
  return set(name, integer_bytes(value));
}
CheckpointState& CheckpointState::set_real(const std::string& name, double value) {
  return set(name, real_bytes(value));
}
CheckpointState& CheckpointState::set_of_rank(const std::string& name, const std::string& bytes) {
  if (!is_utf8(name)) throw InvalidArgument("the name '", printable(name), "' is not valid UTF-8");
  rank_values_[name] = bytes;
  return *this;
}

const std::string& CheckpointState::get(const std::string& name) const {
  return value_named(values_, name);
}
std::int64_t CheckpointState::get_integer(const std::string& name) const {
  return integer_from_bytes(get(name), name);
}
double CheckpointState::get_real(const std::string& name) const {
  return real_from_bytes(get(name), name);
}
const std::string& CheckpointState::get_of_rank(const std::string& name) const {
  return value_named(rank_values_, name);
}

}  // namespace tessera
