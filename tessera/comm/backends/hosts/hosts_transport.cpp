#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/ParallelGuard.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/comm/backends/flat.h"
#include "tessera/comm/backends/hosts/host_links.h"
#include "tessera/comm/backends/own_work.h"

namespace tessera::detail {
namespace {

// Calls that were aborted usually end within this time.
constexpr std::chrono::milliseconds kCallsEnd{1000};
// The limits of the steps begin later than that of the call, which is the one that counts: its
// error names the ranks that are missing.
constexpr std::chrono::milliseconds kStepSlack{2000};

// A collective over several hosts, done step by step in a thread of its group.
class HostsWork : public OwnWork {
 public:
  HostsWork(int rank, c10d::OpType type, std::vector<at::Tensor> results,
            std::function<void()> body)
      : OwnWork(rank, type, std::move(results)), body_(std::move(body)) {}

  // Does the call. What it throws, wait() throws. Leaves the future to the caller.
  void run() {
    std::exception_ptr error;
    try {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      // Operators on this thread do not take the cores of the computation that goes on beside it.
      const c10::ParallelGuard alone(true);
      body_();
    } catch (...) {
      error = std::current_exception();
    }
    body_ = nullptr;
    finish(error);
  }

 private:
  std::function<void()> body_;
};

// Does the collectives of one group in the order in which they were made, in a thread that begins
// with the first of them.
class HostsWorker : public std::enable_shared_from_this<HostsWorker> {
 public:
  void post(const c10::intrusive_ptr<HostsWork>& work) {
    {
      const std::lock_guard lock(mutex_);
      // First: where no thread can be started, the call was not made.
      if (!thread_.joinable() && !stops_)
        thread_ = std::thread([self = shared_from_this()] { self->run(); });
      queue_.push_back(work);
    }
    changed_.notify_one();
  }

  // Ends the thread after the calls that were made. `leave`: does not wait for it long, since its
  // call may be in a wait that nothing but a time limit ends.
  void close(bool leave) {
    std::unique_lock lock(mutex_);
    stops_ = true;
    changed_.notify_all();
    if (!thread_.joinable()) return;
    auto thread = std::move(thread_);
    const bool left = leave && !changed_.wait_for(lock, kCallsEnd, [this] { return ended_; });
    lock.unlock();
    if (left)
      thread.detach();
    else
      thread.join();
    futures_->close(left);
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stops_ || !queue_.empty(); });
      if (queue_.empty()) break;
      auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work->run();
      futures_->settle(work);
      work.reset();
      lock.lock();
    }
    ended_ = true;
    changed_.notify_all();
  }

  const std::shared_ptr<FutureThreads> futures_ = std::make_shared<FutureThreads>();
  // guards all below
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<HostsWork>> queue_;
  bool stops_ = false, ended_ = false;
  std::thread thread_;
};

class HostsTransport final : public Transport {
 public:
  // `tells`: a call that fails here ends the calls of the other ranks; for groups without a watch.
  HostsTransport(std::shared_ptr<HostLinks> links, int rank, std::chrono::milliseconds timeout,
                 bool tells)
      : Transport(rank, links->map().size(), timeout), links_(std::move(links)), tells_(tells) {}
  ~HostsTransport() override { worker_->close(links_->aborted()); }

  const char* name() const override { return "hosts"; }
  Abilities abilities() override {
    Abilities result;  // each host's result is rounded, so the steps do what Gloo does exactly
    result.signs = result.ends_messages = true;
    return result;
  }
  void broadcast(TransportCall& call) override { post(call, &HostLinks::broadcast, true); }
  void all_reduce(TransportCall& call) override { post(call, &HostLinks::all_reduce); }
  void reduce(TransportCall& call) override { post(call, &HostLinks::reduce); }
  void all_gather(TransportCall& call) override { post(call, &HostLinks::all_gather, true); }
  void reduce_scatter(TransportCall& call) override { post(call, &HostLinks::reduce_scatter); }
  void gather(TransportCall& call) override { post(call, &HostLinks::gather, true); }
  void scatter(TransportCall& call) override { post(call, &HostLinks::scatter, true); }
  void all_to_all(TransportCall& call) override { post(call, &HostLinks::all_to_all, true); }
  // Throws NotAvailable for a receive from any rank where some ranks of the group share a host and
  // others do not.
  void exchange(TransportCall& call) override;
  void barrier(TransportCall& call) override { post(call, &HostLinks::barrier); }
  void abort() override { links_->abort(); }
  bool batches(int peer) const override { return links_->is_near(peer); }

 private:
  // Has the worker do a call: on elements, or on `bytes` where data only moves.
  void post(TransportCall& given, void (HostLinks::*function)(HostCall&), bool bytes = false);

  const std::shared_ptr<HostLinks> links_;
  const std::shared_ptr<HostsWorker> worker_ = std::make_shared<HostsWorker>();
  const bool tells_;
};

void HostsTransport::post(TransportCall& given, void (HostLinks::*function)(HostCall&),
                          bool bytes) {
  HostCall call{given};
  call.source = nullptr;  // does not live as long
  given.finish = nullptr;
  std::int64_t item = 1;
  for (at::Tensor* tensor : {&call.output, &call.input}) {
    if (!tensor->defined()) continue;
    if (bytes) item = static_cast<std::int64_t>(tensor->element_size());
    *tensor = bytes ? flat_bytes(*tensor) : flat(*tensor);
  }
  call.counts = times(given.counts, item);
  call.input_counts = times(given.input_counts, item);
  call.timeout = bounded_limit(given.timeout + kStepSlack);
  auto work = c10::make_intrusive<HostsWork>(
      rank_, given.type, given.results,
      [links = links_, call = std::move(call), tells = tells_, function]() mutable {
        if (links->aborted()) throw std::runtime_error("connection closed: the group was aborted");
        try {
          (links.get()->*function)(call);
          if (call.finish) call.finish();
        } catch (...) {
          // No watch tells the other ranks: those of this host see it in memory, and the leaders of
          // the others that the connections are closed.
          if (tells) links->abort();
          throw;
        }
      });
  worker_->post(work);
  given.works.push_back({std::move(work)});
}

// ---- messages ----

void HostsTransport::exchange(TransportCall& call) {
  const int peer = call.messages.front().peer;
  if (peer == TransportCall::kAnyRank) {
    // Of two ways on which a message may come, one would take it and the other wait for ever.
    if (links_->map().count() < size_)
      throw NotAvailable(
          "receive from any rank: some ranks of the group share a host and others do not, so that "
          "messages come through memory or through the network; name the sender");
    return links_->wide().exchange(call);
  }
  if (!links_->is_near(peer)) return links_->wide().exchange(call);
  if (!links_->near()) throw InvalidArgument("a rank does not send messages to itself");
  for (auto& m : call.messages) m.peer = links_->map().place_of[m.peer];
  links_->near()->exchange(call);
}

}  // namespace

std::shared_ptr<Transport> make_hosts_transport(std::shared_ptr<HostLinks> links, int rank,
                                                std::chrono::milliseconds timeout, bool tells) {
  return std::make_shared<HostsTransport>(std::move(links), rank, timeout, tells);
}

}  // namespace tessera::detail
