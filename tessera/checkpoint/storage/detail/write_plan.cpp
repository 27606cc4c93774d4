#include "tessera/checkpoint/storage/detail/write_plan.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/base/internal/json_text.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/text.h"
#include "tessera/files/json.h"

namespace tessera {
namespace {

struct Replicated {
  std::size_t entry;
  Box box;
  std::uint64_t bytes;
};

// Rows are indices of the first dim that has more than one; a box of one element is one row.
struct Rows {
  std::size_t dim = 0;
  std::int64_t count = 1;
};

Rows rows_of(const Box& box) {
  for (std::size_t d = 0; d < box.size(); ++d)
    if (box[d].size() > 1) return {d, box[d].size()};
  return {};
}

// How many of its rows a rank takes that is to write `wanted` bytes.
std::int64_t rows_for(const Replicated& r, std::uint64_t wanted, std::uint64_t smallest) {
  const std::int64_t count = rows_of(r.box).count;
  if (wanted >= r.bytes) return count;
  if (count == 1 || r.bytes < 2 * smallest) return 2 * wanted >= r.bytes ? count : 0;
  const std::uint64_t row = r.bytes / static_cast<std::uint64_t>(count);
  const std::uint64_t rows = (wanted + row / 2) / row;
  if (rows * row < smallest) return 0;
  if (r.bytes - std::min(rows * row, r.bytes) < smallest) return count;
  return static_cast<std::int64_t>(rows);
}

// Raises the lowest loads to one level until `bytes` are given out; what each rank gets.
std::vector<std::uint64_t> fill(const std::vector<std::uint64_t>& loads, std::uint64_t bytes) {
  std::vector<std::size_t> order(loads.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order,
                           [&](std::size_t a, std::size_t b) { return loads[a] < loads[b]; });
  std::vector<std::uint64_t> shares(loads.size(), 0);
  std::uint64_t below = 0;
  for (std::size_t n = 1; n <= order.size(); ++n) {
    below += loads[order[n - 1]];
    const bool last = n == order.size();
    // The level at which the n lowest hold everything.
    const std::uint64_t level = (below + bytes) / n;
    if (!last && level > loads[order[n]]) continue;
    std::uint64_t left = bytes;
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint64_t share =
          i + 1 == n ? left : std::min(left, level - std::min(level, loads[order[i]]));
      shares[order[i]] = share;
      left -= share;
    }
    break;
  }
  return shares;
}

std::string entry_key_text(const EntryInfo& info) {
  return concat(info.kind == EntryKind::tensor ? "tensor '" : "value '", printable(info.name), "'");
}

// The distinct boxes of an entry, by their bounds, with the ranks that hold them.
using Holders = std::map<std::vector<std::int64_t>, std::pair<Box, std::vector<int>>>;

// Of each entry, which are added to `entries` in the order of their first holders.
std::vector<Holders> holders_of(const std::vector<std::vector<HeldShard>>& held,
                                std::vector<EntryInfo>& entries) {
  std::map<std::tuple<EntryKind, std::string, int>, std::size_t> known;
  std::vector<int> first_rank;
  std::vector<Holders> boxes;
  for (std::size_t r = 0; r < held.size(); ++r) {
    for (const HeldShard& h : held[r]) {
      const auto [it, fresh] =
          known.emplace(std::tuple(h.info.kind, h.info.name, h.info.rank), entries.size());
      const std::size_t e = it->second;
      if (fresh) {
        entries.push_back(h.info);
        first_rank.push_back(static_cast<int>(r));
        boxes.emplace_back();
      }
      const EntryInfo& info = entries[e];
      if (!(info == h.info))
        throw InvalidArgument("the ranks disagree on ", entry_key_text(info), ": rank ",
                              first_rank[e], " has ", info.dtype, ' ', list(info.shape), ' ',
                              info.layout, ", rank ", r, " has ", h.info.dtype, ' ',
                              list(h.info.shape), ' ', h.info.layout);
      std::vector<std::int64_t> key;
      for (const Interval& i : h.box) {
        key.push_back(i.begin);
        key.push_back(i.end);
      }
      auto& [box, ranks] = boxes[e][key];
      box = h.box;
      if (!ranks.empty() && ranks.back() == static_cast<int>(r))
        throw InvalidArgument("rank ", r, " gives ", entry_key_text(info), " twice");
      ranks.push_back(static_cast<int>(r));
    }
  }
  return boxes;
}

// Who writes a box: all that hold it, or the first of them where their contents differ.
std::vector<int> writers_of(const EntryInfo& info, const Box& box, const std::vector<int>& holders,
                            const std::vector<PlainSums>& sums) {
  if (sums.empty() || info.kind != EntryKind::tensor || !info.layout.empty()) return holders;
  const auto sum = [&](int r) {
    const PlainSums& of = sums.at(static_cast<std::size_t>(r));
    return is_full(info, box) ? of.full : of.shards;
  };
  const bool same =
      std::ranges::all_of(holders, [&](int r) { return sum(r) == sum(holders.front()); });
  return same ? holders : std::vector<int>{holders.front()};
}

// Ranks that write together, and what; fewest first: who has a choice takes what is left.
using Writing = std::map<std::pair<std::size_t, std::vector<int>>, std::vector<Replicated>>;

Writing writing_of(const std::vector<EntryInfo>& entries, const std::vector<Holders>& boxes,
                   const std::vector<PlainSums>& sums) {
  Writing writing;
  for (std::size_t e = 0; e < boxes.size(); ++e) {
    std::vector<Box> all;
    for (const auto& [key, one] : boxes[e]) {
      const auto& [box, holders] = one;
      all.push_back(box);
      if (volume(box) == 0) continue;
      const std::vector<int> ranks = writers_of(entries[e], box, holders, sums);
      writing[{ranks.size(), ranks}].push_back(
          {e, box, static_cast<std::uint64_t>(volume(box)) * element_bytes(entries[e].dtype)});
    }
    try {
      check_boxes(all, entries[e], "the ranks' shards");
    } catch (const FileError& error) {
      throw InvalidArgument(error.what());
    }
  }
  return writing;
}

// Gives `todo` to these ranks, those with the lowest loads first.
void assign(WritePlan& plan, const std::vector<int>& ranks, std::vector<Replicated>& todo,
            std::vector<std::uint64_t>& loads, std::uint64_t smallest) {
  std::uint64_t bytes = 0;
  for (const Replicated& r : todo) bytes += r.bytes;
  std::vector<std::uint64_t> mine;
  for (const int r : ranks) mine.push_back(loads[r]);
  const auto shares = fill(mine, bytes);
  std::size_t next = 0;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const auto rank = static_cast<std::size_t>(ranks[i]);
    std::int64_t left = static_cast<std::int64_t>(shares[i]);
    const bool last = i + 1 == ranks.size();
    while (next < todo.size() && (last || left > 0)) {
      Replicated& r = todo[next];
      const std::uint64_t wanted = last ? r.bytes : static_cast<std::uint64_t>(left);
      const std::int64_t rows = rows_for(r, wanted, smallest);
      if (rows == 0) break;
      const Rows all = rows_of(r.box);
      Box taken = r.box;
      if (rows < all.count) taken[all.dim].end = taken[all.dim].begin + rows;
      const std::uint64_t size =
          static_cast<std::uint64_t>(volume(taken)) * element_bytes(plan.entries[r.entry].dtype);
      plan.ranks[rank].push_back({r.entry, taken});
      loads[rank] += size;
      left -= static_cast<std::int64_t>(size);
      if (rows == all.count) {
        ++next;
        continue;
      }
      r.box[all.dim].begin += rows;
      r.bytes -= size;
    }
  }
}

}  // namespace

bool is_full(const EntryInfo& info, const Box& box) {
  for (std::size_t d = 0; d < box.size(); ++d)
    if (box[d].size() != info.shape[d]) return false;
  return true;
}

std::string describe_shards(const std::vector<HeldShard>& held) {
  const auto text_of = [](const HeldShard& h) {
    return concat('[', static_cast<int>(h.info.kind), ',', json_text(h.info.name), ',', h.info.rank,
                  ',', json_text(h.info.dtype), ',', json_list(h.info.shape), ',',
                  json_text(h.info.layout), ',', json_list(h.box, bounds_text), ']');
  };
  return json_list(held, text_of);
}

std::vector<HeldShard> shards_from(std::string_view text) {
  std::vector<HeldShard> held;
  const Json json = Json::parse(text);
  for (const Json& one : json.items()) {
    const auto& parts = one.items();
    if (parts.size() != 7 || parts[0].number() > 2) throw InvalidArgument("a broken description");
    HeldShard h;
    h.info.kind = static_cast<EntryKind>(parts[0].number());
    h.info.name = parts[1].string();
    h.info.rank = static_cast<int>(parts[2].number());
    h.info.dtype = parts[3].string();
    for (const Json& n : parts[4].items()) h.info.shape.push_back(n.index());
    h.info.layout = parts[5].string();
    const auto& bounds = parts[6].items();
    for (std::size_t i = 0; i + 1 < bounds.size(); i += 2)
      h.box.push_back({bounds[i].index(), bounds[i + 1].index()});
    held.push_back(std::move(h));
  }
  return held;
}

WritePlan plan_writes(const std::vector<std::vector<HeldShard>>& held, std::uint64_t smallest,
                      const std::vector<PlainSums>& sums) {
  WritePlan plan;
  plan.ranks.resize(held.size());
  const std::vector<Holders> boxes = holders_of(held, plan.entries);
  std::vector<std::uint64_t> loads(held.size(), 0);
  Writing writing = writing_of(plan.entries, boxes, sums);
  for (auto& [ranks, todo] : writing) assign(plan, ranks.second, todo, loads, smallest);
  for (auto& all : plan.ranks)
    std::ranges::stable_sort(
        all, [](const AssignedBox& a, const AssignedBox& b) { return a.entry < b.entry; });
  return plan;
}

}  // namespace tessera
