// Reduce-scatter and scatter.

#include <algorithm>

#include "tessera/shm/detail/calls.h"

namespace tessera::shm::detail {

Deal::Deal(Core& core, const char* name, Blocks blocks, const std::byte* input, std::byte* output,
           int source, std::optional<Reducer> reducer, const Reduction& reduction)
    : Op(name),
      blocks_(std::move(blocks)),
      input_(input),
      output_(output),
      source_(source),
      rank_(core.rank()),
      ranks_(core.size()),
      reducer_(reducer),
      reduction_(reduction) {
  const std::size_t others = static_cast<std::size_t>(std::max(1, ranks_ - 1));
  const std::size_t most = core.layout().slot_bytes() / others / kLineBytes * kLineBytes;
  piece_ = std::clamp(Layout::rounded(blocks_.largest() / 4, kLineBytes),
                      std::min(kLeastPiece, most), most);
  inline_ = blocks_.total() <= kFactorAt;
  steps = blocks_of(blocks_.largest(), piece_);
  in_lines = inline_ ? steps : 0;
  signature = signature_of(2, blocks_.digest(), static_cast<std::uint64_t>(source + 1),
                           reducer_ ? 256U * static_cast<unsigned>(reducer_->element()) +
                                          static_cast<unsigned>(reduction.kind) + 1U
                                    : 0U);
}

std::size_t Deal::piece_of(int rank, std::uint64_t round) const {
  const std::size_t at = round * piece_;
  return blocks_.size(rank) > at ? std::min(piece_, blocks_.size(rank) - at) : 0;
}

bool Deal::publish_pieces(Core& core) {
  bool moved = false;
  while (published_ < steps && published_ < consumed_ + kAhead) {
    if (sends() && ranks_ > 1) {
      const std::uint64_t step = first + published_;
      if (!core.writable(*this, step, inline_ ? Core::Place::line : Core::Place::slot))
        return moved;
      Line& line = core.line(rank_, step);
      if (inline_) {
        copy_bytes(line.payload, input_, blocks_.total());
      } else {
        for (int other = 1; other < ranks_; ++other) {
          const int to = (rank_ + other) % ranks_;
          core.put(core.slot(*this, rank_, step) + static_cast<std::size_t>(other - 1) * piece_,
                   input_ + blocks_.start(to) + published_ * piece_, piece_of(to, published_),
                   reducer_ ? core.readers() : Readers::one);
        }
      }
      std::memcpy(line.payload + kFactorAt, &reduction_.factor, sizeof(double));
      core.publish(*this, step);
    }
    ++published_;
    moved = true;
  }
  return moved;
}

void Deal::consume(Core& core, std::uint64_t round) {
  const std::size_t bytes = piece_of(rank_, round), at = round * piece_;
  const std::uint64_t step = first + round;
  const auto in_slot = [&](int r) {
    return core.slot(*this, r, step) +
           static_cast<std::size_t>((rank_ - r - 1 + ranks_) % ranks_) * piece_;
  };
  const auto from = [&](int r) -> const std::byte* {
    if (r == rank_) return input_ + blocks_.start(rank_) + at;
    return inline_ ? core.line(r, step).payload + blocks_.start(rank_) : in_slot(r);
  };
  if (!reducer_) {
    if (source_ == rank_ || inline_)
      copy_bytes(output_ + at, from(source_), bytes);
    else
      core.take(output_ + at, in_slot(source_), bytes);
    return;
  }
  std::vector<const std::byte*> sources;
  factors_.clear();
  for (int r = 0; r < ranks_; ++r) {
    sources.push_back(from(r));
    double factor = reduction_.factor;
    if (r != rank_) std::memcpy(&factor, core.line(r, step).payload + kFactorAt, sizeof factor);
    factors_.push_back(factor);
  }
  (*reducer_)(output_ + at, nullptr, sources.data(), ranks_, bytes / size_of(reducer_->element()),
              factors_.data());
}

bool Deal::advance(Core& core) {
  while (consumed_ < steps) {
    bool moved = publish_pieces(core);
    if (consumed_ < published_) {
      if (piece_of(rank_, consumed_) > 0) {
        for (int r = 0; r < ranks_; ++r)
          if (r != rank_ && reads(r) && !core.ready(*this, r, first + consumed_)) return false;
        consume(core, consumed_);
      }
      core.finish(first + consumed_);
      ++consumed_;
      moved = true;
    }
    if (!moved) return false;
  }
  return true;
}

}  // namespace tessera::shm::detail
