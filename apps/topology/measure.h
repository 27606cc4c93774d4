#pragma once
// Links between the ranks of a running job, measured pair by pair.

#include <cstdint>
#include <vector>

#include "tessera/comm/job/manager.h"
#include "tessera/mesh/mapping/internal/probe.h"

namespace tessera::app {

struct ProbeOptions {
  /// Of the messages that measure bandwidth.
  std::int64_t bytes = 4 << 20;
  /// For each of latency and bandwidth of a pair, about.
  double seconds = 0.05;
  /// At most, inside one host.
  int pairs = 120;
  /// At most, between hosts: in each, every host is measured against another one.
  int rounds = 63;
};

struct ProbedJob {
  /// Complete on rank 0.
  Probe probe;
  /// Slots host by host, as the ranks stand.
  std::vector<int> rank_of_slot;
};

/// Collective over the world of `manager`, which must have at least two ranks.
ProbedJob probe_job(const DistributedManager& manager, const ProbeOptions& options);

}  // namespace tessera::app
