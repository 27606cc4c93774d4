#pragma once
// The collectives as state machines over the steps of core.h. Sizes are bytes or elements as noted;
// offsets follow from sizes that all ranks share, so that no length is ever read from the shared
// memory.

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/shm/detail/core.h"
#include "tessera/shm/detail/reduce.h"

namespace tessera::shm::detail {

/// Number of pieces that are published before the first of them is waited for.
inline constexpr std::uint64_t kAhead = 2;
/// Where a rank's factor is in its line, after the data.
inline constexpr std::size_t kFactorAt = Line::kPayload - sizeof(double);
/// Smallest piece of a pipelined call, unless slots are smaller.
inline constexpr std::size_t kLeastPiece = 8192;

/// 16 bits that are likely to differ between calls that differ.
inline std::uint64_t signature_of(std::uint64_t call, std::uint64_t a, std::uint64_t b = 0,
                                  std::uint64_t c = 0) {
  std::uint64_t h = call;
  for (const std::uint64_t part : {a, b, c}) {
    h = (h ^ part) * 0x9e3779b97f4a7c15ULL;
    h ^= h >> 29;
  }
  return (h ^ (h >> 16) ^ (h >> 32) ^ (h >> 48)) & 0xffff;
}

inline std::size_t blocks_of(std::size_t bytes, std::size_t block) {
  return (bytes + block - 1) / block;
}

/// The elements [at, at + count) of `of` that a rank works on: equal shares that end where cache
/// lines do, but for the last.
struct Share {
  std::size_t at, count;
};
inline Share share_of(std::size_t of, std::size_t element_bytes, int rank, int ranks) {
  const std::size_t line = kLineBytes / element_bytes;
  const std::size_t each = blocks_of(blocks_of(of, static_cast<std::size_t>(ranks)), line) * line;
  const std::size_t at = std::min(of, each * static_cast<std::size_t>(rank));
  return {at, std::min(each, of - at)};
}

/// memcpy that takes no addresses where there is nothing to copy.
inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

/// Bytes of each rank's block, and where it begins: the same for all, or one number per rank.
class Blocks {
 public:
  static Blocks equal(int ranks, std::size_t each) { return Blocks(ranks, each, {}); }
  static Blocks of(std::vector<std::size_t> sizes) {
    const int ranks = static_cast<int>(sizes.size());
    return Blocks(ranks, 0, std::move(sizes));
  }
  /// A block on one rank alone.
  static Blocks only(int ranks, int rank, std::size_t bytes) {
    Blocks blocks(ranks, bytes, {});
    blocks.only_ = rank;
    return blocks;
  }
  std::size_t size(int rank) const {
    if (only_ >= 0) return rank == only_ ? each_ : 0;
    return sizes_.empty() ? each_ : sizes_[rank];
  }
  std::size_t start(int rank) const {
    if (only_ >= 0) return 0;
    return sizes_.empty() ? each_ * static_cast<std::size_t>(rank) : starts_[rank];
  }
  /// Bytes of a rank's block from `at` on, at most `most`.
  std::size_t part(int rank, std::size_t at, std::size_t most) const {
    return size(rank) > at ? std::min(most, size(rank) - at) : 0;
  }
  std::size_t largest() const { return largest_; }
  /// The only rank that has a block, or -1.
  int only() const { return only_; }
  std::size_t total() const {
    return only_ >= 0       ? each_
           : sizes_.empty() ? each_ * static_cast<std::size_t>(ranks_)
                            : starts_.back() + sizes_.back();
  }
  /// A hash of all sizes, for signatures.
  std::uint64_t digest() const {
    std::uint64_t h = each_ + static_cast<std::uint64_t>(only_ + 1) * 0x51ed27ULL;
    for (const std::size_t n : sizes_) h = signature_of(h, n) + (h << 5);
    return h;
  }

 private:
  Blocks(int ranks, std::size_t each, std::vector<std::size_t> sizes)
      : ranks_(ranks), each_(each), largest_(each), sizes_(std::move(sizes)) {
    std::size_t at = 0;
    for (const std::size_t n : sizes_) {
      starts_.push_back(at);
      at += n;
      largest_ = n > largest_ ? n : largest_;
    }
  }
  int ranks_;
  std::size_t each_, largest_;
  std::vector<std::size_t> sizes_, starts_;
  int only_ = -1;
};

/// Barrier, broadcast, all-gather, gather: each rank that has data publishes it in pieces of at
/// most a slot; the readers copy all pieces to their places.
class Spread final : public Op {
 public:
  /// `input`: size(rank) bytes. `output`: all blocks; unused where this rank does not read.
  /// `reader`: the only rank that reads, or -1 for all.
  Spread(Core& core, const char* name, Blocks blocks, const std::byte* input, std::byte* output,
         int reader, bool barrier = false);
  bool advance(Core& core) override;
  void early(Core& core) override { publish_pieces(core); }
  bool reads(int rank) const override { return reading_ && has(rank, consumed_); }

 private:
  bool has(int rank, std::uint64_t round) const {
    return barrier_ || round * piece_ < blocks_.size(rank);
  }
  void publish_pieces(Core& core);

  const Blocks blocks_;
  const std::byte* const input_;
  std::byte* const output_;
  const bool reading_, barrier_;
  /// One rank writes or reads everything: two ranks do not take turns.
  const bool one_reader_;
  const int rank_, ranks_;
  std::size_t piece_;
  std::uint64_t published_ = 0, consumed_ = 0;
  int from_ = 1;
};

/// The arguments of a reduce-scatter or scatter.
struct DealArguments {
  Blocks blocks;
  /// All blocks; unused where this rank is no source.
  const std::byte* input = nullptr;
  /// size(rank) bytes.
  std::byte* output = nullptr;
  /// The only rank that has data, or -1 for all; then `reducer` combines them.
  int source = -1;
  std::optional<Reducer> reducer = {};
  Reduction reduction = {};
};

inline std::uint64_t signature_of(std::uint64_t call, const DealArguments& a) {
  return signature_of(call, a.blocks.digest(), static_cast<std::uint64_t>(a.source + 1),
                      a.reducer ? 256U * static_cast<unsigned>(a.reducer->element()) +
                                      static_cast<unsigned>(a.reduction.kind) + 1U
                                : 0U);
}

/// Reduce-scatter and scatter: a source publishes the blocks of the other ranks, in rounds of one
/// piece for each; a rank reduces, or copies, the pieces of its own block.
class Deal final : public Op {
 public:
  Deal(Core& core, const char* name, DealArguments arguments);
  bool advance(Core& core) override;
  void early(Core& core) override { publish_pieces(core); }
  bool reads(int rank) const override { return has_data(rank); }

 private:
  bool has_data(int rank) const { return deal_.source < 0 || rank == deal_.source; }
  std::size_t piece_of(int rank, std::uint64_t round) const {
    return deal_.blocks.part(rank, round * piece_, piece_);
  }
  void publish_pieces(Core& core);
  void consume(Core& core, std::uint64_t round);

  const DealArguments deal_;
  const int rank_, ranks_;
  std::size_t piece_;
  bool inline_ = false;
  std::uint64_t published_ = 0, consumed_ = 0;
  std::vector<double> factors_;
};

/// The arguments of an all-reduce or reduce.
struct ReduceArguments {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::size_t count = 0;
  Element element = Element::float32;
  Reduction reduction;
  /// The rank that gets the result, or -1 for all.
  int root = -1;
};

inline std::uint64_t signature_of(std::uint64_t call, const ReduceArguments& a) {
  return signature_of(
      call, a.count,
      256U * static_cast<unsigned>(a.element) + static_cast<unsigned>(a.reduction.kind),
      static_cast<std::uint64_t>(a.root + 1));
}

/// All-reduce and reduce of little data: every rank publishes all of it, and each rank that gets
/// the result reduces everything.
class ReduceOnce final : public Op {
 public:
  ReduceOnce(Core& core, const char* name, const ReduceArguments& arguments);
  bool advance(Core& core) override;
  void early(Core& core) override { publish_all(core); }

  /// Largest number of bytes for which this class is used.
  static std::size_t limit(const Core& core);

 private:
  bool publish_all(Core& core);

  const ReduceArguments arguments_;
  const Reducer reducer_;
  const std::size_t bytes_;
  const bool inline_, wanted_;
  bool published_ = false;
  int next_ = 0;
};

/// All-reduce and reduce of much data, in rounds of one piece per rank: a rank publishes the other
/// ranks' pieces, reduces its own, publishes the result, and copies the others' results. The next
/// round's pieces are published before the wait for this round's. If all ranks' data is in their
/// arenas, every rank reduces its share in place and writes the result to all.
class ReducePieces final : public Op {
 public:
  ReducePieces(Core& core, const char* name, const ReduceArguments& arguments);
  bool advance(Core& core) override;
  void early(Core& core) override;

 private:
  /// The elements that rank `rank` reduces in round `round`.
  Share piece(std::uint64_t round, int rank) const;
  std::uint64_t deal_step(std::uint64_t round) const {
    return base_ + (round == 0 ? 0 : 2 * round - 1);
  }
  std::uint64_t result_step(std::uint64_t round) const {
    return base_ + (round + 1 < rounds_ ? 2 * round + 2 : 2 * rounds_ - 1);
  }
  /// Where the piece for `rank` is in the slot of `source`.
  std::size_t place(int rank, int source) const {
    return static_cast<std::size_t>((rank - source - 1 + ranks_) % ranks_) * piece_bytes_;
  }
  bool deal(Core& core);
  bool reduce_own(Core& core);
  bool collect(Core& core);
  bool announce(Core& core);
  bool decide(Core& core);
  bool reduce_in_place(Core& core);

  const ReduceArguments arguments_;
  const Reducer reducer_;
  const int rank_, ranks_;
  const std::size_t element_bytes_;
  std::size_t piece_bytes_ = 0, piece_count_ = 0;
  std::uint64_t rounds_ = 0, base_ = 0;
  enum class Path : unsigned char { unknown, slots, in_place } path_ = Path::unknown;
  bool asks_, announced_ = false, reduced_ = false;
  /// Number of rounds whose pieces were published, whose own piece was reduced, whose results were
  /// collected.
  std::uint64_t dealt_ = 0, reduced_rounds_ = 0, collected_ = 0;
  int from_ = 1;
  /// The data of each rank, if path_ is in_place.
  std::vector<std::shared_ptr<std::byte>> data_;
  std::vector<double> factors_;
  std::vector<const std::byte*> sources_;
};

}  // namespace tessera::shm::detail
