#pragma once
// What fully_shard() is going to do: units, flat buffers and their intervals, checked on this rank
// and compared over ranks before anything changes.

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/nn/detail/flat_plan.h"
#include "tessera/nn/detail/unit_options.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/fully_shard.h"
#include "tessera/tensor/dispatch/internal/parameter_source.h"

namespace tessera::detail {

/// Parameters of one unit, dtype and device, in one flat buffer, which is gathered in one message,
/// as their gradients are reduced.
struct Flat {
  std::size_t unit = 0;
  std::vector<NamedTensor> parameters;
  FlatPlan plan;
};

/// A parameter that other axes of the mesh shard already.
struct Further {
  NamedTensor parameter;
  /// The dim that is sharded further; -1: none can be.
  int dim = -1;
  ShardSpec spec;
};

struct FullyShardPlan {
  ParameterPlacement placement(const std::string& name) const;
  /// Gradients of equal numbers are reduced together.
  std::size_t message_of(const at::Tensor& parameter) const;

  int mesh_dims = 0;
  std::vector<NamedTensor> all;
  std::vector<Further> further;
  std::vector<int> axes;
  // Those over which units stay sharded after forward; empty: all.
  std::vector<int> kept_axes;
  bool reshard = true;
  // Shards lie in host memory, and units are gathered on this device.
  std::optional<c10::Device> device;
  std::vector<std::string> units;
  std::vector<UnitPrecision> precisions;
  std::vector<Flat> flats;
  std::unordered_map<const void*, std::size_t> unit_of;
  // By name of a parameter that is sharded: rows of each rank, or none for even ones.
  std::map<std::string, Sizes> rows;
  std::set<std::string> staying;
  // The messages of parameters that lie in a flat buffer.
  std::unordered_map<const void*, std::size_t> messages;
};

/// The plan of all ranks of the mesh. Collective.
///
/// Throws InvalidArgument or ShardingError for a module or options that do not fit, and
/// MismatchError on every rank if they differ.
FullyShardPlan agreed_plan(const torch::nn::Module& module, const DeviceMesh& mesh,
                           const FullyShardOptions& options);

/// What gathers the parameter, and its number there; nothing if fully_shard() did not make it.
ParameterSources::Found source_of(const at::Tensor& t);

}  // namespace tessera::detail
