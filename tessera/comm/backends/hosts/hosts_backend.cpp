#include "tessera/comm/backends/hosts/hosts_backend.h"

#include <ATen/ATen.h>

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

/// The reduction that the steps make, for what was asked: sums for averages and premultiplied sums.
std::optional<ReduceOp::Kind> kind_between_hosts(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG:
    case c10d::ReduceOp::PREMUL_SUM:
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
/// are those of integers that order alike; bool and int16 travel as integers that Gloo has, complex
/// numbers as pairs of real ones.
struct StepReduction {
  ReduceOp::Kind kind;
  c10d::ReduceOp op;
  /// The dtype in which values are computed, and the one in which they travel.
  c10::ScalarType values, wide;
  bool divide;
  /// This rank's values are multiplied by it first.
  double factor = 1;

  bool by_pairs() const { return c10::isComplexType(values); }
  bool by_order_keys() const { return values != wide && !by_pairs(); }
  /// Numbers that travel for each element.
  std::int64_t width() const { return by_pairs() ? 2 : 1; }
  /// May share memory with `flat`.
  at::Tensor widened(const at::Tensor& flat) const {
    at::Tensor result = flat.to(values);
    if (factor != 1) result = result.mul(factor);
    if (by_pairs()) return at::view_as_real(result).view({-1});
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
    if (result.const_data_ptr() == flat.const_data_ptr()) return;
    flat.copy_(by_pairs() ? at::view_as_complex(result.view({-1, 2})) : result);
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
  if (c10::isComplexType(values))
    return kind == ReduceOp::Kind::sum ? c10::toRealValueType(values) : values;
  if (kind != ReduceOp::Kind::min && kind != ReduceOp::Kind::max) return values;
  if (values == c10::ScalarType::Float) return c10::ScalarType::Int;
  return values == c10::ScalarType::Double ? c10::ScalarType::Long : values;
}

double factor_of(const char* name, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return 1;
  const auto* given = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (!given || given->tensor_factor.defined())
    throw InvalidArgument(
        concat(name, ": a premultiplied sum between hosts takes a number as factor"));
  return given->double_factor;
}

StepReduction step_reduction(const char* name, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const auto dtype = tensor.scalar_type();
  const bool average = op.op_ == c10d::ReduceOp::AVG,
             scales = average || op.op_ == c10d::ReduceOp::PREMUL_SUM;
  const auto kind = kind_between_hosts(op);
  if (kind && (!scales || c10::isFloatingType(dtype) || c10::isComplexType(dtype))) {
    const auto values = computed_in(dtype, *kind), wide = travels_as(values, *kind);
    if (gloo_reduces(wide, *kind))
      return {*kind, to_c10d(*kind), values, wide, average, factor_of(name, op)};
  }
  throw InvalidArgument(concat(
      name, ": between hosts ", c10::toString(dtype),
      " has no such reduction; floating-point numbers have sums, premultiplied sums, averages, "
      "products, min and max, complex ones sums, premultiplied sums and averages, integers sums, "
      "products, min and max, and bool products, min and max. The calls of tessera::Group do the "
      "others"));
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

}  // namespace

HostsBackend::HostsBackend(std::shared_ptr<HostLinks> links, int rank,
                           std::chrono::milliseconds timeout, bool tells)
    : OwnBackend(rank, links->map().size(), timeout),
      links_(std::move(links)),
      worker_(std::make_shared<HostsWorker>()),
      tells_(tells) {
  init();
}

HostsBackend::~HostsBackend() { worker_->close(links_->aborted()); }

bool HostsBackend::reduces(c10::ScalarType dtype, ReduceOp::Kind op) const {
  return gloo_reduces(dtype, op);
}

HostsBackend::WorkPtr HostsBackend::post(OwnCall how, Body body) {
  HostCall call;
  call.sign = std::exchange(signature_, 0);
  const auto limit = how.limit.timeout.count() > 0 ? how.limit.timeout : timeout_;
  call.limit = bounded_limit(bounded_limit(limit) + kStepSlack);
  sequence_.fetch_add(1, std::memory_order_relaxed);
  auto work = c10::make_intrusive<HostsWork>(
      rank_, how.type, std::move(how.results),
      [links = links_, call, tells = tells_, body = std::move(body),
       finish = std::move(how.finish)]() mutable {
        if (links->aborted()) throw std::runtime_error("connection closed: the group was aborted");
        try {
          body(*links, call);
          if (finish) finish();
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

HostsBackend::WorkPtr HostsBackend::broadcast_one(const at::Tensor& tensor, int root, OwnCall how) {
  const FlatTarget target(tensor, rank_ == root);
  return post(std::move(how),
              [target, root, writes = rank_ != root](HostLinks& links, HostCall& call) {
                if (target.flat.numel() == 0) return;
                links.broadcast(call, bytes_of_flat(target.flat), root);
                if (writes) target.settle();
              });
}

HostsBackend::WorkPtr HostsBackend::all_reduce_one(const at::Tensor& tensor,
                                                   const c10d::ReduceOp& op, OwnCall how) {
  return all_reduce_all({tensor}, op, std::move(how));
}

HostsBackend::WorkPtr HostsBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  for (const auto& tensor : tensors) require_cpu("all_reduce", tensor);
  return all_reduce_all(tensors, options.reduceOp,
                        {OpType::ALLREDUCE_COALESCED, limit_of(options), tensors, {}});
}

HostsBackend::WorkPtr HostsBackend::all_reduce_all(const Tensors& tensors, const c10d::ReduceOp& op,
                                                   OwnCall how) {
  std::vector<std::pair<FlatTarget, StepReduction>> parts;
  for (const auto& tensor : tensors)
    parts.emplace_back(FlatTarget(tensor, true), step_reduction("all_reduce", tensor, op));
  return post(std::move(how), [parts = std::move(parts)](HostLinks& links, HostCall& call) {
    for (const auto& [target, reduction] : parts) {
      if (target.flat.numel() == 0) continue;
      const at::Tensor data = reduction.widened(target.flat);
      links.all_reduce(call, data, reduction.op);
      reduction.settle(target.flat, data, links.map().size());
      target.settle();
    }
  });
}

HostsBackend::WorkPtr HostsBackend::reduce_one(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                               int root, OwnCall how) {
  const auto reduction = step_reduction("reduce", tensor, op);
  const FlatTarget target(tensor, true);
  return post(std::move(how),
              [target, root, writes = rank_ == root, reduction](HostLinks& links, HostCall& call) {
                if (target.flat.numel() == 0) return;
                const at::Tensor data = reduction.widened(target.flat);
                links.reduce(call, data, reduction.op, root);
                if (!writes) return;
                reduction.settle(target.flat, data, links.map().size());
                target.settle();
              });
}

HostsBackend::WorkPtr HostsBackend::all_gather_counts(const at::Tensor& output,
                                                      const at::Tensor& input, Counts counts,
                                                      OwnCall how) {
  const FlatTarget target(output);
  return post(std::move(how),
              [target, from = flat_values(input), counts = in_bytes(std::move(counts), input)](
                  HostLinks& links, HostCall& call) {
                if (target.flat.numel() == 0) return;
                links.all_gather(call, bytes_of_flat(target.flat), bytes_of_flat(from), counts);
                target.settle();
              });
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
  return post({OpType::_ALLGATHER_BASE, limit_of(options), outputs, {}},
              [parts = std::move(parts)](HostLinks& links, HostCall& call) {
                for (const auto& [target, from] : parts) {
                  if (target.flat.numel() == 0) continue;
                  const Counts counts(static_cast<std::size_t>(links.map().size()), from.numel());
                  links.all_gather(call, bytes_of_flat(target.flat), bytes_of_flat(from),
                                   in_bytes(counts, from));
                  target.settle();
                }
              });
}

HostsBackend::WorkPtr HostsBackend::gather_counts(const at::Tensor& output, const at::Tensor& input,
                                                  Counts counts, int root, OwnCall how) {
  std::optional<FlatTarget> target;
  if (rank_ == root) target.emplace(output);
  const bool nothing = total_of(counts) == 0;
  return post(std::move(how),
              [target, nothing, root, from = flat_values(input),
               counts = in_bytes(std::move(counts), input)](HostLinks& links, HostCall& call) {
                if (nothing) return;
                links.gather(call, target ? bytes_of_flat(target->flat) : at::Tensor(),
                             bytes_of_flat(from), counts, root);
                if (target) target->settle();
              });
}

HostsBackend::WorkPtr HostsBackend::scatter_counts(const at::Tensor& output,
                                                   const at::Tensor& input, Counts counts, int root,
                                                   OwnCall how) {
  at::Tensor from;
  if (rank_ == root) from = bytes_of_flat(flat_values(input));
  const bool nothing = total_of(counts) == 0;
  const FlatTarget target(output);
  return post(std::move(how),
              [target, from, nothing, root, counts = in_bytes(std::move(counts), output)](
                  HostLinks& links, HostCall& call) {
                if (nothing) return;
                links.scatter(call, bytes_of_flat(target.flat), from, counts, root);
                target.settle();
              });
}

HostsBackend::WorkPtr HostsBackend::reduce_scatter_counts(const at::Tensor& output,
                                                          const at::Tensor& input, Counts counts,
                                                          const c10d::ReduceOp& op, OwnCall how) {
  const auto reduction = step_reduction("reduce_scatter", input, op);
  const FlatTarget target(output);
  for (auto& count : counts) count *= reduction.width();
  return post(std::move(how), [target, from = flat_values(input), counts = std::move(counts),
                               reduction](HostLinks& links, HostCall& call) {
    if (from.numel() == 0) return;
    const at::Tensor result = reduction.wide == from.scalar_type()
                                  ? target.flat
                                  : at::empty({target.flat.numel() * reduction.width()},
                                              target.flat.options().dtype(reduction.wide));
    links.reduce_scatter(call, result, reduction.widened(from), counts, reduction.kind,
                         reduction.op);
    reduction.settle(target.flat, result, links.map().size());
    target.settle();
  });
}

HostsBackend::WorkPtr HostsBackend::all_to_all_counts(const at::Tensor& output,
                                                      Counts output_counts, const at::Tensor& input,
                                                      Counts input_counts, OwnCall how) {
  const FlatTarget target(output);
  return post(std::move(how),
              [target, from = flat_values(input), out = in_bytes(std::move(output_counts), output),
               in = in_bytes(std::move(input_counts), input)](HostLinks& links, HostCall& call) {
                links.all_to_all(call, bytes_of_flat(target.flat), out, bytes_of_flat(from), in);
                target.settle();
              });
}

HostsBackend::WorkPtr HostsBackend::barrier(const c10d::BarrierOptions& options) {
  return post({OpType::BARRIER, limit_of(options), {}, {}},
              [](HostLinks& links, HostCall& call) { links.barrier(call); });
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

HostsBackend::WorkPtr HostsBackend::recvAnysource(Tensors& tensors, int tag) {
  // Of two ways on which a message may come, one would take it and the other wait for ever.
  if (links_->map().count() < ranks())
    throw NotAvailable(
        "receive from any rank: some ranks of the group share a host and others do not, so that "
        "messages come through memory or through the network; name the sender");
  return links_->wide().recvAnysource(tensors, tag);
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
