#pragma once
// Large collectives without the slots: a rank says where its data lie, and the others take what
// they need from there, out of its arena or out of its process' memory. One copy instead of two;
// the call ends for a rank when all others have taken theirs. Only where Core::single_copy() holds.

#include <optional>
#include <vector>

#include "tessera/shm/detail/calls.h"

namespace tessera::shm::detail {

/// From this many bytes of the largest block on. Below, two copies through the slots are as quick:
/// what is fetched out of a process still lies in its core's cache.
inline constexpr std::size_t kPullBytes = 131072;
/// The same where the ranks reduce, and read from many at once. An all-reduce never gains.
inline constexpr std::size_t kPullReduceBytes = std::size_t{8} << 20;

/// Where some bytes of a rank lie, as the others find them.
struct Where {
  /// Offset in its arena + 1, or 0.
  std::uint64_t arena = 0;
  /// In its process.
  std::uint64_t address = 0;
};

/// Bytes of the ranks, as they published them in their lines of one step.
class Places {
 public:
  explicit Places(int ranks) : where_(static_cast<std::size_t>(ranks)) {}

  /// Writes where `data` lie into this rank's line. To be published by the caller.
  static void say(Core& core, std::uint64_t step, const std::byte* data, std::size_t bytes);
  /// Takes note of what `rank` published. Throws MismatchError where that is not in its arena.
  void note(Core& core, int rank, std::uint64_t step, std::size_t bytes);
  /// In this process, if they lie in an arena; else null.
  const std::byte* here(Core& core, int rank) const;
  void copy(Core& core, int rank, std::size_t at, std::byte* to, std::size_t bytes) const;

 private:
  std::vector<Where> where_;
};

/// What the calls below share: publish, take, say that one is done, wait for the others.
class Pull : public Op {
 public:
  Pull(Core& core, const char* name, std::uint64_t step_count, std::uint64_t signature);
  void early(Core& core) override { announce(core); }
  bool reads(int rank) const override { return wants(rank); }

 protected:
  /// Whether this rank has something for others, and where.
  virtual bool gives() const = 0;
  virtual bool wants(int rank) const = 0;
  virtual std::pair<const std::byte*, std::size_t> data() const = 0;
  /// The bytes that `rank` gives.
  virtual std::size_t given(int rank) const = 0;
  virtual double factor() const { return 1; }

  bool announce(Core& core);
  /// Waits for the lines of all that this rank wants something of.
  bool noted(Core& core);
  bool others_are_done(Core& core);

  const int rank_, ranks_;
  Places places_;
  std::vector<double> factors_;
  bool announced_ = false, taken_ = false;
  int noted_ = 0;
};

/// Broadcast, all-gather, gather.
class PullSpread final : public Pull {
 public:
  PullSpread(Core& core, const char* name, Blocks blocks, const std::byte* input, std::byte* output,
             int reader);
  bool advance(Core& core) override;

 private:
  bool gives() const override { return blocks_.size(rank_) > 0; }
  bool wants(int rank) const override { return reading_ && blocks_.size(rank) > 0; }
  std::pair<const std::byte*, std::size_t> data() const override {
    return {input_, blocks_.size(rank_)};
  }
  std::size_t given(int rank) const override { return blocks_.size(rank); }

  const Blocks blocks_;
  const std::byte* const input_;
  std::byte* const output_;
  const bool reading_;
  int from_ = 0;
};

/// Reduces some bytes of all ranks, a block that stays in the cache at a time.
class PulledReduction {
 public:
  PulledReduction(const Reducer& reducer, int ranks)
      : reducer_(reducer), sources_(static_cast<std::size_t>(ranks)) {}
  /// `own`: this rank's data. `at`: where the bytes begin in everyone's.
  void operator()(Core& core, const Places& places, const std::byte* own, std::size_t at,
                  std::byte* output, std::size_t bytes, const std::vector<double>& factors);

 private:
  const Reducer reducer_;
  std::vector<const std::byte*> sources_;
  std::vector<std::byte> fetched_;
};

/// Scatter and reduce-scatter.
class PullDeal final : public Pull {
 public:
  PullDeal(Core& core, const char* name, Blocks blocks, const std::byte* input, std::byte* output,
           int source, std::optional<Reducer> reducer, const Reduction& reduction);
  bool advance(Core& core) override;

 private:
  bool gives() const override { return source_ < 0 || source_ == rank_; }
  bool wants(int rank) const override {
    return (source_ < 0 || rank == source_) && blocks_.size(rank_) > 0;
  }
  std::pair<const std::byte*, std::size_t> data() const override {
    return {input_, blocks_.total()};
  }
  std::size_t given(int) const override { return blocks_.total(); }
  double factor() const override { return reduction_.factor; }

  const Blocks blocks_;
  const std::byte* const input_;
  std::byte* const output_;
  const int source_;
  const std::optional<Reducer> reducer_;
  const Reduction reduction_;
};

}  // namespace tessera::shm::detail
