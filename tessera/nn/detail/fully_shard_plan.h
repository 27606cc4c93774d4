#pragma once
// What fully_shard() is going to do: units, flat buffers and their intervals, checked on this rank
// and compared over ranks before anything changes.

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
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

class FullyShardPlan {
 public:
  FullyShardPlan(const torch::nn::Module& module, const DeviceMesh& mesh,
                 const FullyShardOptions& options);

  ParameterPlacement placement(const std::string& name) const;
  /// Gradients of equal numbers are reduced together.
  std::size_t message_of(const at::Tensor& parameter) const;
  std::string describe() const;

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

 private:
  std::vector<std::string> described_precisions() const;
  std::string described_further() const;
  bool lies_here(const at::Tensor& p) const;
  void check_further(const NamedTensor& p, const UnitPrecision& precision) const;
  // The one whose slices are cheapest to gather of those that no axis shards.
  static int dim_to_cut(const at::Tensor& p);
  // By name, in mesh order. `use`: "to shard over".
  std::vector<int> find(const std::vector<std::string>& names, std::string_view use) const;
  void check_numbers() const;
  void take_parameters(const torch::nn::Module& module, const UnitNames& names,
                       UnitPrecisions& precision);
  void take_buffers(const torch::nn::Module& module);
  // Whether the name is to be ignored; notes which patterns were used.
  bool ignored(const std::string& name);
  void find_axes();
  void find_device();
  void find_kept_axes();
  // One tensor under two names is one tensor.
  bool first_time(const at::Tensor& t);
  void keep(const NamedTensor& p);
  void add(const std::string& unit, const NamedTensor& p);
  void cut();
  // Of the global tensor.
  static std::int64_t bytes_of(const NamedTensor& p);
  // A flat buffer becomes up to four, of which no rank holds little: backward has the gradients of
  // one of them rather than of the unit, and sends sooner, evenly to all ranks. By the bytes of the
  // global tensors, from the last parameter, whose gradient comes first.
  void divide(int ranks);
  // The ranks of the other axes cut alike, whatever they hold of a row.
  void cut_further(Flat& flat);

  const DeviceMesh& mesh_;
  const FullyShardOptions& options_;
  std::unordered_map<const void*, std::size_t> message_of_;
  std::unordered_set<const void*> seen_;
  std::map<std::string, std::size_t> unit_index_;
  // By name of a parameter that is sharded: rows of each rank, or none for even ones.
  std::map<std::string, Sizes> rows_;
  std::set<std::string> staying_;
  // Patterns of `ignore` that have matched nothing so far.
  std::set<std::string> unused_;
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
