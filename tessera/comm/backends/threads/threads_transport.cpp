#include "tessera/comm/backends/threads/threads_transport.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <string_view>
#include <tuple>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/flat.h"
#include "tessera/comm/backends/own_work.h"
#include "tessera/comm/group/detail/call_card.h"
#include "tessera/comm/group/detail/reduction.h"
#include "tessera/comm/group/types.h"

namespace tessera::detail {

// What one rank puts into a slot. Tensors are views: one for each rank where an operation has
// several, else one.
struct ThreadsCall {
  const char* operation = "";
  int root = -1;
  ReduceOp::Kind op = ReduceOp::Kind::sum;
  std::vector<at::Tensor> in, out;
  // Empty, or called when `out` has its values.
  std::function<void()> finish;
  CallSource source;
};

struct ThreadsSlot {
  std::vector<ThreadsCall> calls;
  std::vector<bool> arrived;
  int count = 0;
  bool done = false;
  std::exception_ptr error;
};

struct ThreadsMessage {
  at::Tensor tensor;
  bool done = false;
  std::exception_ptr error;
};

namespace {

using Tensors = std::vector<at::Tensor>;

Tensors pieces(const at::Tensor& tensor, const std::vector<std::int64_t>& counts) {
  return split_flat(flat(tensor), counts);
}

std::string describe(const ThreadsCall& call) {
  std::string text = call.operation;
  if (!call.source.name.empty()) text += concat(" '", call.source.name, "'");
  if (call.root >= 0) text += concat(", root ", call.root);
  for (const auto* side : {&call.in, &call.out}) {
    if (side->empty()) continue;
    text += side == &call.in ? ", in" : ", out";
    for (const auto& t : *side) text += concat(' ', c10::toString(t.scalar_type()), t.sizes());
  }
  return text + call.source.text();
}

[[noreturn]] void mismatch(const ThreadsSlot& slot, int a, int b) {
  throw MismatchError(mismatch_text(
      {{a, "called " + describe(slot.calls[a])}, {b, "called " + describe(slot.calls[b])}},
      MismatchAt::before_data));
}

void require_same(const ThreadsSlot& slot, int a, const at::Tensor& x, int b, const at::Tensor& y) {
  if (x.scalar_type() != y.scalar_type() || x.numel() != y.numel()) mismatch(slot, a, b);
}

void move(const ThreadsSlot& slot, int from, const at::Tensor& source, int to,
          const at::Tensor& target) {
  require_same(slot, from, source, to, target);
  if (source.data_ptr() != target.data_ptr()) target.view({-1}).copy_(source.view({-1}));
}

void require_one_call(const ThreadsSlot& slot) {
  const auto& first = slot.calls.front();
  for (std::size_t r = 1; r < slot.calls.size(); ++r) {
    const auto& call = slot.calls[r];
    if (std::string_view(call.operation) != first.operation || call.root != first.root ||
        call.op != first.op || call.source.hash() != first.source.hash())
      mismatch(slot, 0, static_cast<int>(r));
  }
}

// Moves and computes all data of a call. First all checks, so that a call that fails touches no
// rank's data.
void move_all(const ThreadsSlot& slot) {
  require_one_call(slot);
  const int n = static_cast<int>(slot.calls.size());
  const auto& first = slot.calls.front();
  const std::string_view operation = first.operation;
  const at::AutoDispatchBelowADInplaceOrView guard;

  if (operation == "broadcast") {
    const auto& source = slot.calls[first.root].in[0];
    for (int r = 0; r < n; ++r) require_same(slot, first.root, source, r, slot.calls[r].in[0]);
    for (int r = 0; r < n; ++r)
      if (r != first.root) move(slot, first.root, source, r, slot.calls[r].in[0]);
  } else if (operation == "all_reduce" || operation == "reduce") {
    Tensors parts;
    for (int r = 0; r < n; ++r) {
      require_same(slot, 0, first.in[0], r, slot.calls[r].in[0]);
      parts.push_back(slot.calls[r].in[0].view({-1}));
    }
    const int root = std::max(first.root, 0);
    reduce_in_order(parts[root], parts, first.op);
    if (operation == "all_reduce")
      for (int r = 0; r < n; ++r)
        if (r != root) parts[r].copy_(parts[root]);
  } else if (operation == "reduce_scatter") {
    for (int r = 0; r < n; ++r)
      for (int from = 0; from < n; ++from)
        require_same(slot, from, slot.calls[from].in[r], r, slot.calls[r].out[0]);
    for (int r = 0; r < n; ++r) {
      Tensors parts;
      for (int from = 0; from < n; ++from) parts.push_back(slot.calls[from].in[r].view({-1}));
      reduce_in_order(slot.calls[r].out[0].view({-1}), parts, first.op);
    }
  } else {  // from each rank that has inputs to each that has outputs; a barrier has neither
    for (const bool check : {true, false})
      for (int r = 0; r < n; ++r)
        for (int from = 0; from < n; ++from) {
          const auto &in = slot.calls[from].in, &out = slot.calls[r].out;
          if (in.empty() || out.empty()) continue;
          const auto &source = in[in.size() == 1 ? 0 : r],
                     &target = out[out.size() == 1 ? 0 : from];
          check ? require_same(slot, from, source, r, target) : move(slot, from, source, r, target);
        }
  }
}

// Performs the whole operation, for all ranks.
void execute(const ThreadsSlot& slot) {
  move_all(slot);
  const at::AutoDispatchBelowADInplaceOrView guard;
  for (const auto& call : slot.calls)
    if (call.finish) call.finish();
}

}  // namespace

class ThreadsRoom {
 public:
  ThreadsRoom(std::string name, std::vector<int> ranks)
      : name_(std::move(name)), ranks_(std::move(ranks)), left_(ranks_.size(), false) {}

  std::shared_ptr<ThreadsSlot> enter(std::uint64_t sequence, int rank, ThreadsCall call);
  // Sender, receiver and tag of messages that match in their order.
  using Pair = std::tuple<int, int, int>;
  std::shared_ptr<ThreadsMessage> post(const Pair& pair, const at::Tensor& tensor, bool is_send);
  // Records that this rank makes no more calls: ranks that wait for it fail.
  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    left_[rank] = true;
    changed_.notify_all();
  }
  // Makes waiting ranks look at their watch again.
  void wake() {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

  std::mutex& mutex() { return mutex_; }
  std::condition_variable& changed() { return changed_; }
  // Names the global ranks that have left without entering the slot. The caller holds the mutex.
  std::vector<int> left_without(const ThreadsSlot& slot) const {
    std::vector<int> ranks;
    for (std::size_t r = 0; r < ranks_.size(); ++r)
      if (left_[r] && !slot.arrived[r]) ranks.push_back(ranks_[r]);
    return ranks;
  }
  bool has_left(int rank) const { return left_[rank]; }
  int global(int rank) const { return ranks_[rank]; }

 private:
  struct Queue {
    std::deque<std::shared_ptr<ThreadsMessage>> sends, receives;
  };

  const std::string name_;
  const std::vector<int> ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, std::shared_ptr<ThreadsSlot>> slots_;
  std::map<Pair, Queue> queues_;
  std::vector<bool> left_;
};

std::shared_ptr<ThreadsSlot> ThreadsRoom::enter(std::uint64_t sequence, int rank,
                                                ThreadsCall call) {
  std::unique_lock lock(mutex_);
  auto& entry = slots_[sequence];
  if (!entry) {
    entry = std::make_shared<ThreadsSlot>();
    entry->calls.resize(ranks_.size());
    entry->arrived.resize(ranks_.size(), false);
  }
  auto slot = entry;
  slot->calls[rank] = std::move(call);
  slot->arrived[rank] = true;
  if (++slot->count < static_cast<int>(ranks_.size())) return slot;
  slots_.erase(sequence);
  lock.unlock();  // all ranks have arrived: no other thread touches the slot until it is done
  std::exception_ptr error;
  try {
    execute(*slot);
  } catch (...) {
    error = std::current_exception();
  }
  // Not under the lock: to let a tensor go may take an interpreter's.
  slot->calls.clear();
  lock.lock();
  slot->error = error;
  slot->done = true;
  changed_.notify_all();
  return slot;
}

std::shared_ptr<ThreadsMessage> ThreadsRoom::post(const Pair& pair, const at::Tensor& tensor,
                                                  bool is_send) {
  std::unique_lock lock(mutex_);
  auto& queue = queues_[pair];
  auto mine = std::make_shared<ThreadsMessage>();
  mine->tensor = tensor;
  auto& waiting = is_send ? queue.receives : queue.sends;
  if (waiting.empty()) {
    (is_send ? queue.sends : queue.receives).push_back(mine);
    return mine;
  }
  auto other = waiting.front();
  waiting.pop_front();
  // compared messages have tags of their own
  if (queue.sends.empty() && queue.receives.empty()) queues_.erase(pair);
  lock.unlock();
  const auto &source = is_send ? mine->tensor : other->tensor,
             &target = is_send ? other->tensor : mine->tensor;
  std::exception_ptr error;
  try {
    if (source.scalar_type() != target.scalar_type() || source.numel() != target.numel()) {
      const auto [from, to, tag] = pair;
      throw MismatchError("message from rank ", from, " to rank ", to, " of group '", name_,
                          "': sent ", c10::toString(source.scalar_type()), source.sizes(),
                          ", but the receiver waits for ", c10::toString(target.scalar_type()),
                          target.sizes());
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    target.view({-1}).copy_(source.view({-1}));
  } catch (...) {
    error = std::current_exception();
  }
  // Not under the lock: to let a tensor go may take an interpreter's.
  for (const auto& message : {mine, other}) message->tensor = at::Tensor();
  lock.lock();
  for (const auto& message : {mine, other}) {
    message->error = error;
    message->done = true;
  }
  changed_.notify_all();
  return mine;
}

namespace {

// Work on a slot or on messages. Waiting looks at the watch, so that a poisoned group wakes all
// ranks.
class ThreadsWork final : public OwnWork {
 public:
  ThreadsWork(std::shared_ptr<ThreadsRoom> room, std::shared_ptr<GroupWatch> watch, int rank,
              std::chrono::milliseconds limit, c10d::OpType type, Tensors results)
      : OwnWork(rank, type, std::move(results)),
        room_(std::move(room)),
        watch_(std::move(watch)),
        limit_(limit) {}

  void set(std::shared_ptr<ThreadsSlot> slot) { slot_ = std::move(slot); }
  void add(std::shared_ptr<ThreadsMessage> message, int peer) {
    messages_.emplace_back(std::move(message), peer);
  }

  bool isCompleted() override {
    const std::lock_guard lock(room_->mutex());
    return failed_ || ready();
  }
  bool isSuccess() const override {
    const std::lock_guard lock(room_->mutex());
    return !failed_ && ready() && !error();
  }
  std::exception_ptr exception() const override {
    const std::lock_guard lock(room_->mutex());
    return failed_ ? failed_ : error();
  }

  // False: the time is over, and the work continues.
  bool wait(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(room_->mutex());
    const auto limit = timeout == kNoTimeout ? limit_ : timeout;
    const bool woken = room_->changed().wait_until(lock, deadline_after(limit), [this] {
      return failed_ || ready() || watch_->poison() || !gone().empty();
    });
    if (failed_) std::rethrow_exception(failed_);
    if (ready()) {
      if (error()) std::rethrow_exception(error());
      return true;
    }
    if (!woken) {
      if (timeout == kNoTimeout)
        throw std::runtime_error("threads: a call ran into its limit of " +
                                 std::to_string(limit.count()) + " ms");
      return false;
    }
    if (!watch_->poison()) {
      auto ranks = gone();
      auto reason = concat(ranks.size() > 1 ? "ranks " : "rank ", list(ranks),
                           " ended without making this call");
      lock.unlock();
      watch_->set_poison({std::move(ranks), std::move(reason)});
      lock.lock();
    }
    failed_ = std::make_exception_ptr(std::runtime_error(watch_->poison()->reason));
    std::rethrow_exception(failed_);
  }

  // Complete as soon as it is asked for: c10d's own users of futures chain to them at once, so the
  // work is waited for here.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    try {
      future->markCompleted(c10::IValue(result()));
    } catch (...) {
      future->setError(std::current_exception());
    }
    return future;
  }

 private:
  bool ready() const {
    if (slot_) return slot_->done;
    return std::ranges::all_of(messages_, [](const auto& m) { return m.first->done; });
  }
  std::exception_ptr error() const {
    if (slot_) return slot_->error;
    for (const auto& [message, peer] : messages_)
      if (message->error) return message->error;
    return nullptr;
  }
  std::vector<int> gone() const {
    if (slot_) return room_->left_without(*slot_);
    std::vector<int> ranks;
    for (const auto& [message, peer] : messages_)
      if (const int rank = room_->global(peer);
          !message->done && room_->has_left(peer) && std::ranges::find(ranks, rank) == ranks.end())
        ranks.push_back(rank);
    return ranks;
  }

  std::shared_ptr<ThreadsRoom> room_;
  std::shared_ptr<GroupWatch> watch_;
  std::chrono::milliseconds limit_;
  std::shared_ptr<ThreadsSlot> slot_;
  std::vector<std::pair<std::shared_ptr<ThreadsMessage>, int>> messages_;
  std::exception_ptr failed_;
};

class ThreadsTransport final : public Transport {
 public:
  ThreadsTransport(std::shared_ptr<ThreadsRoom> room, int rank, int size,
                   std::shared_ptr<GroupWatch> watch, std::chrono::milliseconds timeout)
      : Transport(rank, size, timeout), room_(std::move(room)), watch_(std::move(watch)) {}
  ~ThreadsTransport() override { room_->leave(rank_); }

  const char* name() const override { return "threads"; }
  Abilities abilities() override {
    Abilities result;  // signs no calls: a slot compares them
    result.reduces = reduces_in_order;
    result.moves = moves_every_dtype;
    return result;
  }
  void broadcast(TransportCall& call) override { enter("broadcast", call, {call.output}, {}); }
  void all_reduce(TransportCall& call) override { enter("all_reduce", call, {call.output}, {}); }
  void reduce(TransportCall& call) override { enter("reduce", call, {call.output}, {}); }
  void all_gather(TransportCall& call) override {
    enter("all_gather", call, {call.input}, pieces(call.output, call.counts));
  }
  void reduce_scatter(TransportCall& call) override {
    enter("reduce_scatter", call, pieces(call.input, call.counts), {call.output});
  }
  void gather(TransportCall& call) override {
    enter("gather", call, {call.input},
          call.root == rank_ ? pieces(call.output, call.counts) : Tensors{});
  }
  void scatter(TransportCall& call) override {
    enter("scatter", call, call.root == rank_ ? pieces(call.input, call.counts) : Tensors{},
          {call.output});
  }
  void all_to_all(TransportCall& call) override {
    enter("all_to_all", call, pieces(call.input, call.input_counts),
          pieces(call.output, call.counts));
  }
  void exchange(TransportCall& call) override;
  void barrier(TransportCall& call) override { enter("barrier", call, {}, {}); }
  void abort() override { room_->wake(); }
  void shutdown() override { room_->leave(rank_); }

 private:
  // Puts a call into the next slot, with its tensors as a slot has them.
  void enter(const char* operation, TransportCall& call, Tensors in, Tensors out);

  const std::shared_ptr<ThreadsRoom> room_;
  const std::shared_ptr<GroupWatch> watch_;
  std::atomic<std::uint64_t> slots_{0};
};

void ThreadsTransport::enter(const char* operation, TransportCall& call, Tensors in, Tensors out) {
  const auto work =
      c10::make_intrusive<ThreadsWork>(room_, watch_, rank_, call.timeout, call.type, call.results);
  work->set(room_->enter(slots_++, rank_,
                         {operation, call.root, call.op.kind, std::move(in), std::move(out),
                          std::move(call.finish), call.source ? *call.source : CallSource()}));
  call.works.push_back({work});
}

void ThreadsTransport::exchange(TransportCall& call) {
  auto work =
      c10::make_intrusive<ThreadsWork>(room_, watch_, rank_, call.timeout, call.type, call.results);
  for (const auto& m : call.messages) {
    if (m.peer == TransportCall::kAnyRank)
      throw NotAvailable("ranks as threads receive from a rank that is named");
    const bool sends = m.kind == Message::Kind::send;
    work->add(
        room_->post({sends ? rank_ : m.peer, sends ? m.peer : rank_, call.tag}, m.tensor, sends),
        m.peer);
  }
  call.works.push_back({std::move(work)});
}

}  // namespace

std::shared_ptr<ThreadsRoom> make_threads_room(std::string name, std::vector<int> ranks) {
  return std::make_shared<ThreadsRoom>(std::move(name), std::move(ranks));
}

std::shared_ptr<Transport> make_threads_transport(std::shared_ptr<ThreadsRoom> room, int rank,
                                                  int size, std::shared_ptr<GroupWatch> watch,
                                                  std::chrono::milliseconds timeout) {
  return std::make_shared<ThreadsTransport>(std::move(room), rank, size, std::move(watch), timeout);
}

}  // namespace tessera::detail
