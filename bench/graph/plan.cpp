// The plan of ghosts of 100 M ids over 1000 ranks, as one of the ranks makes it: what it does with
// its own ids, and as the home of those that a hash sends to it. What the other ranks would send is
// made here. Time and memory of a rank, and how the memory grows with its ids and with the ranks.

#include <malloc.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <new>
#include <numeric>

#include "harness.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/partition/internal/ghost_directory.h"

namespace {
std::size_t allocated = 0, most_allocated = 0;
}  // namespace

// This program's own, which count.
void* operator new(std::size_t bytes) {
  void* const p = std::malloc(bytes);
  if (!p) throw std::bad_alloc();
  allocated += malloc_usable_size(p);
  most_allocated = std::max(most_allocated, allocated);
  return p;
}
void operator delete(void* p) noexcept {
  allocated -= malloc_usable_size(p);
  std::free(p);
}
void operator delete(void* p, std::size_t) noexcept { operator delete(p); }

namespace {

using tessera::GhostRows;
using tessera::detail::GhostDirectory;
using tessera::detail::IdsByRank;
using Ids = std::vector<std::int64_t>;

// A ring of blocks of `own` ids; of each of the two beside it a rank needs every twentieth.
struct Ring {
  int ranks = 1000;
  std::int64_t own = 100'000;
  static constexpr std::int64_t kFirst = std::int64_t{1} << 33, kStep = 7, kEach = 20;

  std::int64_t id(std::int64_t rank, std::int64_t row) const {
    return kFirst + (rank * own + row) * kStep;
  }
  int owner(std::int64_t id) const { return static_cast<int>((id - kFirst) / kStep / own); }
  int beside(int rank, int by) const { return (rank + by + ranks) % ranks; }
  Ids owned(int rank) const {
    Ids ids;
    for (std::int64_t i = 0; i < own; ++i) ids.push_back(id(rank, i));
    return ids;
  }
  Ids needed_of(int rank) const {
    Ids ids;
    for (std::int64_t i = 0; i < own; i += kEach) ids.push_back(id(rank, i));
    return ids;
  }
  Ids needed(int rank) const {
    Ids ids = needed_of(beside(rank, -1));
    const Ids more = needed_of(beside(rank, 1));
    ids.insert(ids.end(), more.begin(), more.end());
    return ids;
  }
  // Of what all ranks send to the homes, what comes to this one.
  template <class IdsOf>
  IdsByRank at_home(int home, const IdsOf& ids_of) const {
    IdsByRank all{Ids(static_cast<std::size_t>(ranks), 0), {}};
    for (int r = 0; r < ranks; ++r) {
      for (const std::int64_t id : ids_of(r)) {
        if (tessera::detail::mixed(id) % static_cast<std::uint64_t>(ranks) !=
            static_cast<std::uint64_t>(home))
          continue;
        all.values.push_back(id);
        ++all.counts[static_cast<std::size_t>(r)];
      }
    }
    return all;
  }
};

struct Cost {
  double seconds = 0, bytes = 0;
};

void require(bool holds, const char* what) {
  if (!holds) throw tessera::Error(tessera::concat("a wrong plan: ", what));
}

Cost cost_of(const Ring& ring, int rank) {
  std::vector<int> names(static_cast<std::size_t>(ring.ranks));
  std::iota(names.begin(), names.end(), 0);
  const Ids owned = ring.owned(rank), needed = ring.needed(rank);
  const IdsByRank claimed = ring.at_home(rank, [&](int r) { return ring.owned(r); });
  const IdsByRank asked = ring.at_home(rank, [&](int r) { return ring.needed(r); });
  IdsByRank requested{Ids(static_cast<std::size_t>(ring.ranks), 0), {}};
  for (const int by : {-1, 1}) {
    const Ids ids = ring.needed_of(rank);
    requested.counts[static_cast<std::size_t>(ring.beside(rank, by))] =
        static_cast<std::int64_t>(ids.size());
    requested.values.insert(requested.values.end(), ids.begin(), ids.end());
  }
  const std::size_t before = most_allocated = allocated;
  Cost cost;
  double start = tessera::bench::processor_seconds();
  const auto stop = [&] { cost.seconds += tessera::bench::processor_seconds() - start; };
  GhostDirectory directory(rank, names, owned, needed);
  require(directory.claims().values.size() == owned.size(), "claims");
  IdsByRank answered = directory.questions();
  std::string problems;
  {
    const IdsByRank owners = directory.answers(claimed, asked, problems);
    stop();
    for (std::size_t i = 0; i < owners.values.size(); ++i)
      require(owners.values[i] == ring.owner(asked.values[i]), "an owner");
  }
  for (auto& id : answered.values) id = ring.owner(id);
  start = tessera::bench::processor_seconds();
  const IdsByRank wanted = directory.requests(answered);
  const GhostRows rows = directory.rows(requested);
  stop();
  cost.bytes = static_cast<double>(most_allocated - before);
  require(problems.empty() && wanted.values.size() == needed.size(), "requests");
  require(rows.sends.size() == 2 && rows.receives.size() == 2, "peers");
  for (std::size_t i = 0; i < rows.sent.size(); ++i)
    require(owned[static_cast<std::size_t>(rows.sent[i])] == requested.values[i], "a row");
  return cost;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A plan of ghosts of many ids and ranks, on one rank of them");
  tessera::bench::Output output{.shared = true};
  tessera::bench::add_output(app, output);
  CLI11_PARSE(app, argc, argv);
  tessera::bench::Report report("graph", output);
  const auto add = [&](const std::string& name, const std::string& metric, double value,
                       const std::string& unit, double limit) {
    report.value(tessera::concat("plan ", name), metric, value, unit, limit);
  };
  const Ring all;
  const Cost most = cost_of(all, 7);
  add("100 M ids, 1000 ranks", "time", most.seconds, "s", 2);
  add("100 M ids, 1000 ranks", "bytes", most.bytes / static_cast<double>(all.own), "B/id", 100);
  const Cost quarter = cost_of({all.ranks, all.own / 4}, 7);
  add("a quarter of the ids", "bytes", quarter.bytes / most.bytes, "of all", 0.3);
  const Cost fewer = cost_of({all.ranks / 4, all.own}, 7);
  add("four times the ranks", "bytes", most.bytes / fewer.bytes, "x", 1.1);
  return report.finish();
}
