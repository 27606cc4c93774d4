#pragma once
// Ranks of one host that communicate through shared memory, on bytes and element types; no
// libtorch.
//
//   shm::Group group = shm::Group::meet(rank, 4, directory, {.name = "world"});  // all 4 call
//   group.all_reduce(values, values, 100, shm::Element::float32, {});             // in place
//   shm::Request r = group.started().all_reduce(a, a, n, shm::Element::float64, {});
//   while (computing) r.test();                                                    // advances it
//   r.wait();
//
// All calls but send, receive and exchange are collective: all ranks make them, in the same order
// and with the same sizes. Results have the same bits on all ranks and in every run.
//
// Meeting. One rank makes the memory, and passes its descriptor to the others over a local socket.
// That they can meet there proves that they share a host; names of hosts and environment variables
// are not consulted.
//
// Progress. There is no background thread: a started call advances while this rank starts, tests or
// waits for any call of the group, or in drive(). What fits into a slot is published when it is
// started, so that the other ranks need not wait for this rank's next call.
//
// Errors. A call that fails ends the group: its other calls, and those of the other ranks, fail
// too, with the reason. Calls throw InvalidArgument before anything is done; TimeoutError,
// PeerLostError and MismatchError (types.h) come from any call that waits.
//
// A Group may be used by several threads. The caller ensures that their calls are in the same order
// on all ranks.

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/deadline.h"
#include "tessera/shm/types.h"

namespace tessera::shm {

namespace detail {
class Batch;
class Core;
struct GroupState;
class Op;
}  // namespace detail

/// A place where ranks leave each other short messages before they share memory: any key-value
/// store that all of them reach. Each key is used once.
struct Directory {
  std::function<void(const std::string& key, const std::string& bytes)> put;
  /// Waits until the key exists. Throws once the limit has passed.
  std::function<std::string(const std::string& key, std::chrono::milliseconds limit)> get;
  /// Deletes a key that no rank will read any more; may be empty.
  std::function<void(const std::string& key)> erase = {};
};

struct Options {
  /// Name of the group, for messages.
  std::string name = "shm";
  /// Time limit of calls that give none, and of making the group.
  std::chrono::milliseconds timeout = kDefaultLimit;
  /// Size of each rank's arena, from which it allocates memory that collectives use in place.
  std::size_t arena_bytes = 0;
  /// Largest piece of a pipelined collective in bytes; 0: chosen by the number of ranks.
  std::size_t slot_bytes = 0;
  /// Largest piece of a message in bytes; 0: chosen by the number of ranks.
  std::size_t frame_bytes = 0;
  /// Copy large messages out of the sender's memory where the kernel allows it.
  bool single_copy = true;
  /// How data for other ranks are written; if it is not given, measured when the group is made.
  /// Ranks may differ.
  std::optional<Stores> stores;
  /// Limit of the messages in bytes that a rank keeps because they came before their receives.
  std::size_t kept_bytes = std::size_t{1} << 30;
};

/// A range of this rank's memory that the other ranks of its group see too: collectives on it need
/// no intermediate copy. It is part of the group's shared memory, of size Options::arena_bytes.
class Arena {
 public:
  /// Only shm::Group makes one. `keep` owns the memory.
  Arena(std::shared_ptr<const void> keep, std::byte* begin, std::size_t bytes);

  /// Allocates at least this many bytes, aligned to 64; from any thread. Returns null if no free
  /// block is large enough.
  std::byte* try_allocate(std::size_t bytes);
  /// Does what try_allocate() does, but throws ArenaFull instead of returning null.
  std::byte* allocate(std::size_t bytes);
  /// Frees what allocate() returned, or null. Throws InvalidArgument for any other address.
  void deallocate(std::byte* data);

  bool contains(const void* data) const;
  std::size_t size() const { return bytes_; }
  std::size_t used() const;
  /// Size of the largest block that could be allocated now.
  std::size_t largest_free() const;

 private:
  const std::shared_ptr<const void> keep_;
  std::byte* const begin_;
  const std::size_t bytes_;
  mutable std::mutex mutex_;
  /// Offset to size. This table is in private memory: no other rank can damage it.
  std::map<std::size_t, std::size_t> free_, taken_;
};

/// Thrown if the arena has no free block that is large enough.
class ArenaFull : public Error {
 public:
  using Error::Error;
};

/// Options of one call.
struct Call {
  /// Time limit; 0: the group's own.
  std::chrono::milliseconds timeout{0};
  /// A collective takes a number for what else must be the same on all ranks. Ranks that give
  /// different numbers get a MismatchError instead of data (of which one pair in 65536 escapes).
  std::uint64_t sign = 0;
};

/// A call in progress. Its memory must not be touched before it is complete. Destroying a request
/// that was not waited for waits.
class [[nodiscard]] Request {
 public:
  /// Already complete.
  Request();
  Request(std::shared_ptr<detail::Core> core, std::unique_ptr<detail::Op> op,
          std::chrono::milliseconds limit);
  Request(Request&&) noexcept;
  Request& operator=(Request&&) noexcept;
  ~Request();

  /// Advances the group's calls; true once this one is complete. Throws what ended it.
  bool test();
  /// Blocks until complete, at most for the call's own limit.
  void wait();
  void wait(std::chrono::milliseconds limit);
  /// A complete receive from any rank has the rank it came from; other calls -1.
  int source() const { return source_; }

 private:
  void settle();

  std::shared_ptr<detail::Core> core_;
  std::unique_ptr<detail::Op> op_;
  std::chrono::milliseconds limit_{0};
  int source_ = -1;
};

/// A send or a receive of a batch. Messages between two ranks with the same tag match in order.
struct Message {
  enum class Kind : unsigned char { send, receive };
  static constexpr int kAnySource = -1;
  Kind kind = Kind::send;
  /// Read by a send, written by a receive.
  void* data = nullptr;
  std::size_t bytes = 0;
  /// A rank of the group, this one included; kAnySource for a receive from any rank.
  int peer = 0;
  std::uint32_t tag = 0;
  /// The type of the bytes; ends that give different types both get a MismatchError.
  std::uint8_t type = 0;
};

/// The calls of a group, each declared once: Result is void where they block, and Request where
/// they are started (Group::started()).
template <class Result>
class Calls {
 public:
  int rank() const;
  int size() const;

  /// Complete when all ranks have called it. `name`, a string literal, is shown in errors.
  Result barrier(Call call = {}, const char* name = "barrier") const;
  Result broadcast(void* data, std::size_t bytes, int root, Call call = {}) const;
  /// Reduces `count` elements over the ranks. `output` may be `input`, and is disjoint from it
  /// otherwise.
  Result all_reduce(const void* input, void* output, std::size_t count, Element element,
                    Reduction reduction, Call call = {}) const;
  /// This is all_reduce() whose `output` is written on `root` alone and may be null elsewhere.
  Result reduce(const void* input, void* output, std::size_t count, Element element,
                Reduction reduction, int root, Call call = {}) const;
  /// Concatenates the ranks' `input`. Sizes are bytes, one number per rank, the same on all ranks.
  /// `input` may be this rank's range of `output`.
  Result all_gather(const void* input, void* output, const std::vector<std::size_t>& sizes,
                    Call call = {}) const;
  /// This is all_gather() whose `output` is used on `root` alone.
  Result gather(const void* input, void* output, const std::vector<std::size_t>& sizes, int root,
                Call call = {}) const;
  /// Distributes the ranges of `root`'s `input`, which is used there alone.
  Result scatter(const void* input, void* output, const std::vector<std::size_t>& sizes, int root,
                 Call call = {}) const;
  /// Reduces over the ranks `input`, which holds `counts` elements for each rank; `output` gets
  /// this rank's.
  Result reduce_scatter(const void* input, void* output, const std::vector<std::size_t>& counts,
                        Element element, Reduction reduction, Call call = {}) const;
  /// All ranks have equal sizes.
  Result all_gather(const void* input, void* output, std::size_t bytes_each, Call call = {}) const;
  Result reduce_scatter(const void* input, void* output, std::size_t count_each, Element element,
                        Reduction reduction, Call call = {}) const;
  /// Sends a range of `input` to each rank. Sizes are this rank's own: bytes to, and from, each
  /// rank, whose ranges follow each other.
  Result all_to_all(const void* input, const std::vector<std::size_t>& input_sizes, void* output,
                    const std::vector<std::size_t>& output_sizes, Call call = {}) const;
  Result send(const void* data, std::size_t bytes, int to, std::uint32_t tag = 0,
              Call call = {}) const;
  Result receive(void* data, std::size_t bytes, int from, std::uint32_t tag = 0,
                 Call call = {}) const;
  /// Sends and receives all messages at once, in any order, without deadlock. A send ends when its
  /// receiver has taken the message; one that is exchanged for others, when it is in the shared
  /// memory, unless it is large: then a message that its receiver refuses is an error of this
  /// rank's next call. `name`, a string literal, is shown in errors.
  Result exchange(const std::vector<Message>& messages, Call call = {},
                  const char* name = "exchange") const;

 protected:
  friend class Group;
  explicit Calls(std::shared_ptr<detail::GroupState> state);
  std::shared_ptr<detail::GroupState> state_;
};
extern template class Calls<void>;
extern template class Calls<Request>;

class Group : public Calls<void> {
 public:
  /// Makes the group of `size` processes of this host. Collective: each calls it with its own rank,
  /// the same options, and a directory that all reach. Throws SetupError on all ranks that came.
  static Group meet(int rank, int size, const Directory& directory, const Options& options);
  /// The ranks are threads of this process: element r is rank r's.
  static std::vector<Group> threads(int size, const Options& options);

  /// The same calls, which return at once: `group.started().barrier()` is a Request.
  Calls<Request> started() const;

  /// Ends the calls of all ranks: pending and later calls of all ranks throw PeerLostError
  /// with this reason. From any thread, also while another waits.
  void abort(const std::string& reason);
  /// Aborts in this process alone: the other ranks are not told.
  void interrupt(const std::string& reason);

  /// A background thread calls it, which advances started calls: it advances calls in progress, or
  /// sleeps until there is something to do, at most `nap`. Also detects ranks that are gone and
  /// limits that have passed. Returns false once no call is in progress.
  bool drive(std::chrono::milliseconds nap);
  /// True if a call is in progress that no thread waits for.
  bool neglected();
  /// Ends a sleep of drive().
  void nudge();

  /// This rank's arena: of size 0 unless Options::arena_bytes is set.
  Arena& arena();
  /// One more arena of `bytes` on each rank, in which calls of this group work in place as in
  /// arena(); it lives as long as what is returned. Collective: the same `bytes`, of which each
  /// rank claims its own at once, on the NUMA node of the calling thread. The ranks meet as for the
  /// group, which takes some milliseconds. Throws InvalidArgument (no bytes), and as meet() and
  /// barrier().
  std::shared_ptr<Arena> share(std::size_t bytes, const Directory& directory, Call call = {});

  /// How calls of this group travel, and why, for reports.
  struct Description {
    int ranks = 0;
    std::size_t shared_bytes = 0, slot_bytes = 0, frame_bytes = 0, arena_bytes = 0;
    /// All-reduces of up to this many bytes take one step.
    std::size_t once_bytes = 0;
    /// Large messages are copied out of the sender's memory. False if the kernel forbids it
    /// (ptrace_scope, other capabilities) or Options do.
    bool single_copy = false;
    /// There are fewer cores than ranks: a wait yields its core soon.
    bool crowded = false;
    /// How this rank writes what one other reads: found fastest when the group was made, or chosen
    /// by Options.
    Stores stores = Stores::cached;
    /// The code that reduces: "avx2", "baseline".
    std::string vector_unit;
  };
  Description describe() const;

 private:
  using Calls<void>::Calls;
};

/// One line per fact.
std::string to_string(const Group::Description& description);

}  // namespace tessera::shm
