#pragma once
// Messages between two ranks. Each ordered pair has a channel: a ring of frames, in order. A
// message is one frame or more; a large one may be a single frame with its address, and the
// receiver copies it out of the sender's memory. Messages with the same tag match in order. One
// that nobody asked for, while the receiver waits for another, is kept aside.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <vector>

#include "tessera/shm/detail/core.h"

namespace tessera::shm::detail {

inline constexpr int kAnySource = -1;

/// A message that came before somebody asked for it.
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
  /// Frame that holds its address, + 1; 0: none yet.
  std::uint64_t frame = 0;
  bool complete = false;
};

struct Incoming {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  /// A rank, or kAnySource; then the rank it came from.
  int from = 0;
  std::uint64_t tag = 0;
  bool matched = false, complete = false;
};

/// Some sends and receives as one call, in any order without deadlock.
class Batch final : public Op {
 public:
  explicit Batch(const char* name) : Op(name) { collective = false; }
  ~Batch() override;
  bool advance(Core&) override { return complete; }
  std::vector<int> missing(const Core& core) const override;

  // Lists, so that addresses stay.
  std::list<Outgoing> sends;
  std::list<Incoming> receives;
};

class Messages {
 public:
  explicit Messages(Core& core);
  ~Messages();

  /// Takes a batch up; it lives until it is complete or failed.
  void post(Batch& batch);
  /// Moves all messages on; true if any moved.
  bool advance();
  bool waiting() const { return !batches_.empty(); }
  void fail(const std::exception_ptr& error);

 private:
  /// What comes in on one channel.
  struct Stream {
    std::uint64_t next = 0;
    Incoming* target = nullptr;
    std::list<Kept>::iterator kept;
    bool keeping = false;
    std::uint64_t bytes = 0, got = 0;
  };

  bool send(int to);
  bool receive(int from);
  bool take(int from, Stream& stream, const Frame& frame);
  Incoming* match(int from, std::uint64_t tag);
  bool take_kept(Incoming& receive);
  bool awaited(int from) const;
  void check_size(const Incoming& receive, int from, std::uint64_t bytes) const;

  Core& core_;
  std::vector<Batch*> batches_;
  std::vector<std::deque<Outgoing*>> outgoing_;
  std::vector<std::uint64_t> next_frame_;
  /// In the order in which they were posted.
  std::list<Incoming*> posted_;
  /// Frames that each receiver has taken, as far as is known here.
  std::vector<std::uint64_t> taken_;
  std::vector<Stream> streams_;
  std::list<Kept> kept_;
};

}  // namespace tessera::shm::detail
