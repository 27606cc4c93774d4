#pragma once
// CheckpointState: what goes into a checkpoint, by name. Tensors of any placement, and bytes.
//
//   CheckpointState state;
//   state.add("net.", *net);                    // parameters and buffers, plain or sharded
//   add_optimizer(state, "adam.", adam, *net);  // optimizer_state.h
//   state.set_integer("epoch", 3);              // the same on all ranks
//   state.set("loader", loader_state);
//   state.set_of_rank("random", my_random_state);  // each rank's own
//
// Tensors are shared with the caller, not copied: what is saved is their value at save time, and
// loading writes into them.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// A plain tensor that is this rank's shard of a larger one, made by hand. Ranks that hold the same
/// box are replicas; otherwise the boxes of all ranks are disjoint and make up the shape.
struct HandShard {
  /// The shape is the global tensor's.
  std::vector<std::int64_t> shape;
  /// Global index of the shard's first element.
  std::vector<std::int64_t> offset;
};
/// The key is the full name of a parameter or buffer, within its module.
using HandShards = std::map<std::string, HandShard>;

class CheckpointState {
 public:
  struct Tensor {
    std::string name;
    at::Tensor value;
    std::optional<HandShard> shard;
  };

  /// A sharded tensor, or a plain one, which is replicated: all ranks that add it hold the same.
  /// Throws InvalidArgument for a duplicate name or an undefined tensor.
  CheckpointState& add(const std::string& name, const at::Tensor& tensor);
  /// A tensor sharded by hand. Throws InvalidArgument where it leaves the shape.
  CheckpointState& add(const std::string& name, const at::Tensor& tensor, const HandShard& shard);
  /// A tensor that is sharded by hand if `shards` has the key.
  CheckpointState& add(const std::string& name, const at::Tensor& tensor, const HandShards& shards,
                       const std::string& key);
  /// Parameters and buffers under `prefix` and their full names. A tensor that has several names is
  /// saved under the first. Throws InvalidArgument for a name in `shards` that the module does not
  /// have.
  CheckpointState& add(const std::string& prefix, const torch::nn::Module& module,
                       const HandShards& shards = {});

  /// Bytes that are the same on every rank that sets them.
  CheckpointState& set(const std::string& name, const std::string& bytes);
  CheckpointState& set_integer(const std::string& name, std::int64_t value);
  /// Comes back bit by bit.
  CheckpointState& set_real(const std::string& name, double value);
  /// Bytes of this rank alone.
  CheckpointState& set_of_rank(const std::string& name, const std::string& bytes);

  /// Throws InvalidArgument for a name that is not there, or for bytes that are not such a number.
  const std::string& get(const std::string& name) const;
  std::int64_t get_integer(const std::string& name) const;
  double get_real(const std::string& name) const;
  const std::string& get_of_rank(const std::string& name) const;
  bool has(const std::string& name) const { return values_.contains(name); }
  bool has_of_rank(const std::string& name) const { return rank_values_.contains(name); }

  const std::vector<Tensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& values() const { return values_; }
  const std::map<std::string, std::string>& rank_values() const { return rank_values_; }

 private:
  std::vector<Tensor> tensors_;
  std::map<std::string, std::size_t> names_;
  std::map<std::string, std::string> values_, rank_values_;
};

/// A number as the bytes that set_integer() and set_real() keep, and back. Throw InvalidArgument
/// for other bytes; `name` is for the message.
std::string integer_bytes(std::int64_t value);
std::string real_bytes(double value);
std::int64_t integer_from_bytes(const std::string& bytes, const std::string& name);
double real_from_bytes(const std::string& bytes, const std::string& name);

}  // namespace tessera
