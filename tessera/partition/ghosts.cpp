#include "tessera/partition/ghosts.h"

#include "tessera/base/error.h"
#include "tessera/base/internal/counted.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/partition/internal/ghost_directory.h"

namespace tessera {
namespace {

using detail::GhostDirectory;
using detail::IdsByRank;
using detail::IdTable;

// What each rank sends to each, as what each has received.
std::vector<IdsByRank> carried(const std::vector<IdsByRank>& sent) {
  std::vector<IdsByRank> received(sent.size());
  for (std::size_t from = 0; from < sent.size(); ++from) {
    auto next = sent[from].values.begin();
    for (std::size_t to = 0; to < sent.size(); ++to) {
      const auto n = sent[from].counts[to];
      received[to].counts.push_back(n);
      received[to].values.insert(received[to].values.end(), next, next + n);
      next += n;
    }
  }
  return received;
}

}  // namespace

std::string GhostRows::summary() const {
  std::string text =
      concat("rank ", rank, " of ", ranks, ": ", owned, " owned, ", counted(ghosts, "ghost"),
             " from ", counted(receives.size(), "rank"), ", ", counted(sent.size(), "row"),
             " sent to ", counted(sends.size(), "rank"), "\n");
  auto s = sends.begin(), r = receives.begin();
  while (s != sends.end() || r != receives.end()) {
    const int peer =
        r == receives.end() || (s != sends.end() && s->rank < r->rank) ? s->rank : r->rank;
    const std::int64_t out = s != sends.end() && s->rank == peer ? (s++)->rows : 0;
    const std::int64_t in = r != receives.end() && r->rank == peer ? (r++)->rows : 0;
    text += concat("  rank ", peer, ": sends ", out, ", receives ", in, "\n");
  }
  return text;
}

std::vector<GhostRows> plan_ghosts(std::span<const std::vector<std::int64_t>> owned,
                                   std::span<const std::vector<std::int64_t>> needed) {
  if (owned.size() != needed.size())
    throw InvalidArgument("the owned ids of ", owned.size(), " ranks, and the needed ones of ",
                          needed.size());
  const int ranks = static_cast<int>(owned.size());
  const std::vector<int> names = numbers_below(ranks);
  std::vector<GhostDirectory> all;
  all.reserve(owned.size());
  for (int r = 0; r < ranks; ++r) {
    try {
      all.emplace_back(r, names, owned[r], needed[r]);
    } catch (const InvalidArgument& e) {
      throw InvalidArgument("rank ", r, ": ", e.what());
    }
  }
  // One round: what each rank sends, as it arrives.
  const auto round = [&](const auto& step) { return carried(mapped(names, step)); };
  std::vector<std::string> problems(owned.size());
  const auto claimed = round([&](int r) { return all[r].claims(); });
  const auto asked = round([&](int r) { return all[r].questions(); });
  const auto said = round([&](int r) { return all[r].answers(claimed[r], asked[r], problems[r]); });
  if (const auto text = detail::ghost_problems(problems); !text.empty())
    throw InvalidArgument(text);
  const auto wanted = round([&](int r) { return all[r].requests(said[r]); });
  return mapped(names, [&](int r) { return all[r].rows(wanted[r]); });
}

std::vector<std::int64_t> ghosts_of(std::span<const std::int64_t> owned,
                                    std::span<const std::int64_t> ids) {
  IdTable known(owned.size() + ids.size());
  for (const std::int64_t id : owned) known.insert(id, 0);
  std::vector<std::int64_t> ghosts;
  for (const std::int64_t id : ids) {
    if (known.find(id) >= 0) continue;
    ghosts.push_back(id);
    known.insert(id, 0);
  }
  return ghosts;
}

std::vector<std::int64_t> local_rows(std::span<const std::int64_t> owned,
                                     std::span<const std::int64_t> ghosts,
                                     std::span<const std::int64_t> ids) {
  IdTable row_of(owned.size() + ghosts.size());
  std::int64_t row = 0;
  for (const auto part : {owned, ghosts})
    for (const std::int64_t id : part) row_of.insert(id, row++);
  std::vector<std::int64_t> rows;
  rows.reserve(ids.size());
  for (const std::int64_t id : ids) {
    rows.push_back(row_of.find(id));
    if (rows.back() < 0)
      throw InvalidArgument("id ", id, " (place ", rows.size() - 1,
                            ") is neither owned by this rank nor one of its ", ghosts.size(),
                            " ghosts");
  }
  return rows;
}

}  // namespace tessera
