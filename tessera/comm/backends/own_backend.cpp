#include "tessera/comm/backends/own_backend.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "tessera/base/host_lock.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/arguments.h"

namespace tessera::detail {
namespace {

using c10d::OpType;

/// Copies what arrived in one tensor to the tensors of a list.
std::function<void()> copying_to(std::vector<at::Tensor> list, std::vector<at::Tensor> parts) {
  return [list = std::move(list), parts = std::move(parts)] {
    for (std::size_t r = 0; r < list.size(); ++r) list[r].copy_(parts[r]);
  };
}

/// The values of several tensors, one after the other.
at::Tensor joined(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  const Flat buffer = flattened(tensors);
  for (std::size_t r = 0; r < tensors.size(); ++r) buffer.parts[r].copy_(tensors[r]);
  return buffer.whole;
}

/// The call that gives `output`; its data come from `input`, or are in place.
OwnCall call_on(OpType type, CallLimit limit, const at::Tensor& output,
                const at::Tensor& input = {}, OwnCall::Counts counts = {}) {
  OwnCall call;
  call.type = type;
  call.limit = limit;
  if (output.defined()) call.results = {output};
  call.output = output;
  call.input = input;
  call.counts = std::move(counts);
  return call;
}

/// The call on several tensors that gives `outputs`.
OwnCall call_on(OpType type, CallLimit limit, const std::vector<at::Tensor>& outputs) {
  OwnCall call = call_on(type, limit, at::Tensor());
  call.results = outputs;
  return call;
}

/// Several works as one.
class WorksInTurn final : public OwnWork {
 public:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  WorksInTurn(int rank, OpType type, std::vector<at::Tensor> results, Works works)
      : OwnWork(rank, type, std::move(results)), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](auto& w) { return w->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](auto& w) { return w->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_)
      if (auto error = work->exception()) return error;
    return nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return std::all_of(works_.begin(), works_.end(), [&](auto& w) { return w->wait(timeout); });
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const auto type = c10::ListType::create(c10::TensorType::get());
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(c10::FutureType::create(type));
    for (const auto& work : works_) futures.push_back(work->getFuture());
    return c10::collectAll(futures)->then(
        [results = results_](c10::ivalue::Future& all) {
          all.value();  // throws the error of any
          return c10::IValue(results);
        },
        type);
  }

 private:
  const Works works_;
};

}  // namespace

// ---- works ----

OwnWork::OwnWork(int rank, OpType type, std::vector<at::Tensor> results)
    : c10d::Work(rank, type), results_(std::move(results)) {}

std::vector<at::Tensor> OwnWork::result() {
  const WithoutHostLock released;  // c10d's Python asks with the lock
  wait();
  return results_;
}

void OwnWork::settle_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    if (!future_ || settled_ || !completed_) return;
    settled_ = true;
    future = future_;
    error = exception_;
  }
  if (error)
    future->setError(error);
  else
    future->markCompleted(c10::IValue(results_));
}

c10::intrusive_ptr<c10::ivalue::Future> OwnWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (!future_)
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future = future_;
  }
  settle_future();
  return future;
}

bool OwnWork::has_open_future() const {
  const std::lock_guard lock(mutex_);
  return future_ && !settled_;
}

// ---- futures ----

void FutureThreads::settle(const c10::intrusive_ptr<OwnWork>& work) {
  if (!work->has_open_future()) return;
  {
    const std::lock_guard lock(mutex_);
    try {
      if (idle_ <= queue_.size()) {
        std::thread thread([self = shared_from_this()] { self->run(); });
        ++idle_;
        if (stops_)
          thread.detach();
        else
          threads_.push_back(std::move(thread));
      }
      queue_.push_back(work);
      changed_.notify_one();
      return;
    } catch (const std::system_error&) {  // The system has no thread left.
    }
  }
  work->settle_future();
}

void FutureThreads::run() {
  std::unique_lock lock(mutex_);
  for (;; ++idle_) {
    changed_.wait(lock, [this] { return stops_ || !queue_.empty(); });
    --idle_;
    if (queue_.empty()) return;
    auto work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work->settle_future();
    work.reset();
    lock.lock();
  }
}

void FutureThreads::close(bool leave) {
  const WithoutHostLock released;  // callbacks of Python's need it
  std::unique_lock lock(mutex_);
  stops_ = true;
  changed_.notify_all();
  while (!threads_.empty()) {
    auto thread = std::move(threads_.back());
    threads_.pop_back();
    lock.unlock();
    // The last owner may be a callback.
    if (leave || thread.get_id() == std::this_thread::get_id())
      thread.detach();
    else
      thread.join();
    lock.lock();
  }
}

// ---- checks ----

c10::intrusive_ptr<c10d::Backend::Options> OwnBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_);
}

int OwnBackend::required_rank(std::int64_t rank, const char* what) const {
  if (rank < 0 || rank >= ranks())
    throw InvalidArgument(concat(what, " is rank ", rank, " in a group of ", ranks(), " ranks"));
  return static_cast<int>(rank);
}

void OwnBackend::require_sizes(const Counts& sizes, const char* name) const {
  if (static_cast<int>(sizes.size()) != ranks())
    throw InvalidArgument(
        concat(name, ": ", sizes.size(), " sizes for ", ranks(), " ranks: ", list(sizes)));
  if (std::any_of(sizes.begin(), sizes.end(), [](std::int64_t n) { return n < 0; }))
    throw InvalidArgument(concat(name, ": a size is negative: ", list(sizes)));
}

void OwnBackend::require_list(const TensorLists& lists, const char* name, const char* what) const {
  if (lists.size() != 1 || static_cast<int>(lists.front().size()) != ranks())
    throw InvalidArgument(concat(name, " needs one list of ", ranks(), ' ', what));
  for (const auto& t : lists.front()) require_cpu(name, t);
}

OwnBackend::Counts OwnBackend::counts_of_splits(const at::Tensor& tensor, const Counts& splits,
                                                const char* which) const {
  if (!splits.empty()) {
    require_sizes(splits, "all_to_all");
    const Counts counts = elements_of(splits, tensor);
    require_numel("all_to_all", which, tensor, total_of(counts));
    return counts;
  }
  if (tensor.numel() % ranks() != 0)
    throw InvalidArgument(concat("all_to_all: the ", which, " of ", tensor.numel(),
                                 " elements cannot be divided among ", ranks(),
                                 " ranks; give sizes"));
  return same_for_all(tensor.numel() / ranks());
}

void OwnBackend::require_each(const Tensors& wholes, const Tensors& parts, const char* name) const {
  if (wholes.size() != parts.size())
    throw InvalidArgument(concat(name,
                                 " of several tensors needs as many inputs as outputs, and got ",
                                 parts.size(), " and ", wholes.size()));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    require_cpu(name, parts[i]);
    require_cpu(name, wholes[i]);
    require_same_type(name, parts[i], wholes[i]);
    require_numel(name, "tensor of all ranks", wholes[i], parts[i].numel() * ranks());
  }
}

Abilities OwnBackend::own_abilities(bool (*reduces)(c10::ScalarType, ReduceOp::Kind)) {
  Abilities result;
  result.reduces = reduces;
  result.moves = moves_every_dtype;
  result.keeps_inputs = true;
  result.uneven = this;
  result.signature = &signature_;
  return result;
}

// ---- one tensor ----

OwnBackend::WorkPtr OwnBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  OwnCall call = call_on(OpType::BROADCAST, limit_of(options), only("broadcast", tensors));
  call.root = required_rank(options.rootRank, "the root of broadcast");
  return broadcast_one(std::move(call));
}

OwnBackend::WorkPtr OwnBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  OwnCall call = call_on(OpType::ALLREDUCE, limit_of(options), only("all_reduce", tensors));
  call.op = options.reduceOp;
  return all_reduce_one(std::move(call));
}

OwnBackend::WorkPtr OwnBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  OwnCall call = call_on(OpType::REDUCE, limit_of(options), only("reduce", tensors));
  call.op = options.reduceOp;
  call.root = required_rank(options.rootRank, "the root of reduce");
  return reduce_one(std::move(call));
}

// ---- with counts ----

OwnBackend::WorkPtr OwnBackend::checked_all_gather(OwnCall call) {
  require_same_type("all_gather", call.input, call.output);
  require_numel("all_gather", "output", call.output, total_of(call.counts));
  require_numel("all_gather", "input", call.input, count_here(call.counts));
  return all_gather_counts(std::move(call));
}

OwnBackend::WorkPtr OwnBackend::checked_reduce_scatter(OwnCall call) {
  require_same_type("reduce_scatter", call.input, call.output);
  require_numel("reduce_scatter", "input", call.input, total_of(call.counts));
  require_numel("reduce_scatter", "output", call.output, count_here(call.counts));
  return reduce_scatter_counts(std::move(call));
}

OwnBackend::WorkPtr OwnBackend::checked_gather(OwnCall call) {
  require_numel("gather", "input", call.input, count_here(call.counts));
  if (rank_ == call.root) {
    require_same_type("gather", call.input, call.output);
    require_numel("gather", "output", call.output, total_of(call.counts));
  }
  return gather_counts(std::move(call));
}

OwnBackend::WorkPtr OwnBackend::checked_scatter(OwnCall call) {
  require_numel("scatter", "output", call.output, count_here(call.counts));
  if (rank_ == call.root) {
    require_same_type("scatter", call.input, call.output);
    require_numel("scatter", "input", call.input, total_of(call.counts));
  }
  return scatter_counts(std::move(call));
}

// ---- lists ----

OwnBackend::WorkPtr OwnBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only("all_gather", inputs);
  require_list(outputs, "all_gather", "outputs");
  const Tensors& out = outputs.front();
  for (const auto& t : out) require_same_type("all_gather", input, t);
  Flat buffer = flattened(out);
  OwnCall call = call_on(OpType::ALLGATHER, limit_of(options), buffer.whole, input, numels(out));
  call.results = out;
  call.finish = copying_to(out, std::move(buffer.parts));
  return checked_all_gather(std::move(call));
}

OwnBackend::WorkPtr OwnBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  constexpr auto kName = "all_gather of several tensors";
  const at::NoGradGuard no_grad;
  Tensors bytes, results;
  for (const auto& t : inputs) {
    require_cpu(kName, t);
    bytes.push_back(t.resolve_conj().resolve_neg().contiguous().reshape({-1}).view(at::kByte));
  }
  if (inputs.empty() || static_cast<int>(outputs.size()) != ranks())
    throw InvalidArgument(concat(kName, " needs tensors and a list of outputs for each of ",
                                 ranks(), " ranks, and got ", inputs.size(), " tensors and ",
                                 outputs.size(), " lists"));
  for (const auto& list : outputs) {
    if (list.size() != inputs.size())
      throw InvalidArgument(
          concat(kName, ": a list of ", list.size(), " outputs for ", inputs.size(), " inputs"));
    for (std::size_t i = 0; i < list.size(); ++i) {
      require_cpu(kName, list[i]);
      require_same_type(kName, inputs[i], list[i]);
      require_numel(kName, "output", list[i], inputs[i].numel());
      results.push_back(list[i]);
    }
  }
  const at::Tensor mine = at::cat(bytes);
  const at::Tensor all = at::empty({mine.numel() * ranks()}, mine.options());
  const auto arrived = [all, results] {
    std::int64_t start = 0;
    for (const auto& result : results) {
      const auto size = static_cast<std::int64_t>(result.nbytes());
      // A copy, since elements that others follow need not begin at a multiple of their size.
      const at::Tensor part = all.narrow(0, start, size).clone();
      result.copy_(part.view(result.scalar_type()).view(result.sizes()));
      start += size;
    }
  };
  OwnCall call = call_on(OpType::ALLGATHER_COALESCED, limit_of(options), all, mine,
                         same_for_all(mine.numel()));
  call.results = results;
  call.finish = arrived;
  return checked_all_gather(std::move(call));
}

OwnBackend::WorkPtr OwnBackend::gather(TensorLists& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const at::Tensor& input = only("gather", inputs);
  OwnCall call = call_on(OpType::GATHER, limit_of(options), {}, input, same_for_all(input.numel()));
  call.root = required_rank(options.rootRank, "the root of gather");
  if (rank_ != call.root) return checked_gather(std::move(call));
  require_list(outputs, "gather", "outputs on its root");
  call.results = outputs.front();
  for (const auto& t : call.results) {
    require_same_type("gather", input, t);
    require_numel("gather", "output", t, input.numel());
  }
  Flat buffer = flattened(call.results);
  call.output = buffer.whole;
  call.finish = copying_to(call.results, std::move(buffer.parts));
  return checked_gather(std::move(call));
}

OwnBackend::WorkPtr OwnBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ScatterOptions& options) {
  const at::Tensor& output = only("scatter", outputs);
  OwnCall call =
      call_on(OpType::SCATTER, limit_of(options), output, {}, same_for_all(output.numel()));
  call.root = required_rank(options.rootRank, "the root of scatter");
  if (rank_ == call.root) {
    require_list(inputs, "scatter", "inputs on its root");
    for (const auto& t : inputs.front()) {
      require_same_type("scatter", t, output);
      require_numel("scatter", "input", t, output.numel());
    }
    call.input = joined(inputs.front());
  }
  return checked_scatter(std::move(call));
}

OwnBackend::WorkPtr OwnBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only("reduce_scatter", outputs);
  require_list(inputs, "reduce_scatter", "inputs");
  const Tensors& in = inputs.front();
  for (const auto& t : in) require_same_type("reduce_scatter", t, output);
  OwnCall call = call_on(OpType::REDUCE_SCATTER, limit_of(options), output, joined(in), numels(in));
  call.op = options.reduceOp;
  return checked_reduce_scatter(std::move(call));
}

// ---- several tensors as one call ----

OwnBackend::WorkPtr OwnBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  for (const auto& t : tensors) require_cpu("all_reduce of several tensors", t);
  OwnCall call = call_on(OpType::ALLREDUCE_COALESCED, limit_of(options), tensors);
  call.op = options.reduceOp;
  return all_reduce_each(std::move(call));
}

OwnBackend::WorkPtr OwnBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  require_each(outputs, inputs, "all_gather");
  return all_gather_each(inputs, call_on(OpType::_ALLGATHER_BASE, limit_of(options), outputs));
}

OwnBackend::WorkPtr OwnBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  // All are checked before the first begins: this rank would be a call ahead of the others.
  require_each(inputs, outputs, "reduce_scatter");
  OwnCall call = call_on(OpType::_REDUCE_SCATTER_BASE, limit_of(options), outputs);
  call.op = options.reduceOp;
  return reduce_scatter_each(inputs, std::move(call));
}

OwnBackend::WorkPtr OwnBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  require_list({outputs}, "all_to_all", "outputs");
  require_list({inputs}, "all_to_all", "inputs");
  const auto me = static_cast<std::size_t>(rank_);
  require_numel("all_to_all", "input to this rank itself", inputs[me], outputs[me].numel());
  return all_to_all_each(inputs, call_on(OpType::ALLTOALL, limit_of(options), outputs));
}

OwnBackend::WorkPtr OwnBackend::in_turn(OwnCall& call,
                                        const std::function<WorkPtr(std::size_t)>& make) {
  std::vector<WorkPtr> works;
  for (std::size_t i = 0; i < call.results.size(); ++i) works.push_back(make(i));
  return c10::make_intrusive<WorksInTurn>(rank_, call.type, std::move(call.results),
                                          std::move(works));
}

OwnBackend::WorkPtr OwnBackend::all_reduce_each(OwnCall call) {
  return in_turn(call, [&](std::size_t i) {
    OwnCall one = call_on(OpType::ALLREDUCE, call.limit, call.results[i]);
    one.op = call.op;
    return all_reduce_one(std::move(one));
  });
}

OwnBackend::WorkPtr OwnBackend::all_gather_each(const Tensors& inputs, OwnCall call) {
  return in_turn(call, [&](std::size_t i) {
    return all_gather_counts(call_on(call.type, call.limit, call.results[i], inputs[i],
                                     same_for_all(inputs[i].numel())));
  });
}

OwnBackend::WorkPtr OwnBackend::reduce_scatter_each(const Tensors& inputs, OwnCall call) {
  return in_turn(call, [&](std::size_t i) {
    OwnCall one = call_on(call.type, call.limit, call.results[i], inputs[i],
                          same_for_all(call.results[i].numel()));
    one.op = call.op;
    return reduce_scatter_counts(std::move(one));
  });
}

// ---- one tensor for all ranks ----

OwnBackend::WorkPtr OwnBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  require_cpu("all_gather", output);
  require_cpu("all_gather", input);
  return checked_all_gather(call_on(OpType::_ALLGATHER_BASE, limit_of(options), output, input,
                                    same_for_all(input.numel())));
}

OwnBackend::WorkPtr OwnBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  require_cpu("reduce_scatter", output);
  require_cpu("reduce_scatter", input);
  OwnCall call = call_on(OpType::_REDUCE_SCATTER_BASE, limit_of(options), output, input,
                         same_for_all(output.numel()));
  call.op = options.reduceOp;
  return checked_reduce_scatter(std::move(call));
}

OwnBackend::WorkPtr OwnBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<std::int64_t>& output_splits,
                                              std::vector<std::int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  require_cpu("all_to_all", output);
  require_cpu("all_to_all", input);
  require_same_type("all_to_all", input, output);
  OwnCall call = call_on(OpType::ALLTOALL_BASE, limit_of(options), output, input,
                         counts_of_splits(output, output_splits, "output"));
  call.input_counts = counts_of_splits(input, input_splits, "input");
  return all_to_all_counts(std::move(call));
}

void OwnBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  c10d::BarrierOptions blocking = options;
  blocking.asyncOp = false;
  barrier(blocking)->wait();
}

// ---- uneven ----

OwnBackend::WorkPtr OwnBackend::all_gather_v(const at::Tensor& output, const at::Tensor& input,
                                             const std::vector<std::int64_t>& sizes,
                                             CallLimit limit) {
  require_cpu("all_gather", output);
  require_cpu("all_gather", input);
  require_sizes(sizes, "all_gather");
  return checked_all_gather(
      call_on(OpType::ALLGATHER, limit, output, input, elements_of(sizes, output)));
}

OwnBackend::WorkPtr OwnBackend::reduce_scatter_v(const at::Tensor& output, const at::Tensor& input,
                                                 const std::vector<std::int64_t>& sizes,
                                                 const c10d::ReduceOp& op, CallLimit limit) {
  require_cpu("reduce_scatter", output);
  require_cpu("reduce_scatter", input);
  require_sizes(sizes, "reduce_scatter");
  OwnCall call = call_on(OpType::REDUCE_SCATTER, limit, output, input, elements_of(sizes, input));
  call.op = op;
  return checked_reduce_scatter(std::move(call));
}

OwnBackend::WorkPtr OwnBackend::gather_v(const at::Tensor& output, const at::Tensor& input,
                                         const std::vector<std::int64_t>& sizes, int root,
                                         CallLimit limit) {
  require_cpu("gather", input);
  require_sizes(sizes, "gather");
  required_rank(root, "the root of gather");
  if (rank_ == root) require_cpu("gather", output);
  OwnCall call = call_on(OpType::GATHER, limit, rank_ == root ? output : at::Tensor(), input,
                         elements_of(sizes, input));
  call.root = root;
  return checked_gather(std::move(call));
}

OwnBackend::WorkPtr OwnBackend::scatter_v(const at::Tensor& output, const at::Tensor& input,
                                          const std::vector<std::int64_t>& sizes, int root,
                                          CallLimit limit) {
  require_cpu("scatter", output);
  require_sizes(sizes, "scatter");
  required_rank(root, "the root of scatter");
  if (rank_ == root) require_cpu("scatter", input);
  OwnCall call = call_on(OpType::SCATTER, limit, output, rank_ == root ? input : at::Tensor(),
                         elements_of(sizes, output));
  call.root = root;
  return checked_scatter(std::move(call));
}

}  // namespace tessera::detail
