// Barrier, broadcast, all-gather, gather.

#include <algorithm>

#include "tessera/shm/detail/calls.h"

namespace tessera::shm::detail {

Spread::Spread(Core& core, const char* name, Blocks blocks, const std::byte* input,
               std::byte* output, int reader, bool barrier)
    : Op(name),
      blocks_(std::move(blocks)),
      input_(input),
      output_(output),
      reading_(reader < 0 || reader == core.rank()),
      barrier_(barrier),
      one_reader_(reader >= 0 || (core.size() == 2 && blocks_.only() >= 0)),
      rank_(core.rank()),
      ranks_(core.size()) {
  const std::size_t most = core.layout().slot_bytes();
  piece_ = std::clamp(Layout::rounded(blocks_.largest() / 4, kLineBytes),
                      std::min(kLeastPiece, most), most);
  steps = std::max<std::uint64_t>(barrier ? 1 : 0, blocks_of(blocks_.largest(), piece_));
  in_lines = blocks_.largest() <= Line::kPayload ? steps : 0;
  signature =
      signature_of(1, blocks_.digest(), static_cast<std::uint64_t>(reader + 1), barrier ? 1 : 0);
}

void Spread::publish_pieces(Core& core) {
  for (; published_ < steps && published_ < consumed_ + kAhead; ++published_) {
    if (!has(rank_, published_)) continue;
    const std::uint64_t step = first + published_;
    const std::size_t at = published_ * piece_;
    const std::size_t bytes = blocks_.part(rank_, at, piece_);
    const bool in_line = bytes <= Line::kPayload;
    if (!core.writable(*this, step, in_line ? Core::Place::line : Core::Place::slot)) return;
    if (ranks_ > 1) {
      core.put(in_line ? core.line(rank_, step).payload : core.slot(*this, rank_, step),
               input_ + at, bytes, one_reader_ ? Readers::one : core.readers());
      core.publish(*this, step);
    }
    if (reading_) copy_bytes(output_ + blocks_.start(rank_) + at, input_ + at, bytes);
  }
}

bool Spread::advance(Core& core) {
  while (consumed_ < steps) {
    publish_pieces(core);
    if (consumed_ == published_) return false;
    const std::uint64_t step = first + consumed_;
    for (; reading_ && from_ < ranks_; ++from_) {
      const int r = (rank_ + from_) % ranks_;
      if (!has(r, consumed_)) continue;
      if (!core.ready(*this, r, step)) return false;
      const std::size_t at = consumed_ * piece_;
      const std::size_t bytes = blocks_.part(r, at, piece_);
      std::byte* to = output_ + blocks_.start(r) + at;
      if (bytes <= Line::kPayload)
        copy_bytes(to, core.line(r, step).payload, bytes);
      else if (one_reader_)
        core.take(to, core.slot(*this, r, step), bytes);
      else
        std::memcpy(to, core.slot(*this, r, step), bytes);
    }
    core.finish(step);
    from_ = 1;
    ++consumed_;
  }
  return true;
}

}  // namespace tessera::shm::detail
