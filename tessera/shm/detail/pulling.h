#pragma once
// Large collectives without the slots: a rank publishes where its data is, and the others copy what
// they need from there, out of its arena or out of its process' memory. That is one copy instead of
// two; the call ends for a rank when all others have taken theirs. Used only where
// Core::single_copy() holds.

#include <limits>
#include <vector>

#include "tessera/shm/detail/calls.h"

namespace tessera::shm::detail {

/// Used if the largest block has at least this many bytes. Below, two copies through the slots are
/// as quick: what is fetched out of a process is still in its core's cache.
inline constexpr std::size_t kPullBytes = 131072;
/// The threshold for reductions, which read from many ranks at once.
inline constexpr std::size_t kPullReduceBytes = std::size_t{8} << 20;
/// The threshold for two ranks with a core each, whose slots are fast: two copies at once, in the
/// caches, take less time than one through the kernel.
inline constexpr std::size_t kPullAloneBytes = std::size_t{8} << 20;
/// The threshold for all-reduces where ranks share cores: two waits instead of two for each piece.
/// With a core for each rank they never gain.
inline constexpr std::size_t kPullAllReduceBytes = std::size_t{512} << 10;

/// From this size of the largest block on, data are pulled that are only moved, or `reduced` too;
/// the same on all ranks.
inline std::size_t pull_bytes(const Core& core, bool reduced) {
  if (!core.single_copy()) return std::numeric_limits<std::size_t>::max();
  // Data in arenas are copied without the kernel.
  if (core.size() == 2 && !core.options().crowded && core.layout().arena_bytes() == 0)
    return reduced ? std::numeric_limits<std::size_t>::max() : kPullAloneBytes;
  return reduced ? kPullReduceBytes : kPullBytes;
}

/// Where some bytes of a rank are, as the other ranks find them.
struct Where {
  /// Core::place_of().
  std::uint64_t place = 0;
  /// Address in its process.
  std::uint64_t address = 0;
};

/// Where the bytes of each rank are, as they published it in their lines of one step.
class Places {
 public:
  explicit Places(int ranks)
      : where_(static_cast<std::size_t>(ranks)), bytes_(static_cast<std::size_t>(ranks)) {}

  /// Writes where `data` is into this rank's line. The caller publishes it.
  static void say(Core& core, std::uint64_t step, const std::byte* data, std::size_t bytes);
  /// Records what `rank` published.
  void note(Core& core, int rank, std::uint64_t step, std::size_t bytes);
  /// The bytes as this process sees them, if they are in memory that it reaches; else null. Throws
  /// as Core::at_place().
  std::shared_ptr<const std::byte> here(Core& core, int rank) const;
  void copy(Core& core, int rank, std::size_t at, std::byte* to, std::size_t bytes) const;

 private:
  std::vector<Where> where_;
  std::vector<std::size_t> bytes_;
};

/// Base of the calls below: publish, take, report done, wait for the others.
class Pull : public Op {
 public:
  /// `factor`: this rank's, of a reduction.
  Pull(Core& core, const char* name, std::uint64_t step_count, std::uint64_t signature,
       double factor = 1);
  void early(Core& core) override { announce(core); }
  std::vector<int> missing(const Core& core) const override;

 protected:
  /// True if this rank has data for others.
  virtual bool gives() const = 0;
  virtual std::pair<const std::byte*, std::size_t> data() const = 0;
  /// The ranks that take data from this one.
  virtual bool serves(int) const { return gives(); }

  bool announce(Core& core);
  /// True once the lines of all ranks that this one reads, each of `bytes` bytes, are recorded.
  bool noted(Core& core, std::size_t bytes);
  bool others_are_done(Core& core);

  const int rank_, ranks_;
  Places places_;
  std::vector<double> factors_;
  bool announced_ = false, taken_ = false;
  int noted_ = 0;
};

/// Broadcast, all-gather, gather. A broadcast between ranks that share cores goes along a binomial
/// tree: all of them cannot copy at the same time, and a rank is free when its children have
/// copied.
class PullSpread final : public Pull {
 public:
  PullSpread(Core& core, const char* name, Blocks blocks, const std::byte* input, std::byte* output,
             int reader);
  bool advance(Core& core) override;
  void early(Core& core) override {
    if (!tree_ || place_in_tree(rank_) == 0) announce(core);
  }
  bool reads(int rank) const override {
    return tree_ ? rank == parent_ : reading_ && blocks_.size(rank) > 0;
  }

 private:
  bool gives() const override { return tree_ ? children_ : blocks_.size(rank_) > 0; }
  bool serves(int rank) const override {
    return tree_ ? rank != rank_ && parent_of(rank) == rank_ : gives();
  }
  std::pair<const std::byte*, std::size_t> data() const override {
    return {parent_ >= 0 ? output_ : input_, tree_ ? blocks_.total() : blocks_.size(rank_)};
  }
  /// 0 for the root.
  int place_in_tree(int rank) const { return (rank - blocks_.only() + ranks_) % ranks_; }
  /// Without the last bit that is set; -1 for the root.
  int parent_of(int rank) const {
    const int place = place_in_tree(rank);
    return place == 0 ? -1 : ((place & (place - 1)) + blocks_.only()) % ranks_;
  }
  bool advance_in_tree(Core& core);

  const Blocks blocks_;
  const std::byte* const input_;
  std::byte* const output_;
  const bool reading_, tree_;
  /// In the tree, -1 for its root; or there is none.
  int parent_ = -1;
  bool children_ = false, copied_ = false;
  int from_ = 0;
};

/// All-reduce: a rank reduces its share out of the memory of all, and then takes the other shares
/// from the ranks that have reduced them.
class PullReduce final : public Pull {
 public:
  PullReduce(Core& core, const char* name, const ReduceArguments& arguments);
  bool advance(Core& core) override;

 private:
  bool gives() const override { return true; }
  std::pair<const std::byte*, std::size_t> data() const override {
    return {arguments_.input, shares_.total()};
  }

  const ReduceArguments arguments_;
  const Reducer reducer_;
  const Blocks shares_;
  Places results_;
  bool reduced_ = false;
  int from_ = 1;
};

/// Scatter and reduce-scatter.
class PullDeal final : public Pull {
 public:
  PullDeal(Core& core, const char* name, DealArguments arguments);
  bool advance(Core& core) override;
  bool reads(int rank) const override {
    return (deal_.source < 0 || rank == deal_.source) && deal_.blocks.size(rank_) > 0;
  }

 private:
  bool gives() const override { return deal_.source < 0 || deal_.source == rank_; }
  std::pair<const std::byte*, std::size_t> data() const override {
    return {deal_.input, deal_.blocks.total()};
  }

  const DealArguments deal_;
};

}  // namespace tessera::shm::detail
