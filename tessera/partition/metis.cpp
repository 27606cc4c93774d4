#include "tessera/partition/partitioners.h"

#include <metis.h>
#include <signal.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>

#include "tessera/base/pinned.h"
#include "tessera/partition/detail/points.h"

namespace tessera {

namespace {

// METIS takes SIGTERM and SIGABRT while it works, and gives them back in another form, which holds
// for one signal. They come back as they were; this thread gets a SIGTERM of meanwhile then.
class KeptSignals : Pinned {
 public:
  KeptSignals() {
    sigset_t held;
    sigemptyset(&held);
    sigaddset(&held, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &held, &mask_);
    sigaction(SIGTERM, nullptr, &terminate_);
    sigaction(SIGABRT, nullptr, &abort_);
  }
  ~KeptSignals() {
    sigaction(SIGTERM, &terminate_, nullptr);
    sigaction(SIGABRT, &abort_, nullptr);
    pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
  }

 private:
  sigset_t mask_;
  struct sigaction terminate_, abort_;
};

// A graph as METIS has it: of each node its neighbours, each once, and in how many directions.
struct MetisGraph {
  std::vector<idx_t> begin, neighbor, directions;
};

MetisGraph metis_graph(std::int64_t nodes, std::span<const std::int64_t> source,
                       std::span<const std::int64_t> target) {
  std::vector<std::pair<idx_t, idx_t>> edges;
  for (std::size_t e = 0; e < source.size(); ++e)
    if (source[e] != target[e])
      edges.emplace_back(static_cast<idx_t>(source[e]), static_cast<idx_t>(target[e]));
  std::ranges::sort(edges);
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  for (std::size_t e = edges.size(); e-- > 0;) edges.emplace_back(edges[e].second, edges[e].first);
  std::ranges::sort(edges);
  MetisGraph graph{std::vector<idx_t>(static_cast<std::size_t>(nodes) + 1, 0), {}, {}};
  for (std::size_t e = 0; e < edges.size(); ++e) {
    if (e > 0 && edges[e] == edges[e - 1]) {
      ++graph.directions.back();
      continue;
    }
    graph.neighbor.push_back(edges[e].second);
    graph.directions.push_back(1);
    ++graph.begin[edges[e].first + 1];
  }
  std::partial_sum(graph.begin.begin(), graph.begin.end(), graph.begin.begin());
  return graph;
}

}  // namespace

std::vector<int> partition_by_metis(std::int64_t nodes, std::span<const std::int64_t> source,
                                    std::span<const std::int64_t> target, int parts,
                                    std::span<const double> weights) {
  if (nodes < 0 || parts < 1)
    throw InvalidArgument(nodes, " nodes in ", parts, " parts; give at least one part");
  detail::check_edges(nodes, source, target);
  const double all = detail::checked_weights(weights, static_cast<std::size_t>(nodes));
  constexpr std::int64_t kMost = std::numeric_limits<idx_t>::max();
  if (nodes >= kMost || static_cast<std::int64_t>(source.size()) > kMost / 2)
    throw InvalidArgument("a graph of ", nodes, " nodes and ", source.size(),
                          " edges: the integers of this METIS have ", sizeof(idx_t) * 8, " bits");
  std::vector<idx_t> owner(static_cast<std::size_t>(nodes), 0);
  if (parts >= nodes) {  // METIS takes neither one part nor more than there are nodes
    std::iota(owner.begin(), owner.end(), 0);
  } else if (parts > 1) {
    MetisGraph graph = metis_graph(nodes, source, target);
    std::vector<idx_t> costs;
    for (const double w : weights)
      costs.push_back(static_cast<idx_t>(std::llround(w / all * 0x1p30)));
    idx_t count = static_cast<idx_t>(nodes), constraints = 1, wanted = parts, cut = 0;
    idx_t options[METIS_NOPTIONS];
    METIS_SetDefaultOptions(options);
    options[METIS_OPTION_SEED] = 1;
    // Its random numbers are the process'.
    static std::mutex library;
    const std::lock_guard lock(library);
    const KeptSignals kept;
    const int status = METIS_PartGraphKway(
        &count, &constraints, graph.begin.data(), graph.neighbor.data(),
        costs.empty() ? nullptr : costs.data(), nullptr, graph.directions.data(), &wanted, nullptr,
        nullptr, options, &cut, owner.data());
    if (status != METIS_OK)
      throw Error("METIS could not divide ", nodes, " nodes into ", parts, " parts (status ",
                  status, status == METIS_ERROR_MEMORY ? ": out of memory)" : ")");
  }
  return {owner.begin(), owner.end()};
}

}  // namespace tessera
