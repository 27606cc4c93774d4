#pragma once
// The layout of the memory that the ranks share. Every rank computes offsets from the number of
// ranks and the options, which were compared when they met; no offset is ever read from the memory.
//
//   page: Header | region of rank 0 | region of rank 1 | ...
//   rank r: RankState | kSlots slots | channels r -> 0, r -> 1, ... | frames' data | arena
//
// A word is written by one rank alone unless it says otherwise. Memory begins as zeros.

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tessera::shm::detail {

inline constexpr std::size_t kLineBytes = 64;
inline constexpr std::size_t kPageBytes = 4096;
/// Number of steps with a slot that a rank may be ahead of the slowest one. Two ranks exchange
/// their slots (Core::slot), whosever region they are in.
inline constexpr std::uint64_t kSlots = 4;
/// The same for all steps: a rank that only sends what fits into a line need not wait.
inline constexpr std::uint64_t kLines = 64;
/// Number of frames in transit from one rank to another.
inline constexpr std::uint64_t kFrames = 4;
inline constexpr int kMaxRanks = 512;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
                  std::atomic<std::uint32_t>::is_always_lock_free,
              "atomics with locks do not work between processes");

/// One step of one rank: a mark that it is there, and up to 56 bytes.
struct alignas(kLineBytes) Line {
  static constexpr std::size_t kPayload = kLineBytes - sizeof(std::uint64_t);
  /// Step + 1 (40 bits), number of steps that the rank is not yet done with (8), the call's
  /// signature (16).
  std::atomic<std::uint64_t> mark;
  std::byte payload[kPayload];
};
static_assert(sizeof(Line) == kLineBytes);

/// What a rank sleeps on, and which rank it waits for.
struct alignas(kLineBytes) Bell {
  static constexpr std::uint32_t kNobody = 0, kAnybody = 0xffffffffU;
  /// The futex word; a rank that rings adds one.
  std::atomic<std::uint32_t> rings;
  /// kNobody: awake. r + 1: asleep until rank r has done something. kAnybody: until any has. A rank
  /// that rings sets it to kNobody first.
  std::atomic<std::uint32_t> waits_for;
};

/// Why a rank ended the calls of all ranks.
struct alignas(kLineBytes) LastWords {
  static constexpr std::size_t kText = 448;
  /// 0: no message. 1: this rank gave up. 2: rank `culprit` is gone. 3: it is late. 4: the ranks'
  /// calls differ. 5: being written.
  std::atomic<std::uint32_t> kind;
  std::uint32_t culprit;
  std::uint32_t length;
  char text[kText];
};

struct alignas(kLineBytes) RankState {
  Line lines[kLines];
  /// Number of steps that this rank has finished with: their slots may be written again.
  alignas(kLineBytes) std::atomic<std::uint64_t> done;
  Bell bell;
  /// 1 once the rank has left regularly.
  alignas(kLineBytes) std::atomic<std::uint32_t> left;
  /// 1 once the rank has given calls up that were under way: the memory that it published for them
  /// may hold something else now.
  std::atomic<std::uint32_t> let_go;
  /// Number of threads of the rank's own process that are copying out of that memory.
  std::atomic<std::uint32_t> readers;
  LastWords last_words;
};

/// One piece of a message, in two lines that the CPU fetches together; a few bytes are in the
/// first.
struct alignas(2 * kLineBytes) Frame {
  static constexpr std::size_t kPayload = 2 * kLineBytes - 4 * sizeof(std::uint64_t);
  /// Number of the frame + 1.
  std::atomic<std::uint64_t> mark;
  std::uint64_t tag;
  /// Size of the whole message.
  std::uint64_t bytes;
  /// For a message that the receiver copies out of the sender's memory: its address there, else 0.
  std::uint64_t address;
  std::byte payload[kPayload];
};
static_assert(sizeof(Frame) == 2 * kLineBytes);

/// The frames from one rank to another.
struct Channel {
  Frame frames[kFrames];
  /// Written by the receiver: frames that it has finished with.
  alignas(kLineBytes) std::atomic<std::uint64_t> taken;
};

struct alignas(kLineBytes) Header {
  static constexpr std::uint64_t kMagic = 0x746573736d656d31;  // "tessmem1"
  std::uint64_t magic;
  /// Identifies this meeting; a rank compares it with what it received over the socket.
  std::uint64_t nonce[2];
  /// Number of ranks asleep. Read by all after each step, written by ranks that fall asleep or wake
  /// up.
  alignas(kLineBytes) std::atomic<std::uint32_t> sleepers;
  /// r + 1 for the first rank r that left last words.
  std::atomic<std::uint32_t> failed;
};

/// Sizes and offsets for one group.
class Layout {
 public:
  Layout() = default;
  /// `ranks` in [1, kMaxRanks]; sizes of the options, rounded up to whole pages.
  Layout(int ranks, std::size_t slot_bytes, std::size_t frame_bytes, std::size_t arena_bytes)
      : ranks_(static_cast<std::size_t>(ranks)),
        slot_bytes_(rounded(slot_bytes, kLineBytes)),
        frame_bytes_(rounded(frame_bytes, kLineBytes)),
        arena_bytes_(rounded(arena_bytes, kPageBytes)) {}

  std::size_t slot_bytes() const { return slot_bytes_; }
  std::size_t frame_bytes() const { return frame_bytes_; }
  std::size_t arena_bytes() const { return arena_bytes_; }

  std::size_t slots_at() const { return rounded(sizeof(RankState), kPageBytes); }
  std::size_t channels_at() const { return slots_at() + rounded(kSlots * slot_bytes_, kPageBytes); }
  std::size_t frames_at() const {
    return channels_at() + rounded(ranks_ * sizeof(Channel), kPageBytes);
  }
  std::size_t arena_at() const {
    return frames_at() + rounded(ranks_ * kFrames * frame_bytes_, kPageBytes);
  }
  std::size_t region_bytes() const { return arena_at() + arena_bytes_; }
  std::size_t region(int rank) const {
    return kPageBytes + static_cast<std::size_t>(rank) * region_bytes();
  }
  std::size_t total() const { return region(static_cast<int>(ranks_)); }

  static std::size_t rounded(std::size_t bytes, std::size_t to) {
    return (bytes + to - 1) / to * to;
  }

 private:
  std::size_t ranks_ = 0, slot_bytes_ = 0, frame_bytes_ = 0, arena_bytes_ = 0;
};
static_assert(sizeof(Header) <= kPageBytes);

}  // namespace tessera::shm::detail
