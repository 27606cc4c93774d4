#include "tessera/comm/backends/hosts/hosts_backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/arguments.h"
#include "tessera/comm/group/detail/backend_calls.h"
#include "tessera/comm/group/detail/reduction.h"

namespace tessera::detail {
namespace {

using c10d::OpType;

// The limits of the steps begin later than that of the call, which is the one that counts: its
// error names the ranks that are missing.
constexpr std::chrono::milliseconds kStepSlack{2000};

std::optional<ReduceOp::Kind> kind_between_hosts(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::Kind::sum;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::Kind::product;
    case c10d::ReduceOp::MIN:
      return ReduceOp::Kind::min;
    case c10d::ReduceOp::MAX:
      return ReduceOp::Kind::max;
    default:
      return std::nullopt;
  }
}

/// How a reduction is done in steps that are exact: each host's result is rounded, so half
/// precision travels as float32. Min and max of floating-point numbers, of which Gloo's drop NaN,
/// are those of integers that order alike; bool and int16 travel as integers that Gloo has.
struct StepReduction {
  ReduceOp::Kind kind;
  c10d::ReduceOp op;
  /// The dtype in which values are computed, and the one in which they travel.
  c10::ScalarType values, wide;
  bool divide;

  bool by_order_keys() const { return values != wide; }
  at::Tensor widened(const at::Tensor& flat) const {
    const at::Tensor result = flat.to(values);
    return by_order_keys() ? order_keys(result, kind) : result;
  }
  /// Ends the reduction over `ranks` of `result`, and rounds it into `flat`.
  void settle(const at::Tensor& flat, const at::Tensor& result, int ranks) const {
    if (by_order_keys()) {
      const at::Tensor decoded = at::empty(flat.sizes(), flat.options().dtype(values));
      from_order_keys(decoded, result, kind);
      flat.copy_(decoded);
      return;
    }
    if (divide) result.div_(ranks);
    if (!result.is_same(flat)) flat.copy_(result);
  }
};

/// The dtype in which `kind` of a dtype is computed.
c10::ScalarType computed_in(c10::ScalarType dtype, ReduceOp::Kind kind) {
  if (dtype == c10::ScalarType::Short) return c10::ScalarType::Int;
  // A product is and; a sum of bool is refused.
  if (dtype == c10::ScalarType::Bool && kind != ReduceOp::Kind::sum) return c10::ScalarType::Byte;
  return accumulation_type(dtype);
}

c10::ScalarType travels_as(c10::ScalarType values, ReduceOp::Kind kind) {
  if (kind != ReduceOp::Kind::min && kind != ReduceOp::Kind::max) return values;
  if (values == c10::ScalarType::Float) return c10::ScalarType::Int;
  return values == c10::ScalarType::Double ? c10::ScalarType::Long : values;
}

StepReduction step_reduction(const char* name, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const auto dtype = tensor.scalar_type();
  const bool average = op.op_ == c10d::ReduceOp::AVG;
  const auto kind = average ? ReduceOp::Kind::sum : kind_between_hosts(op);
  if (kind && (!average || c10::isFloatingType(dtype))) {
    const auto values = computed_in(dtype, *kind), wide = travels_as(values, *kind);
    if (gloo_reduces(wide, *kind)) return {*kind, to_c10d(*kind), values, wide, average};
  }
  throw InvalidArgument(concat(
      name, ": between hosts ", c10::toString(dtype),
      " has no such reduction; floating-point numbers have sums, products, averages, min and "
      "max, integers sums, products, min and max, and bool products, min and max. The calls "
      "of tessera::Group do the others"));
}

at::Tensor flat_view(const at::Tensor& plain) { return plain.as_strided({plain.numel()}, {1}); }

/// The values of a tensor, one after the other: its own memory where it is in row-major order.
at::Tensor flat_values(const at::Tensor& tensor) {
  return flat_view(is_plain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous());
}

at::Tensor bytes_of_flat(const at::Tensor& flat) { return flat.view(at::kByte); }

/// Memory for a result: the tensor's own, or some from which settle() copies.
struct FlatTarget {
  explicit FlatTarget(const at::Tensor& given, bool filled = false) : tensor(given) {
    if (is_plain(given)) {
      flat = flat_view(given);
      return;
    }
    scratch = at::empty(given.sizes(), given.options().memory_format(at::MemoryFormat::Contiguous));
    if (filled) scratch.copy_(given);
    flat = flat_view(scratch);
  }
  void settle() const {
    if (scratch.defined()) tensor.copy_(scratch);
  }
  at::Tensor tensor, scratch, flat;
};

HostLinks::Counts in_bytes(HostLinks::Counts counts, const at::Tensor& like) {
  for (auto& count : counts) count *= static_cast<std::int64_t>(like.element_size());
  return counts;
}

HostLinks::Counts same_for_all(int ranks, std::int64_t count) {
  return HostLinks::Counts(static_cast<std::size_t>(ranks), count);
}

}  // namespace

HostsBackend::HostsBackend(std::shared_ptr<HostLinks> links, int rank,
                           std::chrono::milliseconds timeout, bool tells)
    : c10d::Backend(rank, links->map().size()),
      links_(std::move(links)),
      worker_(std::make_shared<HostsWorker>()),
      tells_(tells),
      timeout_(timeout) {
  init();
}

HostsBackend::~HostsBackend() { worker_->close(links_->aborted()); }

c10::intrusive_ptr<c10d::Backend::Options> HostsBackend::getBackendOptions() {
  return c10::make_intrusive<Options>("hosts", timeout_);
}

bool HostsBackend::reduces(c10::ScalarType dtype, ReduceOp::Kind op) const {
  return gloo_reduces(dtype, op);
}

void HostsBackend::require_rank(int rank, const char* what) const {
  if (rank < 0 || rank >= ranks())
    throw InvalidArgument(concat(what, " is rank ", rank, " in a group of ", ranks(), " ranks"));
}

void HostsBackend::require_sizes(const Counts& sizes, const char* name) const {
  if (static_cast<int>(sizes.size()) != ranks())
    throw InvalidArgument(
        concat(name, ": ", sizes.size(), " sizes for ", ranks(), " ranks: ", list(sizes)));
  if (std::any_of(sizes.begin(), sizes.end(), [](std::int64_t n) { return n < 0; }))
    throw InvalidArgument(concat(name, ": a size is negative: ", list(sizes)));
}

HostsBackend::WorkPtr HostsBackend::post(OpType type, std::chrono::milliseconds limit,
                                         Tensors results, Body body) {
  HostCall call;
  call.sign = std::exchange(signature_, 0);
  call.limit = bounded_limit((limit.count() > 0 ? limit : timeout_) + kStepSlack);
  sequence_.fetch_add(1, std::memory_order_relaxed);
  auto work = c10::make_intrusive<HostsWork>(
      rank_, type, std::move(results),
      [links = links_, call, tells = tells_, body = std::move(body)]() mutable {
        if (links->aborted()) throw std::runtime_error("connection closed: the group was aborted");
        try {
          body(*links, call);
        } catch (...) {
          // No watch tells the other ranks: those of this host see it in memory, and the leaders of
          // the others that the connections are closed.
          if (tells) links->abort();
          throw;
        }
      });
  worker_->post(work);
  return work;
}

// ---- collectives ----

HostsBackend::WorkPtr HostsBackend::broadcast(Tensors& tensors,
                                              const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = only("broadcast", tensors);
  const int root = static_cast<int>(options.rootRank);
  require_rank(root, "the root of broadcast");
  const FlatTarget target(tensor, rank_ == root);
  return post(OpType::BROADCAST, options.timeout, {tensor},
              [target, root, writes = rank_ != root](HostLinks& links, HostCall& call) {
                if (target.flat.numel() == 0) return;
                links.broadcast(call, bytes_of_flat(target.flat), root);
                if (writes) target.settle();
              });
}

HostsBackend::WorkPtr HostsBackend::allreduce(Tensors& tensors,
                                              const c10d::AllreduceOptions& options) {
  only("all_reduce", tensors);
  c10d::AllreduceCoalescedOptions all;
  all.reduceOp = options.reduceOp;
  all.timeout = options.timeout;
  return allreduce_coalesced(tensors, all);
}

HostsBackend::WorkPtr HostsBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<std::pair<FlatTarget, StepReduction>> parts;
  for (const auto& tensor : tensors) {
    require_cpu("all_reduce", tensor);
    parts.emplace_back(FlatTarget(tensor, true),
                       step_reduction("all_reduce", tensor, options.reduceOp));
  }
  return post(OpType::ALLREDUCE, options.timeout, tensors,
              [parts = std::move(parts)](HostLinks& links, HostCall& call) {
                for (const auto& [target, how] : parts) {
                  if (target.flat.numel() == 0) continue;
                  const at::Tensor data = how.widened(target.flat);
                  links.all_reduce(call, data, how.op);
                  how.settle(target.flat, data, links.map().size());
                  target.settle();
                }
              });
}

HostsBackend::WorkPtr HostsBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor tensor = only("reduce", tensors);
  const int root = static_cast<int>(options.rootRank);
  require_rank(root, "the root of reduce");
  const auto how = step_reduction("reduce", tensor, options.reduceOp);
  const FlatTarget target(tensor, true);
  return post(OpType::REDUCE, options.timeout, {tensor},
              [target, root, writes = rank_ == root, how](HostLinks& links, HostCall& call) {
                if (target.flat.numel() == 0) return;
                const at::Tensor data = how.widened(target.flat);
                links.reduce(call, data, how.op, root);
                if (!writes) return;
                how.settle(target.flat, data, links.map().size());
                target.settle();
              });
}

HostsBackend::WorkPtr HostsBackend::all_gather_counts(const at::Tensor& output,
                                                      const at::Tensor& input, Counts counts,
                                                      std::chrono::milliseconds limit,
                                                      Tensors results, Body after) {
  require_same_type("all_gather", input, output);
  require_numel("all_gather", "output", output, total_of(counts));
  require_numel("all_gather", "input", input, counts[static_cast<std::size_t>(rank_)]);
  const FlatTarget target(output);
  return post(OpType::ALLGATHER, limit, std::move(results),
              [target, from = flat_values(input), counts = in_bytes(std::move(counts), input),
               after = std::move(after)](HostLinks& links, HostCall& call) {
                if (target.flat.numel() == 0) return;
                links.all_gather(call, bytes_of_flat(target.flat), bytes_of_flat(from), counts);
                target.settle();
                if (after) after(links, call);
              });
}

HostsBackend::WorkPtr HostsBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  const at::Tensor input = only("all_gather", inputs);
  if (outputs.size() != 1 || static_cast<int>(outputs.front().size()) != ranks())
    throw InvalidArgument(concat("all_gather needs one list of ", ranks(), " outputs"));
  const Tensors out = outputs.front();
  for (const auto& t : out) {
    require_cpu("all_gather", t);
    require_same_type("all_gather", input, t);
  }
  const Flat buffer = flattened(out);
  return all_gather_counts(buffer.whole, input, numels(out), options.timeout, out,
                           [out, parts = buffer.parts](HostLinks&, HostCall&) {
                             for (std::size_t r = 0; r < out.size(); ++r) out[r].copy_(parts[r]);
                           });
}

HostsBackend::WorkPtr HostsBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  require_cpu("all_gather", output);
  require_cpu("all_gather", input);
  return all_gather_counts(output, input, same_for_all(ranks(), input.numel()), options.timeout,
                           {output});
}

HostsBackend::WorkPtr HostsBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  if (outputs.size() != inputs.size())
    throw InvalidArgument(
        concat("all_gather of ", inputs.size(), " inputs into ", outputs.size(), " outputs"));
  std::vector<std::pair<FlatTarget, at::Tensor>> parts;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    require_cpu("all_gather", inputs[i]);
    require_cpu("all_gather", outputs[i]);
    require_same_type("all_gather", inputs[i], outputs[i]);
    require_numel("all_gather", "output", outputs[i], inputs[i].numel() * ranks());
    parts.emplace_back(FlatTarget(outputs[i]), flat_values(inputs[i]));
  }
  return post(OpType::_ALLGATHER_BASE, options.timeout, outputs,
              [parts = std::move(parts)](HostLinks& links, HostCall& call) {
                for (const auto& [target, from] : parts) {
                  if (target.flat.numel() == 0) continue;
                  const auto counts =
                      in_bytes(same_for_all(links.map().size(), from.numel()), from);
                  links.all_gather(call, bytes_of_flat(target.flat), bytes_of_flat(from), counts);
                  target.settle();
                }
              });
}

HostsBackend::WorkPtr HostsBackend::gather_counts(const at::Tensor& output, const at::Tensor& input,
                                                  Counts counts, int root,
                                                  std::chrono::milliseconds limit, Tensors results,
                                                  Body after) {
  require_numel("gather", "input", input, counts[static_cast<std::size_t>(rank_)]);
  std::optional<FlatTarget> target;
  if (rank_ == root) {
    require_same_type("gather", input, output);
    require_numel("gather", "output", output, total_of(counts));
    target.emplace(output);
  }
  const bool nothing = total_of(counts) == 0;
  return post(OpType::GATHER, limit, std::move(results),
              [target, nothing, root, from = flat_values(input),
               counts = in_bytes(std::move(counts), input),
               after = std::move(after)](HostLinks& links, HostCall& call) {
                if (nothing) return;
                links.gather(call, target ? bytes_of_flat(target->flat) : at::Tensor(),
                             bytes_of_flat(from), counts, root);
                if (target) target->settle();
                if (after) after(links, call);
              });
}

HostsBackend::WorkPtr HostsBackend::gather(TensorLists& outputs, Tensors& inputs,
                                           const c10d::GatherOptions& options) {
  const at::Tensor input = only("gather", inputs);
  const int root = static_cast<int>(options.rootRank);
  require_rank(root, "the root of gather");
  const Counts counts = same_for_all(ranks(), input.numel());
  if (rank_ != root) return gather_counts({}, input, counts, root, options.timeout, {});
  if (outputs.size() != 1 || static_cast<int>(outputs.front().size()) != ranks())
    throw InvalidArgument(concat("gather needs one list of ", ranks(), " outputs on its root"));
  const Tensors out = outputs.front();
  for (const auto& t : out) {
    require_cpu("gather", t);
    require_same_type("gather", input, t);
    require_numel("gather", "output", t, input.numel());
  }
  const Flat buffer = flattened(out);
  return gather_counts(buffer.whole, input, counts, root, options.timeout, out,
                       [out, parts = buffer.parts](HostLinks&, HostCall&) {
                         for (std::size_t r = 0; r < out.size(); ++r) out[r].copy_(parts[r]);
                       });
}

HostsBackend::WorkPtr HostsBackend::scatter_counts(const at::Tensor& output,
                                                   const at::Tensor& input, Counts counts, int root,
                                                   std::chrono::milliseconds limit) {
  require_numel("scatter", "output", output, counts[static_cast<std::size_t>(rank_)]);
  at::Tensor from;
  if (rank_ == root) {
    require_same_type("scatter", input, output);
    require_numel("scatter", "input", input, total_of(counts));
    from = bytes_of_flat(flat_values(input));
  }
  const bool nothing = total_of(counts) == 0;
  const FlatTarget target(output);
  return post(OpType::SCATTER, limit, {output},
              [target, from, nothing, root, counts = in_bytes(std::move(counts), output)](
                  HostLinks& links, HostCall& call) {
                if (nothing) return;
                links.scatter(call, bytes_of_flat(target.flat), from, counts, root);
                target.settle();
              });
}

HostsBackend::WorkPtr HostsBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                            const c10d::ScatterOptions& options) {
  const at::Tensor output = only("scatter", outputs);
  const int root = static_cast<int>(options.rootRank);
  require_rank(root, "the root of scatter");
  at::Tensor whole;
  if (rank_ == root) {
    if (inputs.size() != 1 || static_cast<int>(inputs.front().size()) != ranks())
      throw InvalidArgument(concat("scatter needs one list of ", ranks(), " inputs on its root"));
    const Tensors& in = inputs.front();
    for (const auto& t : in) {
      require_cpu("scatter", t);
      require_same_type("scatter", t, output);
      require_numel("scatter", "input", t, output.numel());
    }
    const Flat buffer = flattened(in);
    for (std::size_t r = 0; r < in.size(); ++r) buffer.parts[r].copy_(in[r]);
    whole = buffer.whole;
  }
  return scatter_counts(output, whole, same_for_all(ranks(), output.numel()), root,
                        options.timeout);
}

HostsBackend::WorkPtr HostsBackend::reduce_scatter_counts(const at::Tensor& output,
                                                          const at::Tensor& input, Counts counts,
                                                          const c10d::ReduceOp& op,
                                                          std::chrono::milliseconds limit,
                                                          Tensors results) {
  require_same_type("reduce_scatter", input, output);
  require_numel("reduce_scatter", "input", input, total_of(counts));
  require_numel("reduce_scatter", "output", output, counts[static_cast<std::size_t>(rank_)]);
  const auto how = step_reduction("reduce_scatter", input, op);
  const FlatTarget target(output);
  return post(OpType::REDUCE_SCATTER, limit, std::move(results),
              [target, from = flat_values(input), counts = std::move(counts), how](HostLinks& links,
                                                                                   HostCall& call) {
                if (from.numel() == 0) return;
                const at::Tensor result =
                    how.wide == from.scalar_type()
                        ? target.flat
                        : at::empty(target.flat.sizes(), target.flat.options().dtype(how.wide));
                links.reduce_scatter(call, result, how.widened(from), counts, how.kind, how.op);
                how.settle(target.flat, result, links.map().size());
                target.settle();
              });
}

HostsBackend::WorkPtr HostsBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                   const c10d::ReduceScatterOptions& options) {
  const at::Tensor output = only("reduce_scatter", outputs);
  if (inputs.size() != 1 || static_cast<int>(inputs.front().size()) != ranks())
    throw InvalidArgument(concat("reduce_scatter needs one list of ", ranks(), " inputs"));
  const Tensors& in = inputs.front();
  for (const auto& t : in) {
    require_cpu("reduce_scatter", t);
    require_same_type("reduce_scatter", t, output);
  }
  const Flat buffer = flattened(in);
  for (std::size_t r = 0; r < in.size(); ++r) buffer.parts[r].copy_(in[r]);
  return reduce_scatter_counts(output, buffer.whole, numels(in), options.reduceOp, options.timeout,
                               {output});
}

HostsBackend::WorkPtr HostsBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  require_cpu("reduce_scatter", output);
  require_cpu("reduce_scatter", input);
  return reduce_scatter_counts(output, input, same_for_all(ranks(), output.numel()),
                               options.reduceOp, options.timeout, {output});
}

HostsBackend::WorkPtr HostsBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                  std::vector<std::int64_t>& output_splits,
                                                  std::vector<std::int64_t>& input_splits,
                                                  const c10d::AllToAllOptions& options) {
  require_cpu("all_to_all", output);
  require_cpu("all_to_all", input);
  require_same_type("all_to_all", input, output);
  const auto counts = [&](const at::Tensor& tensor, const Counts& splits, const char* which) {
    if (!splits.empty()) {
      require_sizes(splits, "all_to_all");
      const Counts result = elements_of(splits, tensor);
      require_numel("all_to_all", which, tensor, total_of(result));
      return in_bytes(result, tensor);
    }
    if (tensor.numel() % ranks() != 0)
      throw InvalidArgument(concat("all_to_all: the ", which, " of ", tensor.numel(),
                                   " elements cannot be divided among ", ranks(),
                                   " ranks; give sizes"));
    return in_bytes(same_for_all(ranks(), tensor.numel() / ranks()), tensor);
  };
  const FlatTarget target(output);
  return post(OpType::ALLTOALL_BASE, options.timeout, {output},
              [target, from = flat_values(input), out = counts(output, output_splits, "output"),
               in = counts(input, input_splits, "input")](HostLinks& links, HostCall& call) {
                links.all_to_all(call, bytes_of_flat(target.flat), out, bytes_of_flat(from), in);
                target.settle();
              });
}

HostsBackend::WorkPtr HostsBackend::barrier(const c10d::BarrierOptions& options) {
  return post(OpType::BARRIER, options.timeout, {},
              [](HostLinks& links, HostCall& call) { links.barrier(call); });
}

// ---- uneven ----

HostsBackend::WorkPtr HostsBackend::all_gather_v(const at::Tensor& output, const at::Tensor& input,
                                                 const Counts& sizes, CallLimit limit) {
  require_cpu("all_gather", output);
  require_cpu("all_gather", input);
  require_sizes(sizes, "all_gather");
  return all_gather_counts(output, input, elements_of(sizes, output), limit.timeout, {output});
}

HostsBackend::WorkPtr HostsBackend::reduce_scatter_v(const at::Tensor& output,
                                                     const at::Tensor& input, const Counts& sizes,
                                                     const c10d::ReduceOp& op, CallLimit limit) {
  require_cpu("reduce_scatter", output);
  require_cpu("reduce_scatter", input);
  require_sizes(sizes, "reduce_scatter");
  return reduce_scatter_counts(output, input, elements_of(sizes, input), op, limit.timeout,
                               {output});
}

HostsBackend::WorkPtr HostsBackend::gather_v(const at::Tensor& output, const at::Tensor& input,
                                             const Counts& sizes, int root, CallLimit limit) {
  require_cpu("gather", input);
  require_sizes(sizes, "gather");
  require_rank(root, "the root of gather");
  if (rank_ == root) require_cpu("gather", output);
  return gather_counts(output, input, elements_of(sizes, input), root, limit.timeout,
                       rank_ == root ? Tensors{output} : Tensors{});
}

HostsBackend::WorkPtr HostsBackend::scatter_v(const at::Tensor& output, const at::Tensor& input,
                                              const Counts& sizes, int root, CallLimit limit) {
  require_cpu("scatter", output);
  require_sizes(sizes, "scatter");
  require_rank(root, "the root of scatter");
  if (rank_ == root) require_cpu("scatter", input);
  return scatter_counts(output, input, elements_of(sizes, output), root, limit.timeout);
}

// ---- messages ----

HostsBackend::WorkPtr HostsBackend::send(Tensors& tensors, int to, int tag) {
  require_rank(to, "the receiver of send");
  if (!links_->is_near(to)) return links_->wide().send(tensors, to, tag);
  if (!links_->near()) throw InvalidArgument("send: a rank does not send to itself");
  return links_->near()->send(tensors, links_->map().place_of[static_cast<std::size_t>(to)], tag);
}

HostsBackend::WorkPtr HostsBackend::recv(Tensors& tensors, int from, int tag) {
  require_rank(from, "the sender of receive");
  if (!links_->is_near(from)) return links_->wide().recv(tensors, from, tag);
  if (!links_->near()) throw InvalidArgument("receive: a rank does not receive from itself");
  return links_->near()->recv(tensors, links_->map().place_of[static_cast<std::size_t>(from)], tag);
}

HostsBackend::WorkPtr HostsBackend::exchange(const std::vector<Message>& messages,
                                             CallLimit limit) {
  std::vector<Message> near;
  for (const auto& m : messages) {
    require_cpu("exchange", m.tensor);
    require_rank(m.peer, "a peer of exchange");
    if (!links_->is_near(m.peer) || !links_->near_uneven())
      throw InvalidArgument(concat("exchange: rank ", m.peer,
                                   " of the group is on another host; send and receive by tags"));
    near.push_back({m.kind, m.tensor, links_->map().place_of[static_cast<std::size_t>(m.peer)]});
  }
  return links_->near_uneven()->exchange(near, limit);
}

}  // namespace tessera::detail
