#include "tessera/shm/detail/pulling.h"

#include <algorithm>

#include "tessera/base/internal/vector.h"

namespace tessera::shm::detail {
namespace {
constexpr std::size_t kPulledBlock = 32768;
}  // namespace

// ---- where data is ----

void Places::say(Core& core, std::uint64_t step, const std::byte* data, std::size_t bytes) {
  const Where where{core.place_of(data, bytes), reinterpret_cast<std::uint64_t>(data)};
  std::memcpy(core.line(core.rank(), step).payload, &where, sizeof where);
}

void Places::note(Core& core, int rank, std::uint64_t step, std::size_t bytes) {
  Where where;
  std::memcpy(&where, core.line(rank, step).payload, sizeof where);
  where_[rank] = where;
  bytes_[rank] = bytes;
}

std::shared_ptr<const std::byte> Places::here(Core& core, int rank) const {
  const auto i = static_cast<std::size_t>(rank);
  return where_[i].place == 0 ? nullptr : core.at_place(rank, where_[i].place, bytes_[i]);
}

void Places::copy(Core& core, int rank, std::size_t at, std::byte* to, std::size_t bytes) const {
  if (bytes == 0) return;
  if (const auto data = here(core, rank)) {
    std::memcpy(to, data.get() + at, bytes);
    core.require_held(rank);
  } else {
    core.copy_from(rank, to, where_[rank].address + at, bytes);
  }
}

// ---- what all calls share ----

Pull::Pull(Core& core, const char* name, std::uint64_t step_count, std::uint64_t call_signature,
           double factor)
    : Op(name),
      rank_(core.rank()),
      ranks_(core.size()),
      places_(ranks_),
      factors_(static_cast<std::size_t>(ranks_), factor) {
  steps = in_lines = step_count;
  signature = call_signature;
}

bool Pull::announce(Core& core) {
  if (announced_) return true;
  if (gives()) {
    if (!core.writable(*this, first, Core::Place::line)) return false;
    const auto [address, bytes] = data();
    Places::say(core, first, address, bytes);
    std::memcpy(core.line(rank_, first).payload + kFactorAt, &factors_[rank_], sizeof(double));
    core.publish(*this, first);
  }
  return announced_ = true;
}

bool Pull::noted(Core& core, std::size_t bytes) {
  for (; noted_ < ranks_; ++noted_) {
    if (noted_ == rank_ || !reads(noted_)) continue;
    if (!core.ready(*this, noted_, first)) return false;
    places_.note(core, noted_, first, bytes);
    std::memcpy(&factors_[noted_], core.line(noted_, first).payload + kFactorAt, sizeof(double));
  }
  return true;
}

std::vector<int> Pull::missing(const Core& core) const {
  if (!taken_) return Op::missing(core);
  return numbers_below(ranks_,
                       [&](int r) { return serves(r) && !core.is_done(r, first + steps - 1); });
}

bool Pull::others_are_done(Core& core) {
  const std::uint64_t last = first + steps - 1;
  if (!taken_) core.finish(last);
  taken_ = true;
  for (int r = 0; r < ranks_; ++r)
    if (serves(r) && !core.is_done(*this, r, last)) return false;
  return true;
}

// ---- broadcast, all-gather, gather ----

PullSpread::PullSpread(Core& core, const char* name, Blocks blocks, const std::byte* input,
                       std::byte* output, int reader)
    : Pull(core, name, 1, signature_of(5, blocks.digest(), static_cast<std::uint64_t>(reader + 1))),
      blocks_(std::move(blocks)),
      input_(input),
      output_(output),
      reading_(reader < 0 || reader == core.rank()),
      tree_(core.options().crowded && reader < 0 && blocks_.only() >= 0) {
  if (!tree_) return;
  parent_ = parent_of(rank_);
  for (int r = 0; r < ranks_; ++r) children_ = children_ || serves(r);
}

bool PullSpread::advance_in_tree(Core& core) {
  if (!copied_) {
    if (parent_ >= 0) {
      if (!core.ready(*this, parent_, first)) return false;
      places_.note(core, parent_, first, blocks_.total());
      places_.copy(core, parent_, 0, output_, blocks_.total());
    } else {
      copy_bytes(output_, input_, blocks_.total());
    }
    copied_ = true;
  }
  return announce(core);
}

bool PullSpread::advance(Core& core) {
  if (!taken_ && tree_) {
    if (!advance_in_tree(core)) return false;
  } else if (!taken_) {
    if (!announce(core)) return false;
    // Taken in the order of arrival; every rank begins with another one.
    for (; reading_ && from_ < ranks_; ++from_) {
      const int r = (rank_ + from_) % ranks_;
      const std::size_t bytes = blocks_.size(r);
      std::byte* to = output_ + blocks_.start(r);
      if (bytes == 0) continue;
      if (r == rank_) {
        copy_bytes(to, input_, bytes);
        continue;
      }
      if (!core.ready(*this, r, first)) return false;
      places_.note(core, r, first, bytes);
      places_.copy(core, r, 0, to, bytes);
    }
  }
  return others_are_done(core);
}

// ---- all-reduce, scatter, reduce-scatter ----

namespace {

/// Reduces some bytes of all ranks, in blocks that stay in the cache. `own`: this rank's data.
/// `at`: offset of the bytes in every rank's data.
void reduce_pulled(Core& core, const Reducer& reducer, const Places& places, const std::byte* own,
                   std::size_t at, std::byte* output, std::size_t bytes,
                   const std::vector<double>& factors) {
  const int ranks = core.size();
  std::vector<const std::byte*> sources(static_cast<std::size_t>(ranks));
  std::vector<std::byte> fetched;
  std::vector<std::shared_ptr<const std::byte>> mapped;
  for (int r = 0; r < ranks; ++r)
    mapped.push_back(r == core.rank() ? nullptr : places.here(core, r));
  for (std::size_t done = 0; done < bytes; done += kPulledBlock) {
    const std::size_t part = std::min(kPulledBlock, bytes - done);
    for (int r = 0; r < ranks; ++r) {
      const auto i = static_cast<std::size_t>(r);
      if (r == core.rank()) {
        sources[i] = own + at + done;
      } else if (mapped[i]) {
        sources[i] = mapped[i].get() + at + done;
      } else {
        fetched.resize(sources.size() * kPulledBlock);
        places.copy(core, r, at + done, fetched.data() + i * kPulledBlock, part);
        sources[i] = fetched.data() + i * kPulledBlock;
      }
    }
    reducer(output + done, nullptr, sources.data(), ranks, part / size_of(reducer.element()),
            factors.data());
  }
  for (int r = 0; r < ranks; ++r)
    if (r != core.rank()) core.require_held(r);
}

Blocks shares_of(std::size_t count, std::size_t element_bytes, int ranks) {
  std::vector<std::size_t> sizes;
  for (int r = 0; r < ranks; ++r)
    sizes.push_back(share_of(count, element_bytes, r, ranks).count * element_bytes);
  return Blocks::of(std::move(sizes));
}

}  // namespace

PullReduce::PullReduce(Core& core, const char* name, const ReduceArguments& arguments)
    : Pull(core, name, 2, signature_of(7, arguments), arguments.reduction.factor),
      arguments_(arguments),
      reducer_(arguments.element, arguments.reduction.kind),
      shares_(shares_of(arguments.count, size_of(arguments.element), ranks_)),
      results_(ranks_) {}

bool PullReduce::advance(Core& core) {
  const std::uint64_t result = first + 1;
  if (!reduced_) {
    if (!announce(core) || !noted(core, shares_.total())) return false;
    if (!core.writable(*this, result, Core::Place::line)) return false;
    const std::size_t at = shares_.start(rank_);
    reduce_pulled(core, reducer_, places_, arguments_.input, at, arguments_.output + at,
                  shares_.size(rank_), factors_);
    Places::say(core, result, arguments_.output, shares_.total());
    core.publish(*this, result);
    reduced_ = true;
  }
  // What is overwritten here, if it is the input, has been read: its rank has published its share.
  for (; from_ < ranks_; ++from_) {
    const int r = (rank_ + from_) % ranks_;
    if (!core.ready(*this, r, result)) return false;
    results_.note(core, r, result, shares_.total());
    results_.copy(core, r, shares_.start(r), arguments_.output + shares_.start(r), shares_.size(r));
  }
  return others_are_done(core);
}

PullDeal::PullDeal(Core& core, const char* name, DealArguments arguments)
    : Pull(core, name, 1, signature_of(6, arguments), arguments.reduction.factor),
      deal_(std::move(arguments)) {}

bool PullDeal::advance(Core& core) {
  if (!taken_) {
    const auto& [blocks, input, output, source, reducer, reduction] = deal_;
    if (!announce(core) || !noted(core, blocks.total())) return false;
    const std::size_t at = blocks.start(rank_), bytes = blocks.size(rank_);
    if (reducer)
      reduce_pulled(core, *reducer, places_, input, at, output, bytes, factors_);
    else if (source == rank_)
      copy_bytes(output, input + at, bytes);
    else
      places_.copy(core, source, at, output, bytes);
  }
  return others_are_done(core);
}

}  // namespace tessera::shm::detail
