#include "tessera/comm/backends/threads/threads_backend.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <string_view>

#include "tessera/base/deadline.h"
#include "tessera/base/host_lock.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/detail/backend_calls.h"
#include "tessera/comm/group/detail/mismatch.h"
#include "tessera/comm/group/detail/reduction.h"
#include "tessera/comm/group/types.h"

namespace tessera::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

Tensors pieces(const at::Tensor& tensor, const std::vector<std::int64_t>& counts) {
  return split_flat(tensor.view({-1}), counts);
}

Tensors equal_pieces(const at::Tensor& tensor, int parts) {
  TORCH_CHECK(tensor.numel() % parts == 0, "threads: a tensor of ", tensor.numel(),
              " elements cannot be divided evenly among ", parts, " ranks");
  return pieces(tensor, std::vector<std::int64_t>(parts, tensor.numel() / parts));
}

std::vector<std::int64_t> elements(const std::vector<std::int64_t>& rows, const at::Tensor& whole) {
  std::int64_t width = 1;
  for (std::int64_t d = 1; d < whole.dim(); ++d) width *= whole.size(d);
  std::vector<std::int64_t> counts;
  for (const auto n : rows) counts.push_back(n * width);
  return counts;
}

Tensors row_pieces(const at::Tensor& tensor, const std::vector<std::int64_t>& rows, int parts) {
  return rows.empty() ? equal_pieces(tensor, parts) : pieces(tensor, elements(rows, tensor));
}

ReduceOp::Kind kind(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::Kind::sum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::Kind::avg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::Kind::product;
    case c10d::ReduceOp::MIN:
      return ReduceOp::Kind::min;
    case c10d::ReduceOp::MAX:
      return ReduceOp::Kind::max;
    default:
      TORCH_CHECK(false, "threads: only sum, avg, product, min and max are there");
  }
}

std::string describe(const ThreadsCall& call) {
  std::string text = call.operation;
  if (call.root >= 0) text += concat(", root ", call.root);
  for (const auto* side : {&call.in, &call.out}) {
    if (side->empty()) continue;
    text += side == &call.in ? ", in" : ", out";
    for (const auto& t : *side) text += concat(' ', c10::toString(t.scalar_type()), t.sizes());
  }
  return text;
}

[[noreturn]] void mismatch(const ThreadsSlot& slot, int a, int b) {
  throw MismatchError(mismatch_text({a, "called " + describe(slot.calls[a])},
                                    {b, "called " + describe(slot.calls[b])},
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

// Performs the whole operation, for all ranks. First all checks, so that a call that fails touches
// no rank's data.
void execute(const ThreadsSlot& slot) {
  const int n = static_cast<int>(slot.calls.size());
  const auto& first = slot.calls.front();
  for (int r = 1; r < n; ++r) {
    const auto& call = slot.calls[r];
    if (std::string_view(call.operation) != first.operation || call.root != first.root ||
        call.op != first.op)
      mismatch(slot, 0, r);
  }
  const std::string_view operation = first.operation;
  const at::AutoDispatchBelowADInplaceOrView guard;

  if (operation == "broadcast") {
    const auto& source = slot.calls[first.root].in[0];
    for (int r = 0; r < n; ++r) require_same(slot, first.root, source, r, slot.calls[r].in[0]);
    for (int r = 0; r < n; ++r)
      if (r != first.root) move(slot, first.root, source, r, slot.calls[r].in[0]);
  } else if (operation == "all_reduce" || operation == "reduce") {
    for (std::size_t i = 0; i < first.in.size(); ++i) {
      Tensors parts;
      for (int r = 0; r < n; ++r) {
        if (slot.calls[r].in.size() != first.in.size()) mismatch(slot, 0, r);
        require_same(slot, 0, first.in[i], r, slot.calls[r].in[i]);
        parts.push_back(slot.calls[r].in[i].view({-1}));
      }
      const int root = std::max(first.root, 0);
      reduce_in_order(parts[root], parts, first.op);
      if (operation == "all_reduce")
        for (int r = 0; r < n; ++r)
          if (r != root) parts[r].copy_(parts[root]);
    }
  } else if (operation == "all_gather" || operation == "gather") {
    for (const bool check : {true, false})
      for (int r = 0; r < n; ++r) {
        if (first.root >= 0 && r != first.root) continue;
        for (int from = 0; from < n; ++from) {
          const auto &source = slot.calls[from].in[0], &target = slot.calls[r].out[from];
          check ? require_same(slot, from, source, r, target) : move(slot, from, source, r, target);
        }
      }
  } else if (operation == "scatter") {
    for (const bool check : {true, false})
      for (int r = 0; r < n; ++r) {
        const auto &source = slot.calls[first.root].in[r], &target = slot.calls[r].out[0];
        check ? require_same(slot, first.root, source, r, target)
              : move(slot, first.root, source, r, target);
      }
  } else if (operation == "reduce_scatter") {
    for (int r = 0; r < n; ++r)
      for (int from = 0; from < n; ++from)
        require_same(slot, from, slot.calls[from].in[r], r, slot.calls[r].out[0]);
    for (int r = 0; r < n; ++r) {
      Tensors parts;
      for (int from = 0; from < n; ++from) parts.push_back(slot.calls[from].in[r].view({-1}));
      reduce_in_order(slot.calls[r].out[0].view({-1}), parts, first.op);
    }
  } else if (operation == "all_to_all") {
    for (const bool check : {true, false})
      for (int r = 0; r < n; ++r)
        for (int from = 0; from < n; ++from) {
          const auto &source = slot.calls[from].in[r], &target = slot.calls[r].out[from];
          check ? require_same(slot, from, source, r, target) : move(slot, from, source, r, target);
        }
  }
}

// Work on a slot or on messages. Waiting looks at the watch, so that a poisoned group wakes all
// ranks.
class ThreadsWork : public c10d::Work {
 public:
  ThreadsWork(std::shared_ptr<ThreadsRoom> room, std::shared_ptr<GroupWatch> watch, int rank,
              std::chrono::milliseconds limit)
      : c10d::Work(rank), room_(std::move(room)), watch_(std::move(watch)), limit_(limit) {}

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
      {
        const WithoutHostLock released;  // c10d's Python asks with the lock
        wait(kNoTimeout);
      }
      future->markCompleted(c10::IValue(results_));
    } catch (...) {
      future->setError(std::current_exception());
    }
    return future;
  }
  Tensors result() override { return results_; }
  void set_results(Tensors results) { results_ = std::move(results); }

 private:
  bool ready() const {
    if (slot_) return slot_->done;
    return std::all_of(messages_.begin(), messages_.end(),
                       [](const auto& m) { return m.first->done; });
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
      if (!message->done && room_->has_left(peer)) ranks.push_back(room_->global(peer));
    return ranks;
  }

  std::shared_ptr<ThreadsRoom> room_;
  std::shared_ptr<GroupWatch> watch_;
  std::chrono::milliseconds limit_;
  std::shared_ptr<ThreadsSlot> slot_;
  std::vector<std::pair<std::shared_ptr<ThreadsMessage>, int>> messages_;
  std::exception_ptr failed_;
  Tensors results_;
};

}  // namespace

// ---- room ----

ThreadsRoom::ThreadsRoom(std::string name, std::vector<int> ranks)
    : name_(std::move(name)), ranks_(std::move(ranks)), left_(ranks_.size(), false) {}

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
      throw MismatchError(concat("message from rank ", from, " to rank ", to, " of group '", name_,
                                 "': sent ", c10::toString(source.scalar_type()), source.sizes(),
                                 ", but the receiver waits for ",
                                 c10::toString(target.scalar_type()), target.sizes()));
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

std::shared_ptr<ThreadsMessage> ThreadsRoom::send(int from, int to, int tag,
                                                  const at::Tensor& tensor) {
  return post({from, to, tag}, tensor, true);
}

std::shared_ptr<ThreadsMessage> ThreadsRoom::receive(int from, int to, int tag,
                                                     const at::Tensor& tensor) {
  return post({from, to, tag}, tensor, false);
}

void ThreadsRoom::leave(int rank) {
  const std::lock_guard lock(mutex_);
  left_[rank] = true;
  changed_.notify_all();
}

void ThreadsRoom::wake() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

std::vector<int> ThreadsRoom::left_without(const ThreadsSlot& slot) const {
  std::vector<int> ranks;
  for (std::size_t r = 0; r < ranks_.size(); ++r)
    if (left_[r] && !slot.arrived[r]) ranks.push_back(ranks_[r]);
  return ranks;
}

// ---- backend ----

ThreadsBackend::ThreadsBackend(std::shared_ptr<ThreadsRoom> room, int rank, int size,
                               std::shared_ptr<GroupWatch> watch, std::chrono::milliseconds timeout)
    : c10d::Backend(rank, size),
      room_(std::move(room)),
      watch_(std::move(watch)),
      timeout_(timeout) {
  init();
}

ThreadsBackend::~ThreadsBackend() { room_->leave(rank_); }

bool ThreadsBackend::reduces(c10::ScalarType, ReduceOp::Kind op) const {
  return op != ReduceOp::Kind::premultiplied;
}

void ThreadsBackend::abort() { room_->wake(); }

void ThreadsBackend::shutdown() { room_->leave(rank_); }

ThreadsBackend::WorkPointer ThreadsBackend::enter(ThreadsCall call,
                                                  std::chrono::milliseconds timeout) {
  auto work = c10::make_intrusive<ThreadsWork>(room_, watch_, rank_,
                                               timeout.count() > 0 ? timeout : timeout_);
  work->set_results(call.out.empty() ? call.in : call.out);
  work->set(room_->enter(next_++, rank_, std::move(call)));
  return work;
}

ThreadsBackend::WorkPointer ThreadsBackend::broadcast(Tensors& tensors,
                                                      const c10d::BroadcastOptions& options) {
  return enter({"broadcast", static_cast<int>(options.rootRank), {}, {tensors.at(0)}, {}},
               options.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::allreduce(Tensors& tensors,
                                                      const c10d::AllreduceOptions& options) {
  return enter({"all_reduce", -1, kind(options.reduceOp), tensors, {}}, options.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

ThreadsBackend::WorkPointer ThreadsBackend::reduce(Tensors& tensors,
                                                   const c10d::ReduceOptions& options) {
  return enter(
      {"reduce", static_cast<int>(options.rootRank), kind(options.reduceOp), {tensors.at(0)}, {}},
      options.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::allgather(std::vector<Tensors>& outputs,
                                                      Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) {
  return enter({"all_gather", -1, {}, {inputs.at(0)}, outputs.at(0)}, options.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& options) {
  return enter({"all_gather", -1, {}, {input}, equal_pieces(output, size_)}, options.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                   const c10d::GatherOptions& options) {
  return enter({"gather",
                static_cast<int>(options.rootRank),
                {},
                {inputs.at(0)},
                options.rootRank == rank_ ? outputs.at(0) : Tensors{}},
               options.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                    const c10d::ScatterOptions& options) {
  return enter({"scatter",
                static_cast<int>(options.rootRank),
                {},
                options.rootRank == rank_ ? inputs.at(0) : Tensors{},
                {outputs.at(0)}},
               options.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  return enter({"reduce_scatter", -1, kind(options.reduceOp), inputs.at(0), {outputs.at(0)}},
               options.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return enter({"reduce_scatter", -1, kind(options.reduceOp), equal_pieces(input, size_), {output}},
               options.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                          std::vector<std::int64_t>& output_sizes,
                                                          std::vector<std::int64_t>& input_sizes,
                                                          const c10d::AllToAllOptions& options) {
  return enter({"all_to_all",
                -1,
                {},
                row_pieces(input, input_sizes, size_),
                row_pieces(output, output_sizes, size_)},
               options.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllToAllOptions& options) {
  return enter({"all_to_all", -1, {}, inputs, outputs}, options.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::barrier(const c10d::BarrierOptions& options) {
  return enter({"barrier", -1, {}, {}, {}}, options.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::send(Tensors& tensors, int to, int tag) {
  auto work = c10::make_intrusive<ThreadsWork>(room_, watch_, rank_, timeout_);
  work->add(room_->send(rank_, to, tag, tensors.at(0)), to);
  return work;
}

ThreadsBackend::WorkPointer ThreadsBackend::recv(Tensors& tensors, int from, int tag) {
  auto work = c10::make_intrusive<ThreadsWork>(room_, watch_, rank_, timeout_);
  work->set_results(tensors);
  work->add(room_->receive(from, rank_, tag, tensors.at(0)), from);
  return work;
}

ThreadsBackend::WorkPointer ThreadsBackend::all_gather_v(const at::Tensor& output,
                                                         const at::Tensor& input,
                                                         const std::vector<std::int64_t>& sizes,
                                                         CallLimit limit) {
  return enter({"all_gather", -1, {}, {input}, row_pieces(output, sizes, size_)}, limit.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::reduce_scatter_v(const at::Tensor& output,
                                                             const at::Tensor& input,
                                                             const std::vector<std::int64_t>& sizes,
                                                             const c10d::ReduceOp& op,
                                                             CallLimit limit) {
  return enter({"reduce_scatter", -1, kind(op), row_pieces(input, sizes, size_), {output}},
               limit.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::gather_v(const at::Tensor& output,
                                                     const at::Tensor& input,
                                                     const std::vector<std::int64_t>& sizes,
                                                     int root, CallLimit limit) {
  return enter(
      {"gather", root, {}, {input}, root == rank_ ? row_pieces(output, sizes, size_) : Tensors{}},
      limit.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::scatter_v(const at::Tensor& output,
                                                      const at::Tensor& input,
                                                      const std::vector<std::int64_t>& sizes,
                                                      int root, CallLimit limit) {
  return enter(
      {"scatter", root, {}, root == rank_ ? row_pieces(input, sizes, size_) : Tensors{}, {output}},
      limit.timeout);
}

ThreadsBackend::WorkPointer ThreadsBackend::exchange(const std::vector<Message>& messages,
                                                     CallLimit limit) {
  auto work = c10::make_intrusive<ThreadsWork>(
      room_, watch_, rank_, limit.timeout.count() > 0 ? limit.timeout : timeout_);
  for (const auto& m : messages) {
    work->add(m.kind == Message::Kind::send ? room_->send(rank_, m.peer, 0, m.tensor)
                                            : room_->receive(m.peer, rank_, 0, m.tensor),
              m.peer);
  }
  return work;
}

}  // namespace tessera::detail
