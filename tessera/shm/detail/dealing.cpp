// Reduce-scatter and scatter.

#include <algorithm>

#include "tessera/shm/detail/calls.h"

namespace tessera::shm::detail {

Deal::Deal(Core& core, const char* name, DealArguments arguments)
    : Op(name), deal_(std::move(arguments)), rank_(core.rank()), ranks_(core.size()) {
  const std::size_t others = static_cast<std::size_t>(std::max(1, ranks_ - 1));
  const std::size_t most = core.layout().slot_bytes() / others / kLineBytes * kLineBytes;
  piece_ = std::clamp(Layout::rounded(deal_.blocks.largest() / 4, kLineBytes),
                      std::min(kLeastPiece, most), most);
  inline_ = deal_.blocks.total() <= kFactorAt;
  steps = blocks_of(deal_.blocks.largest(), piece_);
  in_lines = inline_ ? steps : 0;
  signature = signature_of(2, deal_);
}

void Deal::publish_pieces(Core& core) {
  for (; published_ < steps && published_ < consumed_ + kAhead; ++published_) {
    if (!has_data(rank_) || ranks_ == 1) continue;
    const std::uint64_t step = first + published_;
    if (!core.writable(*this, step, inline_ ? Core::Place::line : Core::Place::slot)) return;
    Line& line = core.line(rank_, step);
    if (inline_) {
      copy_bytes(line.payload, deal_.input, deal_.blocks.total());
    } else {
      for (int other = 1; other < ranks_; ++other) {
        const int to = (rank_ + other) % ranks_;
        core.put(core.slot(*this, rank_, step) + static_cast<std::size_t>(other - 1) * piece_,
                 deal_.input + deal_.blocks.start(to) + published_ * piece_,
                 piece_of(to, published_), deal_.reducer ? core.readers() : Readers::one);
      }
    }
    std::memcpy(line.payload + kFactorAt, &deal_.reduction.factor, sizeof(double));
    core.publish(*this, step);
  }
}

void Deal::consume(Core& core, std::uint64_t round) {
  const std::size_t bytes = piece_of(rank_, round), at = round * piece_;
  const std::uint64_t step = first + round;
  const auto in_slot = [&](int r) {
    return core.slot(*this, r, step) +
           static_cast<std::size_t>((rank_ - r - 1 + ranks_) % ranks_) * piece_;
  };
  const auto from = [&](int r) -> const std::byte* {
    if (r == rank_) return deal_.input + deal_.blocks.start(rank_) + at;
    return inline_ ? core.line(r, step).payload + deal_.blocks.start(rank_) : in_slot(r);
  };
  if (!deal_.reducer) {
    if (deal_.source == rank_ || inline_)
      copy_bytes(deal_.output + at, from(deal_.source), bytes);
    else
      core.take(deal_.output + at, in_slot(deal_.source), bytes);
    return;
  }
  std::vector<const std::byte*> sources;
  factors_.clear();
  for (int r = 0; r < ranks_; ++r) {
    sources.push_back(from(r));
    double factor = deal_.reduction.factor;
    if (r != rank_) std::memcpy(&factor, core.line(r, step).payload + kFactorAt, sizeof factor);
    factors_.push_back(factor);
  }
  (*deal_.reducer)(deal_.output + at, nullptr, sources.data(), ranks_,
                   bytes / size_of(deal_.reducer->element()), factors_.data());
}

bool Deal::advance(Core& core) {
  while (consumed_ < steps) {
    publish_pieces(core);
    if (consumed_ == published_) return false;
    if (piece_of(rank_, consumed_) > 0) {
      for (int r = 0; r < ranks_; ++r)
        if (r != rank_ && reads(r) && !core.ready(*this, r, first + consumed_)) return false;
      consume(core, consumed_);
    }
    core.finish(first + consumed_);
    ++consumed_;
  }
  return true;
}

}  // namespace tessera::shm::detail
