// All-reduce and reduce.

#include <algorithm>

#include "tessera/shm/detail/calls.h"

namespace tessera::shm::detail {
namespace {
constexpr std::size_t kOnceBytes = 16384;
/// Number of bytes of another rank's data that are prefetched: what the CPU has time for meanwhile.
constexpr std::size_t kExpected = 4096;
/// From this size on ranks ask whether all data is in arenas: finding out costs one more step.
constexpr std::size_t kInPlaceBytes = 65536;
/// From this size on results go past the cache into the arenas of others: they would not stay in
/// it.
constexpr std::size_t kPastCacheBytes = std::size_t{16} << 20;
/// In arenas, one block is written to all ranks while it is still in the cache.
constexpr std::size_t kInPlaceBlock = 32768;
}  // namespace

// ---- little data ----

std::size_t ReduceOnce::limit(const Core& core) {
  return std::min(kOnceBytes, core.layout().slot_bytes());
}

ReduceOnce::ReduceOnce(Core& core, const char* name, const ReduceArguments& arguments)
    : Op(name),
      arguments_(arguments),
      reducer_(arguments.element, arguments.reduction.kind),
      bytes_(arguments.count * size_of(arguments.element)),
      inline_(bytes_ <= (arguments.reduction.kind == Reduction::Kind::premultiplied
                             ? kFactorAt
                             : Line::kPayload)),
      wanted_(arguments.root < 0 || arguments.root == core.rank()) {
  steps = 1;
  in_lines = inline_ ? 1 : 0;
  signature = signature_of(3, arguments);
}

bool ReduceOnce::publish_all(Core& core) {
  if (published_) return true;
  if (!core.writable(*this, first, inline_ ? Core::Place::line : Core::Place::slot)) return false;
  if (core.size() > 1) {
    Line& line = core.line(core.rank(), first);
    core.put(inline_ ? line.payload : core.slot(*this, core.rank(), first), arguments_.input,
             bytes_, core.readers());
    if (arguments_.reduction.kind == Reduction::Kind::premultiplied)
      std::memcpy(line.payload + kFactorAt, &arguments_.reduction.factor, sizeof(double));
    core.publish(*this, first);
  }
  published_ = true;
  return true;
}

bool ReduceOnce::advance(Core& core) {
  if (!publish_all(core)) return false;
  if (wanted_) {
    const int ranks = core.size(), me = core.rank();
    for (; next_ < ranks; ++next_)
      if (next_ != me && !core.ready(*this, next_, first)) return false;
    constexpr int kFew = 16;
    const std::byte* few[kFew];
    double few_factors[kFew];
    std::vector<const std::byte*> many;
    std::vector<double> many_factors;
    const std::byte** sources = few;
    double* factors = few_factors;
    if (ranks > kFew) {
      many.resize(static_cast<std::size_t>(ranks));
      many_factors.resize(static_cast<std::size_t>(ranks));
      sources = many.data();
      factors = many_factors.data();
    }
    for (int r = 0; r < ranks; ++r) {
      const Line& line = core.line(r, first);
      sources[r] = r == me ? arguments_.input : inline_ ? line.payload : core.slot(*this, r, first);
      factors[r] = arguments_.reduction.factor;
      if (r != me && !inline_) expect_bytes(sources[r], std::min(bytes_, kExpected));
      if (r != me && arguments_.reduction.kind == Reduction::Kind::premultiplied)
        std::memcpy(&factors[r], line.payload + kFactorAt, sizeof(double));
    }
    reducer_(arguments_.output, nullptr, sources, ranks, arguments_.count, factors);
  }
  core.finish(first);
  return true;
}

// ---- much data ----

ReducePieces::ReducePieces(Core& core, const char* name, const ReduceArguments& arguments)
    : Op(name),
      arguments_(arguments),
      reducer_(arguments.element, arguments.reduction.kind),
      rank_(core.rank()),
      ranks_(core.size()),
      element_bytes_(size_of(arguments.element)) {
  const auto n = static_cast<std::size_t>(ranks_);
  const std::size_t bytes = arguments.count * element_bytes_;
  const std::size_t most =
      core.layout().slot_bytes() / std::max<std::size_t>(1, n - 1) / kLineBytes * kLineBytes;
  piece_bytes_ =
      std::clamp(Layout::rounded(bytes / (4 * n), kLineBytes), std::min(kLeastPiece, most), most);
  piece_count_ = piece_bytes_ / element_bytes_;
  rounds_ = blocks_of(arguments.count, n * piece_count_);
  asks_ = core.shares() && bytes >= kInPlaceBytes;
  // The two steps for arenas come first; if the data is not in arenas, the others follow.
  in_lines = asks_ ? 2 : 0;
  steps = 2 * rounds_ + in_lines;
  signature = signature_of(4, arguments);
  factors_.assign(n, arguments.reduction.factor);
  sources_.resize(n);
}

Share ReducePieces::piece(std::uint64_t round, int rank) const {
  const std::size_t of_round = static_cast<std::size_t>(ranks_) * piece_count_;
  const std::size_t begin = round * of_round;
  // The last round is divided anew.
  Share share =
      share_of(std::min(of_round, arguments_.count - begin), element_bytes_, rank, ranks_);
  share.at += begin;
  return share;
}

bool ReducePieces::announce(Core& core) {
  if (announced_) return true;
  if (!core.writable(*this, first, Core::Place::line)) return false;
  const std::uint64_t word =
      arguments_.input == arguments_.output
          ? core.place_of(arguments_.output, arguments_.count * element_bytes_)
          : 0;
  Line& line = core.line(rank_, first);
  std::memcpy(line.payload, &word, sizeof word);
  std::memcpy(line.payload + kFactorAt, &arguments_.reduction.factor, sizeof(double));
  core.publish(*this, first);
  return announced_ = true;
}

bool ReducePieces::decide(Core& core) {
  if (!announce(core)) return false;
  for (int r = 0; r < ranks_; ++r)
    if (r != rank_ && !core.ready(*this, r, first)) return false;
  const std::size_t bytes = arguments_.count * element_bytes_;
  bool all = true;
  std::vector<std::uint64_t> places;
  for (int r = 0; r < ranks_; ++r) {
    std::uint64_t word = 0;
    std::memcpy(&word, core.line(r, first).payload, sizeof word);
    std::memcpy(&factors_[r], core.line(r, first).payload + kFactorAt, sizeof(double));
    // One memory for all: where this rank's data is in it, this rank has not let it go.
    if (word == 0 || (word - 1) % element_bytes_ != 0 ||
        Core::memory_of(word) != Core::memory_of(places.empty() ? word : places.front()))
      all = false;
    places.push_back(word);
  }
  // All ranks have read the same words, so all choose the same path.
  path_ = all && arguments_.root < 0 ? Path::in_place : Path::slots;
  data_.clear();
  for (int r = 0; path_ == Path::in_place && r < ranks_; ++r) {
    data_.push_back(core.at_place(r, places[r], bytes));
    if (!data_.back())
      throw InvalidArgument(core.where(*this), ": its memory was freed during the call");
  }
  base_ = first + 2;
  if (path_ == Path::slots) core.finish(first + 1);
  return true;
}

bool ReducePieces::reduce_in_place(Core& core) {
  const std::uint64_t last = first + 1;
  if (!reduced_) {
    if (!core.writable(*this, last, Core::Place::line)) return false;
    const Share own = share_of(arguments_.count, element_bytes_, rank_, ranks_);
    const std::size_t end = own.at + own.count;
    const std::size_t block = kInPlaceBlock / element_bytes_;
    const bool large = arguments_.count * element_bytes_ >= kPastCacheBytes;
    for (std::size_t at = own.at; at < end; at += block) {
      const std::size_t count = std::min(block, end - at);
      const auto data = [&](int r) { return data_[r].get() + at * element_bytes_; };
      for (int r = 0; r < ranks_; ++r) {
        // Results are written to the memory of all: only while it is theirs.
        core.require_held(r);
        sources_[r] = data(r);
      }
      const int other = (rank_ + 1) % ranks_;
      reducer_(data(rank_), ranks_ > 1 ? data(other) : nullptr, sources_.data(), ranks_, count,
               factors_.data(), large);
      for (int r = 2; r < ranks_; ++r)
        copy_bytes(data((rank_ + r) % ranks_), data(rank_), count * element_bytes_);
    }
    core.publish(*this, last);
    reduced_ = true;
    from_ = 1;
  }
  for (; from_ < ranks_; ++from_)
    if (!core.ready(*this, (rank_ + from_) % ranks_, last)) return false;
  core.finish(first + steps - 1);
  return true;
}

bool ReducePieces::deal(Core& core) {
  const std::uint64_t step = deal_step(dealt_);
  if (!core.writable(*this, step, Core::Place::slot)) return false;
  for (int other = 1; other < ranks_; ++other) {
    const int to = (rank_ + other) % ranks_;
    const Share p = piece(dealt_, to);
    core.put(core.slot(*this, rank_, step) + place(to, rank_),
             arguments_.input + p.at * element_bytes_, p.count * element_bytes_, core.readers());
  }
  std::memcpy(core.line(rank_, step).payload + kFactorAt, &arguments_.reduction.factor,
              sizeof(double));
  core.publish(*this, step);
  ++dealt_;
  return true;
}

bool ReducePieces::reduce_own(Core& core) {
  const std::uint64_t step = deal_step(reduced_rounds_), result = result_step(reduced_rounds_);
  for (; from_ < ranks_; ++from_)
    if (!core.ready(*this, (rank_ + from_) % ranks_, step)) return false;
  if (!core.writable(*this, result, Core::Place::slot)) return false;
  const Share p = piece(reduced_rounds_, rank_);
  for (int r = 0; r < ranks_; ++r) {
    const auto i = static_cast<std::size_t>(r);
    sources_[i] = r == rank_ ? arguments_.input + p.at * element_bytes_
                             : core.slot(*this, r, step) + place(rank_, r);
    if (r != rank_)
      std::memcpy(&factors_[i], core.line(r, step).payload + kFactorAt, sizeof(double));
  }
  const bool wanted = arguments_.root < 0 || arguments_.root == rank_;
  std::byte* slot = core.slot(*this, rank_, result);
  std::byte* own = wanted ? arguments_.output + p.at * element_bytes_ : slot;
  reducer_(own, wanted && arguments_.root < 0 ? slot : nullptr, sources_.data(), ranks_, p.count,
           factors_.data(), core.past_cache(core.readers()));
  core.publish(*this, result);
  core.finish(step);
  ++reduced_rounds_;
  from_ = 1;
  return true;
}

bool ReducePieces::collect(Core& core) {
  const std::uint64_t step = result_step(collected_);
  if (arguments_.root < 0 || arguments_.root == rank_) {
    for (; from_ < ranks_; ++from_) {
      const int r = (rank_ + from_) % ranks_;
      if (!core.ready(*this, r, step)) return false;
      const Share p = piece(collected_, r);
      copy_bytes(arguments_.output + p.at * element_bytes_, core.slot(*this, r, step),
                 p.count * element_bytes_);
    }
  }
  core.finish(step);
  ++collected_;
  from_ = 1;
  return true;
}

void ReducePieces::early(Core& core) {
  if (asks_) {
    announce(core);
  } else if (dealt_ == 0) {
    base_ = first;
    deal(core);
  }
}

bool ReducePieces::advance(Core& core) {
  if (path_ == Path::unknown) {
    base_ = first;
    if (!asks_)
      path_ = Path::slots;
    else if (!decide(core))
      return false;
  }
  if (path_ == Path::in_place) return reduce_in_place(core);
  // In the order of the steps: deal 0, deal 1, result 0, deal 2, result 1, ...
  while (collected_ < rounds_) {
    if (dealt_ == 0 && !deal(core)) return false;
    // Collected one round behind, so that the results have had time to arrive.
    while (reduced_rounds_ < rounds_ && reduced_rounds_ < collected_ + 2) {
      if (dealt_ <= reduced_rounds_ + 1 && dealt_ < rounds_ && !deal(core)) return false;
      if (!reduce_own(core)) return false;
    }
    if (!collect(core)) return false;
  }
  return true;
}

}  // namespace tessera::shm::detail
