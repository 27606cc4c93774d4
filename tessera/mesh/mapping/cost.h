#pragma once
// CostModel: seconds per training step that given traffic takes for a mapping of ranks to slots.
//
// One message of n bytes costs latency + n / bandwidth. A collective is a sequence of rounds; in a
// round every group of an axis sends at once, and the round lasts as long as its slowest message or
// its fullest link: an adapter, a host's bus or a switch's uplink carries the sum of what passes
// through it. For each collective the cheapest of the usual algorithms counts (p ranks, n bytes):
//
//   all_reduce                   ring: 2(p-1) rounds of n/p; recursive doubling: log2 p rounds
//                                of n;
//                                reduce-scatter by halving and all-gather by doubling
//   all_gather, reduce_scatter   (n = whole result / whole input)
//                                ring: (p-1) rounds of n/p; recursive doubling or halving:
//                                log2 p rounds of n/p, 2n/p, 4n/p ...
//   broadcast, reduce            binomial tree: log2 p rounds of n
//   all_to_all                   (n = what one rank sends) pairwise exchange: p-1 rounds of n/p
//   send                         every rank to the next one of its group, in group order:
//                                one round of n
//
// Formulas: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
// Operations in MPICH", IJHPCA 19(1), 2005. A p that is no power of two costs the recursive
// algorithms an extra round before and after. Rings and trees run in order of slots, as
// communication libraries build them from the hardware; the order of a group matters to `send`
// alone.

#include <string>
#include <utility>
#include <vector>

#include "tessera/mesh/mapping/topology.h"
#include "tessera/mesh/mesh.h"

namespace tessera {

enum class Collective {
  all_reduce,
  all_gather,
  reduce_scatter,
  broadcast,
  reduce,
  all_to_all,
  send
};
const char* to_string(Collective collective);
/// The collective of this name. Throws GroupConfigError with the known names.
Collective collective_from(const std::string& name);

/// Traffic of one group family per step. Several entries may name the same axes; they run one after
/// the other.
struct Traffic {
  /// One axis, or several for a group over them.
  std::vector<std::string> axes;
  Collective collective = Collective::all_reduce;
  /// Bytes per call: the size of the buffer that the collective works on.
  double bytes = 0;
  /// Number of calls per step.
  double calls = 1;
  bool operator==(const Traffic&) const = default;
};

struct AxisCost {
  /// Names of the axes: "tensor", "data-tensor".
  std::string axes;
  Collective collective = Collective::all_reduce;
  /// Seconds per step for all calls.
  double seconds = 0;
  /// The cheapest algorithm.
  std::string algorithm;
};

struct MappingCost {
  double seconds = 0;
  /// One per Traffic entry, in their order.
  std::vector<AxisCost> axes;
};

/// The cost of a mesh (of positions 0 .. n-1, row-major; its own ranks do not matter here) on a
/// topology with at least n slots.
class CostModel {
 public:
  /// Throws MappingError (more ranks than slots, a topology that check() refuses), UnknownName
  /// (axes), GroupConfigError (negative or infinite numbers).
  CostModel(const Topology& topology, std::vector<Axis> axes, std::vector<Traffic> traffic);

  /// The cost of a mapping: slot_of[p] is the slot of the rank at row-major position p. No slot may
  /// occur twice, which is not checked here (given_mapping() does).
  MappingCost cost(const std::vector<int>& slot_of) const;
  double seconds(const std::vector<int>& slot_of) const;
  /// A bound below the cost of every mapping of these axes to this topology, in this model. See
  /// lower_bound.cpp for the argument.
  double lower_bound() const;

  const Topology& topology() const { return topology_; }
  const std::vector<Axis>& axes() const { return mesh_.axes(); }
  const std::vector<Traffic>& traffic() const { return traffic_; }
  int size() const { return mesh_.size(); }

 private:
  struct Scratch;
  MappingCost evaluate(const std::vector<int>& slot_of, bool explain) const;
  /// Seconds per step of one entry, and the algorithm that takes them.
  std::pair<double, const char*> family_cost(std::size_t entry, const std::vector<int>& slot_of,
                                             Scratch& scratch) const;
  double round_seconds(const std::vector<std::pair<int, int>>& flows, double bytes,
                       Scratch& scratch) const;
  double all_to_all_seconds(double bytes, Scratch& scratch) const;
  double drain(Scratch& scratch) const;
  double host_bound(int ranks, double host_bandwidth) const;

  Topology topology_;
  Mesh mesh_;
  std::vector<Traffic> traffic_;
  std::vector<GroupTable> groups_;         // of positions, one per traffic entry
  std::vector<int> host_, device_, rail_;  // of slots
  std::vector<int> place_;                 // of slots, in the order of the switch tree
  int rails_ = 1;
  // per host: devices x devices, empty if all are of the host's class
  std::vector<std::vector<int>> pair_class_;
  std::vector<int> depth_;  // of switches
};

}  // namespace tessera
