#pragma once
// Large collectives without the slots: a rank publishes where its data is, and the others copy what
// they need from there, out of its arena or out of its process' memory. That is one copy instead of
// two; the call ends for a rank when all others have taken theirs. Used only where
// Core::single_copy() holds.

#include <optional>
#include <vector>

#include "tessera/shm/detail/calls.h"

namespace tessera::shm::detail {

/// Used if the largest block has at least this many bytes. Below, two copies through the slots are
/// as quick: what is fetched out of a process is still in its core's cache.
inline constexpr std::size_t kPullBytes = 131072;
/// The threshold for reductions, which read from many ranks at once. An all-reduce never gains.
inline constexpr std::size_t kPullReduceBytes = std::size_t{8} << 20;

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
  Pull(Core& core, const char* name, std::uint64_t step_count, std::uint64_t signature);
  void early(Core& core) override { announce(core); }
  bool reads(int rank) const override { return wants(rank); }

 protected:
  /// True if this rank has data for others.
  virtual bool gives() const = 0;
  virtual bool wants(int rank) const = 0;
  virtual std::pair<const std::byte*, std::size_t> data() const = 0;
  /// Number of bytes that `rank` gives.
  virtual std::size_t given(int rank) const = 0;
  virtual double factor() const { return 1; }

  bool announce(Core& core);
  /// True once the lines of all ranks that this one wants data from have been recorded.
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

/// Reduces some bytes of all ranks, in blocks that stay in the cache.
class PulledReduction {
 public:
  PulledReduction(const Reducer& reducer, int ranks)
      : reducer_(reducer), sources_(static_cast<std::size_t>(ranks)) {}
  /// `own`: this rank's data. `at`: offset of the bytes in every rank's data.
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
