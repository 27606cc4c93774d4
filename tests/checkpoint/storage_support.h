#pragma once
// Checkpoints without ranks: what several ranks hold, written by one process, one after the other.

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "../support/folder.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/storage/detail/catalogue.h"
#include "tessera/checkpoint/storage/detail/saved_checkpoint.h"
#include "tessera/checkpoint/storage/detail/shard_file.h"

namespace tessera {

// Of a local folder.
inline std::vector<CheckpointName> list_checkpoints(
    const std::string& folder, std::vector<DamagedCheckpoint>* damaged = nullptr) {
  return list_checkpoints(*local_folder(folder), damaged);
}
inline Manifest read_manifest(const std::string& folder, const std::string& name) {
  return read_manifest(*local_folder(folder), name);
}

}  // namespace tessera

namespace tessera::testing {

/// Nothing if there is none; `problems` gets what is wrong with damaged ones.
inline std::optional<std::string> latest_checkpoint(CheckpointIO& io,
                                                    std::vector<std::string>* problems = nullptr) {
  std::vector<DamagedCheckpoint> damaged;
  const auto all = list_checkpoints(io, &damaged);
  if (problems)
    for (const DamagedCheckpoint& one : damaged) problems->push_back(one.damage);
  return all.empty() ? std::nullopt : std::optional(all.back().name);
}

inline std::optional<std::string> latest_checkpoint(const std::string& folder,
                                                    std::vector<std::string>* problems = nullptr) {
  return latest_checkpoint(*local_folder(folder), problems);
}

/// Cuts a shape into a grid of boxes with uneven and empty intervals.
inline std::vector<Box> draw_boxes(std::mt19937& engine, const std::vector<std::int64_t>& shape) {
  std::vector<Box> boxes{{}};
  for (const std::int64_t n : shape) {
    std::vector<std::int64_t> cuts{0, n};
    for (int k = static_cast<int>(engine() % 3); k > 0; --k) cuts.push_back(engine() % (n + 1));
    std::ranges::sort(cuts);
    std::vector<Box> next;
    for (const Box& box : boxes)
      for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        next.push_back(box);
        next.back().push_back({cuts[i], cuts[i + 1]});
      }
    boxes = std::move(next);
  }
  std::ranges::sort(boxes, [](const Box& a, const Box& b) {
    return std::lexicographical_compare(
        a.begin(), a.end(), b.begin(), b.end(),
        [](auto& x, auto& y) { return std::pair(x.begin, x.end) < std::pair(y.begin, y.end); });
  });
  boxes.erase(std::unique(boxes.begin(), boxes.end()), boxes.end());
  return boxes;
}

/// The elements of `box` of an array of 4-byte numbers 0, 1, 2, ... plus `base`, packed.
inline std::vector<std::uint32_t> numbers(const std::vector<std::int64_t>& shape, const Box& box,
                                          std::uint32_t base) {
  std::vector<std::uint32_t> all(static_cast<std::size_t>(volume(box)));
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::int64_t rest = static_cast<std::int64_t>(i), at = 0, stride = 1;
    for (std::size_t d = shape.size(); d-- > 0; stride *= shape[d]) {
      at += (box[d].begin + rest % box[d].size()) * stride;
      rest /= box[d].size();
    }
    all[i] = base + static_cast<std::uint32_t>(at);
  }
  return all;
}

/// A state of several ranks: every tensor cut into boxes, each held by some ranks.
struct DrawnState {
  std::vector<std::vector<HeldShard>> held;
  std::vector<std::uint32_t> bases;
  std::vector<std::vector<std::int64_t>> shapes;
};

inline DrawnState draw_state(std::mt19937& engine, int ranks, int tensors, std::int64_t most = 6) {
  DrawnState state;
  state.held.resize(static_cast<std::size_t>(ranks));
  for (int t = 0; t < tensors; ++t) {
    std::vector<std::int64_t> shape;
    for (int d = static_cast<int>(engine() % 4); d > 0; --d)
      shape.push_back(static_cast<std::int64_t>(engine() % (most + 1)));
    state.shapes.push_back(shape);
    state.bases.push_back(static_cast<std::uint32_t>(engine() % 100000));
    const EntryInfo info{EntryKind::tensor, concat("t", t), 0, "U32", shape, {}};
    std::vector<std::vector<Box>> given(static_cast<std::size_t>(ranks));
    // A rank holds one box of a tensor, or none.
    const auto boxes = draw_boxes(engine, shape);
    const bool fits = boxes.size() <= static_cast<std::size_t>(ranks);
    for (int r = 0; r < ranks; ++r) {
      Box full;
      for (const std::int64_t n : shape) full.push_back({0, n});
      const Box& box = fits ? boxes[static_cast<std::size_t>(r) % boxes.size()] : full;
      if (!fits && r > 0 && engine() % 2) continue;
      state.held[static_cast<std::size_t>(r)].push_back({info, box});
    }
  }
  return state;
}

/// Writes a checkpoint as its ranks would, one after the other, and commits it with the sequence
/// that `sequence` gives.
inline void save_drawn(const DrawnState& state, const std::shared_ptr<CheckpointIO>& io,
                       const std::string& name, std::uint64_t smallest, bool locked,
                       const std::function<std::uint64_t()>& sequence) {
  const WritePlan plan = plan_writes(state.held, smallest);
  const int ranks = static_cast<int>(state.held.size());
  const std::string nonce = make_nonce();
  io->make(name);
  io->sync("");
  std::vector<ShardOutcome> outcomes;
  for (int r = 0; r < ranks; ++r) {
    std::vector<std::vector<std::uint32_t>> data;
    std::vector<const void*> pointers;
    for (const AssignedBox& a : plan.ranks[static_cast<std::size_t>(r)]) {
      const auto t = static_cast<std::size_t>(std::stoi(plan.entries[a.entry].name.substr(1)));
      data.push_back(numbers(state.shapes[t], a.box, state.bases[t]));
    }
    for (const auto& d : data) pointers.push_back(d.data());
    outcomes.push_back(
        outcome_from(to_text(write_shard(*io, {name, nonce, r, ranks, 0}, plan, pointers))));
  }
  Commit commit{name, nonce, sequence(), locked};
  commit_checkpoint(*io, commit, plan, outcomes);
}
inline void save_drawn(const DrawnState& state, const std::string& folder, const std::string& name,
                       std::uint64_t sequence, const std::shared_ptr<FileOperations>& operations,
                       std::uint64_t smallest = 1) {
  save_drawn(state, local_folder(folder, operations), name, smallest, true,
             [&] { return sequence; });
}

/// Reads every tensor in full and compares; throws what reading throws, and Error where a value is
/// another.
inline void expect_drawn(const DrawnState& state, std::shared_ptr<CheckpointIO> io,
                         const std::string& name) {
  const SavedCheckpoint saved(std::move(io), name);
  for (std::size_t t = 0; t < state.shapes.size(); ++t) {
    const Entry* entry = saved.manifest().find(EntryKind::tensor, concat("t", t));
    if (!entry) throw Error("t", t, " is not in the checkpoint");
    if (entry->info.shape != state.shapes[t]) throw Error("t", t, " has another shape");
    Box full;
    for (const std::int64_t n : state.shapes[t]) full.push_back({0, n});
    std::vector<std::uint32_t> got(static_cast<std::size_t>(volume(full)));
    saved.read(*entry, full, got.data());
    if (got != numbers(state.shapes[t], full, state.bases[t]))
      throw Error("t", t, " has other values");
  }
}
inline void expect_drawn(const DrawnState& state, const std::string& folder,
                         const std::string& name) {
  expect_drawn(state, local_folder(folder), name);
}

}  // namespace tessera::testing
