#pragma once
// Messages between two ranks. Each ordered pair has a channel: a ring of frames, in order. A
// message is one frame or more; a large one may be a single frame with its address, and the
// receiver copies it out of the sender's memory. Messages with the same tag match in order. A
// message that arrives before its receive was posted is stored.

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory_resource>
#include <vector>

#include "tessera/shm/detail/core.h"

namespace tessera::shm::detail {

inline constexpr int kAnySource = -1;
/// A tag: 32 bits that both ends choose, then 8 bits for the type of the bytes; these do not select
/// a message, but must be the same at both ends.
inline constexpr int kTypeAt = 32;
inline constexpr std::uint64_t kNumberMask = 0xffffffffU,
                               kTypeMask = std::uint64_t{0xff} << kTypeAt;

/// A message that arrived before its receive was posted.
struct Kept {
  int from = 0;
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
  std::vector<std::byte> data;
  bool whole = false;
};

struct Outgoing {
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  int to = 0;
  std::uint64_t tag = 0;
  std::size_t sent = 0;
  /// Its last frame + 1, once that is published; the send is complete when the receiver has taken
  /// it.
  std::uint64_t frame = 0;
  /// Complete as soon as all of it is in frames.
  bool buffered = false;
  bool complete = false;
};

struct Incoming {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  /// A rank, or kAnySource; in the end the rank it came from.
  int from = 0;
  std::uint64_t tag = 0;
  bool complete = false;
};

/// Several sends and receives as one call, in any order without deadlock.
class Batch final : public Op {
  // A few messages need no memory of the heap.
  alignas(std::max_align_t) std::array<std::byte, 512> first_;
  std::pmr::monotonic_buffer_resource memory_{first_.data(), first_.size()};

 public:
  explicit Batch(const char* name) : Op(name) { collective = false; }
  bool advance(Core&) override { return complete; }
  std::vector<int> missing(const Core& core) const override;

  /// Sends are complete when all their data are in frames, so that this rank does not wait for the
  /// receivers.
  bool buffered = false;
  /// Filled before the batch is posted: their addresses are kept from then on.
  std::pmr::vector<Outgoing> sends{&memory_};
  std::pmr::vector<Incoming> receives{&memory_};
};

class Messages {
 public:
  explicit Messages(Core& core) : core_(core), peers_(static_cast<std::size_t>(core.size())) {}

  /// Begins a batch, which must live until it is complete or has failed.
  void post(Batch& batch);
  /// Advances all messages; true if any advanced.
  bool advance();
  bool waiting() const { return !batches_.empty(); }
  void fail(const std::exception_ptr& error);
  const std::vector<Batch*>& batches() const { return batches_; }

 private:
  /// The message that is arriving on one channel.
  struct Stream {
    std::uint64_t next = 0;
    Incoming* target = nullptr;
    std::list<Kept>::iterator kept;
    bool keeping = false;
    std::uint64_t bytes = 0, got = 0;
  };
  /// What goes to one rank, and comes from it.
  struct Peer {
    /// Messages not yet sent, and sent but not yet taken.
    std::deque<Outgoing*> outgoing, untaken;
    std::uint64_t next_frame = 0;
    /// Number of frames that it has taken, as far as is known here.
    std::uint64_t taken = 0;
    Stream stream;
  };

  bool send(int to);
  bool acknowledge(int to);
  bool receive(int from);
  bool take(int from, Stream& stream, const Frame& frame);
  void keep(int from, Stream& stream, std::uint64_t tag);
  Incoming* match(int from, std::uint64_t tag);
  static bool same(std::uint64_t a, std::uint64_t b) { return ((a ^ b) & ~kTypeMask) == 0; }
  bool take_kept(Incoming& receive);
  bool awaited(int from) const;
  void check_fit(const Incoming& receive, int from, std::uint64_t tag, std::uint64_t bytes) const;

  Core& core_;
  std::vector<Batch*> batches_;
  /// One per rank.
  std::vector<Peer> peers_;
  /// Receives in the order in which they were posted.
  std::vector<Incoming*> posted_;
  std::list<Kept> kept_;
  /// Sum of their sizes.
  std::uint64_t kept_bytes_ = 0;
};

}  // namespace tessera::shm::detail
