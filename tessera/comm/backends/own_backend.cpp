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

void OwnBackend::require_rank(int rank, const char* what) const {
  if (rank < 0 || rank >= ranks())
    throw InvalidArgument(concat(what, " is rank ", rank, " in a group of ", ranks(), " ranks"));
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

// ---- one tensor ----

OwnBackend::WorkPtr OwnBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = only("broadcast", tensors);
  const int root = static_cast<int>(options.rootRank);
  require_rank(root, "the root of broadcast");
  return broadcast_one(tensor, root, {OpType::BROADCAST, limit_of(options), {tensor}, {}});
}

OwnBackend::WorkPtr OwnBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor tensor = only("all_reduce", tensors);
  return all_reduce_one(tensor, options.reduceOp,
                        {OpType::ALLREDUCE, limit_of(options), {tensor}, {}});
}

OwnBackend::WorkPtr OwnBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor tensor = only("reduce", tensors);
  const int root = static_cast<int>(options.rootRank);
  require_rank(root, "the root of reduce");
  return reduce_one(tensor, options.reduceOp, root,
                    {OpType::REDUCE, limit_of(options), {tensor}, {}});
}

// ---- with counts ----

OwnBackend::WorkPtr OwnBackend::checked_all_gather(const at::Tensor& output,
                                                   const at::Tensor& input, Counts counts,
                                                   OwnCall how) {
  require_same_type("all_gather", input, output);
  require_numel("all_gather", "output", output, total_of(counts));
  require_numel("all_gather", "input", input, count_here(counts));
  return all_gather_counts(output, input, std::move(counts), std::move(how));
}

OwnBackend::WorkPtr OwnBackend::checked_reduce_scatter(const at::Tensor& output,
                                                       const at::Tensor& input, Counts counts,
                                                       const c10d::ReduceOp& op, OwnCall how) {
  require_same_type("reduce_scatter", input, output);
  require_numel("reduce_scatter", "input", input, total_of(counts));
  require_numel("reduce_scatter", "output", output, count_here(counts));
  return reduce_scatter_counts(output, input, std::move(counts), op, std::move(how));
}

OwnBackend::WorkPtr OwnBackend::checked_gather(const at::Tensor& output, const at::Tensor& input,
                                               Counts counts, int root, OwnCall how) {
  require_numel("gather", "input", input, count_here(counts));
  if (rank_ != root) return gather_counts({}, input, std::move(counts), root, std::move(how));
  require_same_type("gather", input, output);
  require_numel("gather", "output", output, total_of(counts));
  return gather_counts(output, input, std::move(counts), root, std::move(how));
}

OwnBackend::WorkPtr OwnBackend::checked_scatter(const at::Tensor& output, const at::Tensor& input,
                                                Counts counts, int root, OwnCall how) {
  require_numel("scatter", "output", output, count_here(counts));
  if (rank_ != root) return scatter_counts(output, {}, std::move(counts), root, std::move(how));
  require_same_type("scatter", input, output);
  require_numel("scatter", "input", input, total_of(counts));
  return scatter_counts(output, input, std::move(counts), root, std::move(how));
}

// ---- lists ----

OwnBackend::WorkPtr OwnBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const at::Tensor input = only("all_gather", inputs);
  require_list(outputs, "all_gather", "outputs");
  const Tensors& out = outputs.front();
  for (const auto& t : out) require_same_type("all_gather", input, t);
  Flat buffer = flattened(out);
  return checked_all_gather(
      buffer.whole, input, numels(out),
      {OpType::ALLGATHER, limit_of(options), out, copying_to(out, std::move(buffer.parts))});
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
  return checked_all_gather(all, mine, same_for_all(mine.numel()),
                            {OpType::ALLGATHER_COALESCED, limit_of(options), results, arrived});
}

OwnBackend::WorkPtr OwnBackend::gather(TensorLists& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const at::Tensor input = only("gather", inputs);
  const int root = static_cast<int>(options.rootRank);
  require_rank(root, "the root of gather");
  OwnCall how{OpType::GATHER, limit_of(options), {}, {}};
  if (rank_ != root)
    return checked_gather({}, input, same_for_all(input.numel()), root, std::move(how));
  require_list(outputs, "gather", "outputs on its root");
  how.results = outputs.front();
  for (const auto& t : how.results) {
    require_same_type("gather", input, t);
    require_numel("gather", "output", t, input.numel());
  }
  Flat buffer = flattened(how.results);
  how.finish = copying_to(how.results, std::move(buffer.parts));
  return checked_gather(buffer.whole, input, same_for_all(input.numel()), root, std::move(how));
}

OwnBackend::WorkPtr OwnBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ScatterOptions& options) {
  const at::Tensor output = only("scatter", outputs);
  const int root = static_cast<int>(options.rootRank);
  require_rank(root, "the root of scatter");
  at::Tensor whole;
  if (rank_ == root) {
    require_list(inputs, "scatter", "inputs on its root");
    for (const auto& t : inputs.front()) {
      require_same_type("scatter", t, output);
      require_numel("scatter", "input", t, output.numel());
    }
    whole = joined(inputs.front());
  }
  return checked_scatter(output, whole, same_for_all(output.numel()), root,
                         {OpType::SCATTER, limit_of(options), {output}, {}});
}

OwnBackend::WorkPtr OwnBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const at::Tensor output = only("reduce_scatter", outputs);
  require_list(inputs, "reduce_scatter", "inputs");
  const Tensors& in = inputs.front();
  for (const auto& t : in) require_same_type("reduce_scatter", t, output);
  return checked_reduce_scatter(output, joined(in), numels(in), options.reduceOp,
                                {OpType::REDUCE_SCATTER, limit_of(options), {output}, {}});
}

// ---- one tensor for all ranks ----

OwnBackend::WorkPtr OwnBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  require_cpu("all_gather", output);
  require_cpu("all_gather", input);
  return checked_all_gather(output, input, same_for_all(input.numel()),
                            {OpType::_ALLGATHER_BASE, limit_of(options), {output}, {}});
}

OwnBackend::WorkPtr OwnBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  require_cpu("reduce_scatter", output);
  require_cpu("reduce_scatter", input);
  return checked_reduce_scatter(output, input, same_for_all(output.numel()), options.reduceOp,
                                {OpType::_REDUCE_SCATTER_BASE, limit_of(options), {output}, {}});
}

OwnBackend::WorkPtr OwnBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<std::int64_t>& output_splits,
                                              std::vector<std::int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  require_cpu("all_to_all", output);
  require_cpu("all_to_all", input);
  require_same_type("all_to_all", input, output);
  Counts out = counts_of_splits(output, output_splits, "output"),
         in = counts_of_splits(input, input_splits, "input");
  return all_to_all_counts(output, std::move(out), input, std::move(in),
                           {OpType::ALLTOALL_BASE, limit_of(options), {output}, {}});
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
  return checked_all_gather(output, input, elements_of(sizes, output),
                            {OpType::ALLGATHER, limit, {output}, {}});
}

OwnBackend::WorkPtr OwnBackend::reduce_scatter_v(const at::Tensor& output, const at::Tensor& input,
                                                 const std::vector<std::int64_t>& sizes,
                                                 const c10d::ReduceOp& op, CallLimit limit) {
  require_cpu("reduce_scatter", output);
  require_cpu("reduce_scatter", input);
  require_sizes(sizes, "reduce_scatter");
  return checked_reduce_scatter(output, input, elements_of(sizes, input), op,
                                {OpType::REDUCE_SCATTER, limit, {output}, {}});
}

OwnBackend::WorkPtr OwnBackend::gather_v(const at::Tensor& output, const at::Tensor& input,
                                         const std::vector<std::int64_t>& sizes, int root,
                                         CallLimit limit) {
  require_cpu("gather", input);
  require_sizes(sizes, "gather");
  require_rank(root, "the root of gather");
  OwnCall how{OpType::GATHER, limit, {}, {}};
  if (rank_ == root) {
    require_cpu("gather", output);
    how.results = {output};
  }
  return checked_gather(output, input, elements_of(sizes, input), root, std::move(how));
}

OwnBackend::WorkPtr OwnBackend::scatter_v(const at::Tensor& output, const at::Tensor& input,
                                          const std::vector<std::int64_t>& sizes, int root,
                                          CallLimit limit) {
  require_cpu("scatter", output);
  require_sizes(sizes, "scatter");
  require_rank(root, "the root of scatter");
  if (rank_ == root) require_cpu("scatter", input);
  return checked_scatter(output, input, elements_of(sizes, output), root,
                         {OpType::SCATTER, limit, {output}, {}});
}

}  // namespace tessera::detail
