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

// The limits of the steps begin later than that of the call, which is the one that counts: its
// error names the ranks that are missing.
constexpr std::chrono::milliseconds kStepSlack{2000};

/// How a reduction is done in steps that are exact: each host's result is rounded, so the steps do
/// what Gloo does exactly.
struct StepReduction {
  Recipe recipe;
  double factor = 1;

  c10d::ReduceOp op() const { return to_c10d(recipe.op); }
  /// May share memory with `flat`.
  at::Tensor widened(const at::Tensor& flat) const {
    at::Tensor result = flat.to(recipe.wide);
    if (recipe.scale) result = result.mul(factor);
    return recipe.wire(result).view({-1});
  }
  /// Ends the reduction over `ranks` of `result`, and rounds it into `flat`.
  void settle(const at::Tensor& flat, const at::Tensor& result, int ranks) const {
    if (recipe.keys) {
      const at::Tensor decoded = at::empty(flat.sizes(), flat.options().dtype(recipe.wide));
      from_order_keys(decoded, result, recipe.op);
      flat.copy_(decoded);
      return;
    }
    if (recipe.divide) result.div_(ranks);
    if (result.const_data_ptr() == flat.const_data_ptr()) return;
    flat.copy_(recipe.real ? at::view_as_complex(result.view({-1, 2})) : result);
  }
};

StepReduction step_reduction(const char* name, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const auto known = from_c10d(op);
  if (known) {
    check_reducible(name, tensor.scalar_type(), known->kind);
    const Recipe recipe = recipe_of(gloo_reduces, tensor.scalar_type(), known->kind);
    if (!recipe.compose) return {recipe, known->factor};
  }
  throw InvalidArgument(
      concat(name, ": between hosts ", c10::toString(tensor.scalar_type()),
             " has no such reduction; there are no operations on bits and no products of complex "
             "numbers. The calls of tessera::Group do the latter"));
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

Abilities HostsBackend::abilities() {
  Abilities result = own_abilities(gloo_reduces);
  result.moves = every_library_moves;
  result.signs_uneven = result.ends_messages = true;
  return result;
}

HostsBackend::WorkPtr HostsBackend::post(OwnCall& how, Body body) {
  HostCall call;
  call.sign = std::exchange(signature_, 0);
  call.limit = bounded_limit(limit_of_call(how.limit) + kStepSlack);
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

HostsBackend::WorkPtr HostsBackend::broadcast_one(OwnCall how) {
  const bool writes = rank_ != how.root;
  const FlatTarget target(how.output, !writes);
  return post(how, [target, root = how.root, writes](HostLinks& links, HostCall& call) {
    if (target.flat.numel() == 0) return;
    links.broadcast(call, bytes_of_flat(target.flat), root);
    if (writes) target.settle();
  });
}

HostsBackend::WorkPtr HostsBackend::all_reduce_one(OwnCall how) {
  const auto reduction = step_reduction("all_reduce", how.output, how.op);
  const FlatTarget target(how.output, true);
  return post(how, [target, reduction](HostLinks& links, HostCall& call) {
    if (target.flat.numel() == 0) return;
    const at::Tensor data = reduction.widened(target.flat);
    links.all_reduce(call, data, reduction.op());
    reduction.settle(target.flat, data, links.map().size());
    target.settle();
  });
}

HostsBackend::WorkPtr HostsBackend::reduce_one(OwnCall how) {
  const auto reduction = step_reduction("reduce", how.output, how.op);
  const FlatTarget target(how.output, true);
  return post(how, [target, root = how.root, writes = rank_ == how.root, reduction](
                       HostLinks& links, HostCall& call) {
    if (target.flat.numel() == 0) return;
    const at::Tensor data = reduction.widened(target.flat);
    links.reduce(call, data, reduction.op(), root);
    if (!writes) return;
    reduction.settle(target.flat, data, links.map().size());
    target.settle();
  });
}

HostsBackend::WorkPtr HostsBackend::all_gather_counts(OwnCall how) {
  const FlatTarget target(how.output);
  return post(
      how, [target, from = flat_values(how.input),
            counts = in_bytes(std::move(how.counts), how.input)](HostLinks& links, HostCall& call) {
        if (target.flat.numel() == 0) return;
        links.all_gather(call, bytes_of_flat(target.flat), bytes_of_flat(from), counts);
        target.settle();
      });
}

HostsBackend::WorkPtr HostsBackend::gather_counts(OwnCall how) {
  std::optional<FlatTarget> target;
  if (rank_ == how.root) target.emplace(how.output);
  const bool nothing = total_of(how.counts) == 0;
  return post(
      how, [target, nothing, root = how.root, from = flat_values(how.input),
            counts = in_bytes(std::move(how.counts), how.input)](HostLinks& links, HostCall& call) {
        if (nothing) return;
        links.gather(call, target ? bytes_of_flat(target->flat) : at::Tensor(), bytes_of_flat(from),
                     counts, root);
        if (target) target->settle();
      });
}

HostsBackend::WorkPtr HostsBackend::scatter_counts(OwnCall how) {
  at::Tensor from;
  if (rank_ == how.root) from = bytes_of_flat(flat_values(how.input));
  const bool nothing = total_of(how.counts) == 0;
  const FlatTarget target(how.output);
  return post(how, [target, from, nothing, root = how.root,
                    counts = in_bytes(std::move(how.counts), how.output)](HostLinks& links,
                                                                          HostCall& call) {
    if (nothing) return;
    links.scatter(call, bytes_of_flat(target.flat), from, counts, root);
    target.settle();
  });
}

HostsBackend::WorkPtr HostsBackend::reduce_scatter_counts(OwnCall how) {
  const auto reduction = step_reduction("reduce_scatter", how.input, how.op);
  const auto width = reduction.recipe.width();
  const FlatTarget target(how.output);
  for (auto& count : how.counts) count *= width;
  return post(how, [target, from = flat_values(how.input), counts = std::move(how.counts), width,
                    reduction](HostLinks& links, HostCall& call) {
    if (from.numel() == 0) return;
    const auto travels = reduction.recipe.wire_type();
    const at::Tensor result =
        travels == from.scalar_type()
            ? target.flat
            : at::empty({target.flat.numel() * width}, target.flat.options().dtype(travels));
    links.reduce_scatter(call, result, reduction.widened(from), counts, reduction.recipe.op,
                         reduction.op());
    reduction.settle(target.flat, result, links.map().size());
    target.settle();
  });
}

HostsBackend::WorkPtr HostsBackend::all_to_all_counts(OwnCall how) {
  const FlatTarget target(how.output);
  return post(
      how,
      [target, from = flat_values(how.input), out = in_bytes(std::move(how.counts), how.output),
       in = in_bytes(std::move(how.input_counts), how.input)](HostLinks& links, HostCall& call) {
        links.all_to_all(call, bytes_of_flat(target.flat), out, bytes_of_flat(from), in);
        target.settle();
      });
}

HostsBackend::WorkPtr HostsBackend::all_to_all_each(const Tensors& inputs, OwnCall how) {
  const Tensors outputs = how.results;
  for (const auto* list : {&inputs, &outputs})
    for (const auto& t : *list) require_same_type("all_to_all", t, inputs.front());
  const Flat from = flattened(inputs), to = flattened(outputs);
  for (std::size_t r = 0; r < inputs.size(); ++r) from.parts[r].copy_(inputs[r]);
  how.output = to.whole;
  how.input = from.whole;
  how.counts = numels(outputs);
  how.input_counts = numels(inputs);
  how.finish = [to, outputs] {
    for (std::size_t r = 0; r < outputs.size(); ++r) outputs[r].copy_(to.parts[r]);
  };
  return all_to_all_counts(std::move(how));
}

HostsBackend::WorkPtr HostsBackend::barrier(const c10d::BarrierOptions& options) {
  OwnCall how;
  how.type = c10d::OpType::BARRIER;
  how.limit = limit_of(options);
  return post(how, [](HostLinks& links, HostCall& call) { links.barrier(call); });
}

// ---- messages ----

HostsBackend::WorkPtr HostsBackend::send(Tensors& tensors, int to, int tag) {
  required_rank(to, "the receiver of send");
  if (!links_->is_near(to)) return links_->wide().send(tensors, to, tag);
  if (!links_->near()) throw InvalidArgument("send: a rank does not send to itself");
  return links_->near()->send(tensors, links_->map().place_of[static_cast<std::size_t>(to)], tag);
}

HostsBackend::WorkPtr HostsBackend::recv(Tensors& tensors, int from, int tag) {
  required_rank(from, "the sender of receive");
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
    required_rank(m.peer, "a peer of exchange");
    if (!links_->is_near(m.peer) || !links_->near_uneven())
      throw InvalidArgument(concat("exchange: rank ", m.peer,
                                   " of the group is on another host; send and receive by tags"));
    near.push_back({m.kind, m.tensor, links_->map().place_of[static_cast<std::size_t>(m.peer)]});
  }
  return links_->near_uneven()->exchange(near, limit);
}

}  // namespace tessera::detail
