#pragma once
// Ranks of one host that communicate through memory, on bytes and element types; no libtorch.
//
//   shm::Group group = shm::Group::meet(rank, 4, directory, {.name = "world"});  // all 4 call
//   group.all_reduce(values, values, 100, shm::Element::float32, {});             // in place
//   shm::Request r = group.start_all_reduce(a, a, n, shm::Element::float64, {});
//   while (computing) r.test();                                                    // moves it on
//   r.wait();
//
// All calls but send, receive and exchange are collective: all ranks make them, in the same order
// and with the same sizes. Results have the same bits on all ranks and in every run.
//
// Progress. There is no thread behind it: a started call moves on while this rank starts, tests or
// waits for any call of the group, or in drive(). What fits into a slot is published when it is
// started, so that the others need not wait for this rank's next call.
//
// Errors. A call that fails ends the group: its other calls, and those of the other ranks, fail
// too, and say why. Throws InvalidArgument before anything is done; TimeoutError, PeerLostError and
// MismatchError (types.h) from wherever it is waited.
//
// A Group may be used by several threads. Calls of several threads are in some order, and the
// caller sees to it that this is the same on all ranks.

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "tessera/shm/arena.h"
#include "tessera/shm/meeting.h"
#include "tessera/shm/types.h"

namespace tessera::shm {

namespace detail {
class Batch;
class Core;
class Op;
}  // namespace detail

/// Options of one call.
struct Call {
  /// 0: the group's own limit.
  std::chrono::milliseconds timeout{0};
  /// Of a collective: what else must be the same on all ranks. A rank that gave another number gets
  /// a MismatchError instead of data, but for one number in 65536.
  std::uint64_t sign = 0;
};

/// A call under way. Its memory must not be touched before it is complete. Destroying a request
/// that was not waited for waits.
class Request {
 public:
  /// Already complete.
  Request();
  Request(std::shared_ptr<detail::Core> core, std::unique_ptr<detail::Op> op,
          std::chrono::milliseconds limit);
  Request(Request&&) noexcept;
  Request& operator=(Request&&) noexcept;
  ~Request();

  /// Moves the group's calls on; true once this one is complete. Throws what ended it.
  bool test();
  /// Blocks until complete, for the call's own limit.
  void wait();
  void wait(std::chrono::milliseconds limit);
  /// Of a receive from any rank, once complete: the rank it came from; -1 for other calls.
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
  /// A rank of the group, this one included; kAnySource for a receive from whoever sends.
  int peer = 0;
  std::uint32_t tag = 0;
  /// What the bytes are; a message whose ends say different things is a MismatchError on both.
  std::uint8_t type = 0;
};

class Group {
 public:
  /// The group of `size` processes of this host. Collective: each calls it with its own rank, the
  /// same options, and a directory that all reach. Throws SetupError on all ranks that came.
  static Group meet(int rank, int size, const Directory& directory, const Options& options);
  /// The same for ranks that are threads of this process: element r is rank r's.
  static std::vector<Group> threads(int size, const Options& options);

  int rank() const;
  int size() const;

  /// `name`, a string literal, is what errors call it.
  void barrier(Call call = {}, const char* name = "barrier");
  void broadcast(void* data, std::size_t bytes, int root, Call call = {});
  /// `output` may be `input`, and is disjoint from it otherwise.
  void all_reduce(const void* input, void* output, std::size_t count, Element element,
                  Reduction reduction, Call call = {});
  /// `output` is written on `root` alone and may be null elsewhere.
  void reduce(const void* input, void* output, std::size_t count, Element element,
              Reduction reduction, int root, Call call = {});
  /// Sizes are bytes, one number a rank, the same on all ranks. `input` may be this rank's place in
  /// `output`.
  void all_gather(const void* input, void* output, const std::vector<std::size_t>& sizes,
                  Call call = {});
  /// `output` is used on `root` alone.
  void gather(const void* input, void* output, const std::vector<std::size_t>& sizes, int root,
              Call call = {});
  /// `input` is used on `root` alone.
  void scatter(const void* input, void* output, const std::vector<std::size_t>& sizes, int root,
               Call call = {});
  /// `input` holds the elements of all ranks, `counts` of them for each; `output` this rank's.
  void reduce_scatter(const void* input, void* output, const std::vector<std::size_t>& counts,
                      Element element, Reduction reduction, Call call = {});
  /// The same with equal sizes for all.
  void all_gather(const void* input, void* output, std::size_t bytes_each, Call call = {});
  void reduce_scatter(const void* input, void* output, std::size_t count_each, Element element,
                      Reduction reduction, Call call = {});
  /// Sizes are this rank's own: bytes to, and from, each rank, that lie one after the other.
  void all_to_all(const void* input, const std::vector<std::size_t>& input_sizes, void* output,
                  const std::vector<std::size_t>& output_sizes, Call call = {});
  void send(const void* data, std::size_t bytes, int to, std::uint32_t tag = 0, Call call = {});
  void receive(void* data, std::size_t bytes, int from, std::uint32_t tag = 0, Call call = {});
  /// All at once, in any order, without deadlock. A send, here and above, ends when its receiver
  /// has taken the message. `name`, a string literal, is what errors call it.
  void exchange(const std::vector<Message>& messages, Call call = {},
                const char* name = "exchange");

  [[nodiscard]] Request start_barrier(Call call = {}, const char* name = "barrier");
  [[nodiscard]] Request start_broadcast(void* data, std::size_t bytes, int root, Call call = {});
  [[nodiscard]] Request start_all_reduce(const void* input, void* output, std::size_t count,
                                         Element element, Reduction reduction, Call call = {});
  [[nodiscard]] Request start_reduce(const void* input, void* output, std::size_t count,
                                     Element element, Reduction reduction, int root,
                                     Call call = {});
  [[nodiscard]] Request start_all_gather(const void* input, void* output,
                                         const std::vector<std::size_t>& sizes, Call call = {});
  [[nodiscard]] Request start_gather(const void* input, void* output,
                                     const std::vector<std::size_t>& sizes, int root,
                                     Call call = {});
  [[nodiscard]] Request start_scatter(const void* input, void* output,
                                      const std::vector<std::size_t>& sizes, int root,
                                      Call call = {});
  [[nodiscard]] Request start_reduce_scatter(const void* input, void* output,
                                             const std::vector<std::size_t>& counts,
                                             Element element, Reduction reduction, Call call = {});
  [[nodiscard]] Request start_all_to_all(const void* input,
                                         const std::vector<std::size_t>& input_sizes, void* output,
                                         const std::vector<std::size_t>& output_sizes,
                                         Call call = {});
  [[nodiscard]] Request start_send(const void* data, std::size_t bytes, int to,
                                   std::uint32_t tag = 0, Call call = {});
  [[nodiscard]] Request start_receive(void* data, std::size_t bytes, int from,
                                      std::uint32_t tag = 0, Call call = {});
  [[nodiscard]] Request start_exchange(const std::vector<Message>& messages, Call call = {},
                                       const char* name = "exchange");

  /// Ends the work of the whole group: pending and later calls of all ranks throw PeerLostError
  /// with this reason. From any thread, also while another waits.
  void abort(const std::string& reason);
  /// The same in this process alone: the other ranks are not told.
  void interrupt(const std::string& reason);

  /// For a thread that moves started calls on while nobody waits for them: goes on with what is
  /// under way, or sleeps until there is something to do, `nap` at most. Also notices ranks that
  /// are gone and limits that have passed. False once nothing is under way.
  bool drive(std::chrono::milliseconds nap);
  /// Whether a call is under way for which no thread waits.
  bool neglected();
  /// Ends a sleep of drive().
  void nudge();

  /// This rank's arena: of no size unless Options gave one.
  Arena& arena();

  /// How calls of this group travel, and why: for reports.
  struct Description {
    int ranks = 0;
    std::size_t shared_bytes = 0, slot_bytes = 0, frame_bytes = 0, arena_bytes = 0;
    /// All-reduces up to this many bytes are one step.
    std::size_t once_bytes = 0;
    /// Large messages are copied out of the sender's memory. If not: the kernel forbids it
    /// (ptrace_scope, other capabilities), or Options do.
    bool single_copy = false;
    /// There are fewer cores than ranks: waits give theirs away soon.
    bool crowded = false;
    /// Which code reduces: "avx2", "baseline".
    std::string vector_unit;
  };
  Description describe() const;

 private:
  struct State;
  explicit Group(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

/// One line a fact.
std::string to_string(const Group::Description& description);

}  // namespace tessera::shm
