#include "transport.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <exception>
#include <utility>

#include "tessera/comm/backends/transport.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/job/detail/manager_state.h"
#include "tessera/comm/job/threads.h"

namespace tessera::test::stand_in {
namespace {

using detail::Transport;
using detail::TransportCall;
using Method = Transport::Function;

// What the task of a call and its work share.
struct Progress {
  TransportCall call;
  detail::CallSource source;
  bool begun = false;
  std::atomic<bool> aborted{false};
  /// Of the group: it was ended.
  std::shared_ptr<std::atomic<bool>> over;
  std::mutex mutex;
  std::exception_ptr error;

  bool step(Transport& inner, Method method) {
    try {
      if (aborted || *over) throw std::runtime_error("the call was aborted");
      if (!begun) {
        begun = true;
        (inner.*method)(call);
      }
      for (auto& started : call.works) {
        // A work that says only by wait() that it is done.
        if (started.wait == detail::Wait::at_one_go && inner.abilities().may_hang)
          started.work->wait();
        else if (!started.work->isCompleted())
          return false;
      }
      for (auto& started : call.works)
        if (auto failed = started.work->exception()) std::rethrow_exception(failed);
      if (call.then) call.then();
    } catch (...) {
      const std::lock_guard lock(mutex);
      error = std::current_exception();
    }
    call = {};
    return true;
  }
  std::exception_ptr failed() {
    const std::lock_guard lock(mutex);
    return error;
  }
};

class StreamWork final : public c10d::Work {
 public:
  StreamWork(int device, std::shared_ptr<Progress> progress, MarkPtr mark,
             std::vector<at::Tensor> kept, bool host)
      : device_(device),
        progress_(std::move(progress)),
        mark_(std::move(mark)),
        kept_(std::move(kept)),
        host_(host) {}
  bool isCompleted() override { return is_done(*mark_); }
  bool isSuccess() const override { return is_done(*mark_) && !progress_->failed(); }
  std::exception_ptr exception() const override { return progress_->failed(); }
  bool wait(std::chrono::milliseconds) override {
    if (host_)
      wait_for(mark_);
    else
      block(device_, current_stream(device_), mark_);
    kept_.clear();
    if (auto error = progress_->failed()) std::rethrow_exception(error);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { progress_->aborted = true; }

 private:
  const int device_;
  const std::shared_ptr<Progress> progress_;
  const MarkPtr mark_;
  std::vector<at::Tensor> kept_;
  const bool host_;
};

// What NCCL reduces and another transport below too.
bool reduces(c10::ScalarType dtype, ReduceOp::Kind op) {
  using Kind = ReduceOp::Kind;
  if (op == Kind::premultiplied) return false;
  switch (dtype) {
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
      return op == Kind::sum || op == Kind::product;
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
      return op != Kind::avg;
    default:
      return false;
  }
}

class OnStreams final : public Transport {
 public:
  /// `aside`: a group of the same ranks that nobody else calls, since the device makes its calls in
  /// an order of its own.
  OnStreams(const std::shared_ptr<detail::GroupState>& aside, int device)
      : Transport(aside->rank(), aside->size(), aside->timeout()),
        aside_(aside),
        inner_(aside->endpoint(c10::kCPU).transport),
        device_(device),
        stream_(stream_of_a_group(device)) {}
  const char* name() const override { return "stand-in"; }
  void broadcast(TransportCall& c) override { pass(c, "broadcast", &Transport::broadcast); }
  void all_reduce(TransportCall& c) override { pass(c, "all_reduce", &Transport::all_reduce); }
  void reduce(TransportCall& c) override { pass(c, "reduce", &Transport::reduce); }
  void all_gather(TransportCall& c) override { pass(c, "all_gather", &Transport::all_gather); }
  void reduce_scatter(TransportCall& c) override {
    pass(c, "reduce_scatter", &Transport::reduce_scatter);
  }
  void gather(TransportCall& c) override { pass(c, "gather", &Transport::gather); }
  void scatter(TransportCall& c) override { pass(c, "scatter", &Transport::scatter); }
  void all_to_all(TransportCall& c) override { pass(c, "all_to_all", &Transport::all_to_all); }
  void exchange(TransportCall& c) override { pass(c, "exchange", &Transport::exchange); }
  void barrier(TransportCall& c) override { pass(c, "barrier", &Transport::barrier); }
  detail::Abilities abilities() override {
    detail::Abilities own;
    own.reduces = &reduces;
    own.moves = inner_->abilities().moves;
    return own;
  }
  void abort() override {
    *over_ = true;
    inner_->abort();
  }

 private:
  void pass(TransportCall& c, const char* what, Method method) {
    auto progress = std::make_shared<Progress>();
    progress->call = c;
    progress->over = over_;
    TransportCall& inner = progress->call;
    std::vector<at::Tensor> kept;
    std::vector<Use> uses;
    const auto lend = [&](at::Tensor& t, bool writes) {
      if (!t.defined()) return;
      kept.push_back(t);
      uses.push_back(use(t, writes));
      t = over(t);
    };
    lend(inner.output, true);
    lend(inner.input, false);
    for (Message& m : inner.messages) lend(m.tensor, m.kind == Message::Kind::receive);
    inner.blocking = false;
    if (c.source) progress->source = *c.source;
    inner.source = c.source ? &progress->source : nullptr;
    // After what the caller's stream had to do.
    block(device_, stream_,
          post(device_, current_stream(device_), "an event", {}, [] { return true; }));
    const MarkPtr mark = post(device_, stream_, what, uses, [progress, method, to = inner_] {
      return progress->step(*to, method);
    });
    c.works.push_back({c10::make_intrusive<StreamWork>(device_, progress, mark, std::move(kept),
                                                       method == &Transport::barrier)});
  }
  const std::shared_ptr<detail::GroupState> aside_;
  const std::shared_ptr<Transport> inner_;
  const int device_;
  const c10::StreamId stream_;
  const std::shared_ptr<std::atomic<bool>> over_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace

void serve(const DistributedManager& manager, c10::Device on, const std::string& without) {
  // A manager has no option for devices that libtorch does not know.
  auto& base = const_cast<detail::ManagerBase&>(manager.state()->base());
  base.device = on;
  base.make_group = [make = base.make_group, on, without](const detail::GroupSpec& spec) {
    detail::GroupSpec own = spec;
    own.device = c10::kCPU;
    const auto made = [&] { return make ? make(own) : detail::make_group_state(own); };
    auto state = made();
    if (spec.ranks.size() == 1 || spec.backend == without || !state->has_endpoint(c10::kCPU))
      return state;
    own.name += " on the device";
    if (own.store) own.store = c10::make_intrusive<c10d::PrefixStore>("device", own.store);
    state->set_endpoint(on, std::make_shared<OnStreams>(made(), static_cast<int>(on.index())));
    return state;
  };
}

namespace {

DistributedManager* job = nullptr;

}  // namespace

void on_devices(int ranks, const std::function<void(DistributedManager&)>& body) {
  if (job) {
    if (ranks == job->world_size()) body(*job);
    return;
  }
  run_threads(ranks,
              [&](DistributedManager& manager) {
                const c10::Device on = device(manager.rank());
                const c10::DeviceGuard guard(on);
                serve(manager, on);
                body(manager);
              },
              {.timeout = std::chrono::seconds(20)});
  finish();
}

int as_process(const std::function<int()>& run) {
  ManagerOptions options;
  options.timeout = std::chrono::seconds(60);
  DistributedManager manager = DistributedManager::initialize(options);
  if (manager.device().is_cpu()) serve(manager, kDevice);
  job = &manager;
  const int result = run();
  if (!manager.device().is_cuda()) finish();
  job = nullptr;
  manager.shutdown();
  return result;
}

}  // namespace tessera::test::stand_in
