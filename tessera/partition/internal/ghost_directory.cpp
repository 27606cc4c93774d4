#include "tessera/partition/internal/ghost_directory.h"

#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::detail {
namespace {

// A list of what is wrong, which stays short however much is wrong.
class Problems {
 public:
  template <class... Args>
  void add(const Args&... args) {
    if (++count_ <= 8) text_ += concat(count_ > 1 ? ", " : "", args...);
  }
  std::string text() const {
    return count_ > 8 ? concat(text_, ", ... (", count_, " in all)") : text_;
  }
  bool any() const { return count_ > 0; }

 private:
  std::string text_;
  std::int64_t count_ = 0;
};

int home_of(std::int64_t id, int ranks) {
  return static_cast<int>(mixed(id) % static_cast<std::uint64_t>(ranks));
}

// `values[i]` to rank `ranks_of(i)`, in order of i for each rank; `order`: the i of each, if asked.
template <class RankOf, class ValueOf>
IdsByRank lists_by_rank(int ranks, std::size_t n, const RankOf& rank_of, const ValueOf& value_of,
                        std::vector<std::int64_t>* order = nullptr) {
  IdsByRank lists{std::vector<std::int64_t>(static_cast<std::size_t>(ranks), 0), {}};
  for (std::size_t i = 0; i < n; ++i) ++lists.counts[rank_of(i)];
  std::vector<std::int64_t> next(lists.counts.size(), 0);
  std::exclusive_scan(lists.counts.begin(), lists.counts.end(), next.begin(), std::int64_t{0});
  lists.values.resize(n);
  if (order) order->resize(n);
  for (std::size_t i = 0; i < n; ++i) {
    const auto at = static_cast<std::size_t>(next[rank_of(i)]++);
    lists.values[at] = value_of(i);
    if (order) (*order)[at] = static_cast<std::int64_t>(i);
  }
  return lists;
}

IdsByRank to_homes(int ranks, std::span<const std::int64_t> ids,
                   std::vector<std::int64_t>* order = nullptr) {
  return lists_by_rank(
      ranks, ids.size(), [&](std::size_t i) { return home_of(ids[i], ranks); },
      [&](std::size_t i) { return ids[i]; }, order);
}

std::vector<GhostRows::Peer> peers_of(const std::vector<std::int64_t>& counts) {
  std::vector<GhostRows::Peer> peers;
  for (std::size_t r = 0; r < counts.size(); ++r)
    if (counts[r] > 0) peers.push_back({static_cast<int>(r), counts[r]});
  return peers;
}

}  // namespace

GhostDirectory::GhostDirectory(int rank, std::span<const int> names,
                               std::span<const std::int64_t> owned,
                               std::span<const std::int64_t> needed)
    : names_(names), owned_(owned), needed_(needed), row_of_(owned.size()) {
  Problems negative, twice, own;
  for (std::size_t i = 0; i < owned.size(); ++i) {
    if (owned[i] < 0) {
      negative.add(owned[i], " (owned row ", i, ")");
      continue;
    }
    const auto row = static_cast<std::int64_t>(i);
    if (const auto first = row_of_.insert(owned[i], row); first != row)
      twice.add(owned[i], " (rows ", first, " and ", i, ")");
  }
  for (std::size_t g = 0; g < needed.size(); ++g) {
    if (needed[g] < 0)
      negative.add(needed[g], " (ghost ", g, ")");
    else if (const auto row = row_of_.find(needed[g]); row >= 0)
      own.add(needed[g], " (ghost ", g, ", row ", row, ")");
  }
  if (negative.any()) throw InvalidArgument("negative ids: ", negative.text(), "; number from 0");
  if (twice.any())
    throw InvalidArgument("ids that this rank owns more than once: ", twice.text(),
                          "; give each one row");
  if (own.any())
    throw InvalidArgument("needed ids that this rank owns itself: ", own.text(),
                          "; leave them out (ghosts_of() does)");
  rows_.rank = rank;
  rows_.ranks = static_cast<int>(names.size());
  rows_.owned = static_cast<std::int64_t>(owned.size());
  rows_.ghosts = static_cast<std::int64_t>(needed.size());
}

IdsByRank GhostDirectory::claims() const { return to_homes(rows_.ranks, owned_); }
IdsByRank GhostDirectory::questions() { return to_homes(rows_.ranks, needed_, &asked_); }

IdsByRank GhostDirectory::answers(const IdsByRank& claimed, const IdsByRank& asked,
                                  std::string& problems) const {
  IdTable owner(claimed.values.size());
  Problems twice, nobody;
  std::size_t at = 0;
  for (std::size_t r = 0; r < claimed.counts.size(); ++r) {
    for (std::int64_t k = 0; k < claimed.counts[r]; ++k, ++at) {
      const auto first = owner.insert(claimed.values[at], static_cast<std::int64_t>(r));
      if (first != static_cast<std::int64_t>(r))
        twice.add(claimed.values[at], " (ranks ", names_[first], " and ", names_[r], ")");
    }
  }
  IdsByRank owners{asked.counts, {}};
  owners.values.reserve(asked.values.size());
  for (std::size_t r = 0; r < asked.counts.size(); ++r) {
    for (std::int64_t k = 0; k < asked.counts[r]; ++k) {
      const std::int64_t id = asked.values[owners.values.size()];
      owners.values.push_back(owner.find(id));
      if (owners.values.back() < 0) nobody.add(id, " (needed by rank ", names_[r], ")");
    }
  }
  if (twice.any()) problems += concat("ids that two ranks own: ", twice.text(), ". ");
  if (nobody.any()) problems += concat("needed ids that no rank owns: ", nobody.text(), ". ");
  return owners;
}

IdsByRank GhostDirectory::requests(const IdsByRank& answered) {
  std::vector<int> owner_of(needed_.size());
  for (std::size_t i = 0; i < asked_.size(); ++i)
    owner_of[asked_[i]] = static_cast<int>(answered.values[i]);
  IdsByRank wanted = lists_by_rank(
      rows_.ranks, needed_.size(), [&](std::size_t g) { return owner_of[g]; },
      [&](std::size_t g) { return needed_[g]; }, &rows_.received);
  rows_.receives = peers_of(wanted.counts);
  return wanted;
}

GhostRows GhostDirectory::rows(const IdsByRank& requested) {
  rows_.sends = peers_of(requested.counts);
  rows_.sent.clear();
  rows_.sent.reserve(requested.values.size());
  for (const std::int64_t id : requested.values) rows_.sent.push_back(row_of_.find(id));
  return rows_;
}

std::string ghost_problems(std::span<const std::string> of_homes) {
  std::string all;
  for (const std::string& problems : of_homes) all += problems;
  return all.empty() ? all : all + "Each id has one owner; give every rank its own ids, each once.";
}

}  // namespace tessera::detail
