#include "tessera/comm/backends/as_c10d.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/flat.h"
#include "tessera/comm/backends/own_work.h"
#include "tessera/comm/backends/profile_event.h"
#include "tessera/comm/group/detail/reduction.h"

namespace tessera::detail {
namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;

// ---- checks ----

void require_cpu(const char* name, const at::Tensor& tensor) {
  if (!tensor.defined()) throw InvalidArgument(name, ": a tensor is undefined");
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided)
    throw InvalidArgument(name, ": this backend moves dense CPU tensors, and this one is ",
                          tensor.toString(),
                          "; copy it to the CPU, or give the group a backend for its device");
}

const at::Tensor& only(const char* name, const Tensors& tensors) {
  if (tensors.size() != 1)
    throw InvalidArgument(name, " takes one tensor a call, and got ", tensors.size());
  require_cpu(name, tensors.front());
  return tensors.front();
}

void require_same_type(const char* name, const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type())
    throw InvalidArgument(name, ": input is ", c10::toString(a.scalar_type()), " and output ",
                          c10::toString(b.scalar_type()), "; they must be the same");
}

void require_numel(const char* name, const char* which, const at::Tensor& tensor,
                   std::int64_t expected) {
  if (tensor.numel() != expected)
    throw InvalidArgument(name, ": the ", which, " holds ", tensor.numel(), " elements, and ",
                          expected, " are needed");
}

/// Converts rows to elements; a row of `like` has the elements of its dims after the first. Throws
/// InvalidArgument if the sums overflow.
TransportCall::Counts elements_of(const TransportCall::Counts& rows, const at::Tensor& like) {
  const std::int64_t row = row_numel(like);
  TransportCall::Counts result = rows;
  std::int64_t sum = 0;
  for (auto& n : result)
    // A product that wrapped around would pass for the size of a small tensor.
    if (__builtin_mul_overflow(n, row, &n) || __builtin_add_overflow(sum, n, &sum))
      throw InvalidArgument("sizes ", list(rows), " of rows of ", row,
                            " elements are more than any tensor has");
  return result;
}

// ---- memory ----

/// Memory for a result: the tensor's own, or some that is copied to it at the end.
at::Tensor target_of(TransportCall& call, const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  call.results = {tensor};
  if (is_plain(tensor)) return flat(tensor);
  const at::Tensor scratch = at::empty({tensor.numel()}, tensor.options());
  call.finish = [tensor, scratch] { tensor.copy_(scratch.view(tensor.sizes())); };
  return scratch;
}

/// As above, for a list of tensors that lie one after the other.
at::Tensor target_of(TransportCall& call, const Tensors& tensors) {
  call.results = tensors;
  const at::Tensor whole = at::empty({total_of(numels(tensors))}, tensors.front().options());
  call.finish = [tensors, whole] {
    const auto parts = split_flat(whole, numels(tensors));
    for (std::size_t r = 0; r < tensors.size(); ++r)
      tensors[r].copy_(parts[r].view(tensors[r].sizes()));
  };
  return whole;
}

at::Tensor values_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return flat(plain(tensor));
}

/// The values of several tensors, one after the other.
at::Tensor values_of(const Tensors& tensors) {
  const at::NoGradGuard no_grad;
  return at::cat(mapped(tensors, [](const at::Tensor& t) { return values_of(t); }));
}

/// Sets what the transport reduces by. Throws InvalidArgument if it cannot do that exactly.
Recipe c10d_reduction(TransportCall& call, const char* name, const Abilities& can,
                      const at::Tensor& tensor, const c10d::ReduceOp& op,
                      Abilities::Reduces reduces) {
  const auto dtype = tensor.scalar_type();
  call.bits = op.op_ == c10d::ReduceOp::BAND   ? Bits::bit_and
              : op.op_ == c10d::ReduceOp::BOR  ? Bits::bit_or
              : op.op_ == c10d::ReduceOp::BXOR ? Bits::bit_xor
                                               : Bits::none;
  Recipe recipe{ReduceOp::sum, dtype};
  if (const auto known = from_c10d(op)) {
    if (!reduces(dtype, known->kind)) check_reducible(name, dtype, known->kind);
    recipe = recipe_of(reduces, dtype, *known);
    call.op = recipe.op;
    if (!recipe.compose) return recipe;
  } else if (call.bits != Bits::none && can.reduces_bits &&
             c10::isIntegralType(dtype, /*includeBool=*/true)) {
    return recipe;
  }
  throw InvalidArgument(name, ": ", c10::toString(dtype),
                        " has no such reduction over this backend; the calls of "
                        "tessera::Group have more");
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> Transport::backend() {
  return c10::make_intrusive<AsC10d>(shared_from_this());
}

AsC10d::AsC10d(std::shared_ptr<Transport> transport)
    : c10d::Backend(transport->rank(), transport->size()),
      transport_(std::move(transport)),
      can_(transport_->abilities()),
      timeout_(transport_->timeout()) {
  init();
}

c10::intrusive_ptr<c10d::Backend::Options> AsC10d::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_);
}

AsC10d::WorkPtr AsC10d::hand(TransportCall& call, Transport::Function make) {
  call.timeout = bounded_limit(call.timeout.count() > 0 ? call.timeout : timeout_);
  if (call.messages.empty()) ++sequence_;
  ProfileEvent event(call);
  (transport_.get()->*make)(call);
  if (!call.works.empty()) return event.end_with(std::move(call.works.front().work));
  if (call.finish) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    call.finish();
  }
  return c10::make_intrusive<DoneWork>(rank_, call.type, std::move(call.results));
}

template <class How>
TransportCall AsC10d::call_of(OpType type, const How& options) const {
  TransportCall call;
  call.type = type;
  call.timeout = options.timeout;
  call.blocking = !options.asyncOp;
  return call;
}

int AsC10d::required_rank(std::int64_t rank, const char* what) const {
  if (rank < 0 || rank >= size_)
    throw InvalidArgument(what, " is rank ", rank, " in a group of ", size_, " ranks");
  return static_cast<int>(rank);
}

void AsC10d::require_list(const TensorLists& lists, const char* name, const char* what) const {
  if (lists.size() != 1 || static_cast<int>(lists.front().size()) != size_)
    throw InvalidArgument(name, " needs one list of ", size_, ' ', what);
  for (const auto& t : lists.front()) {
    require_cpu(name, t);
    require_same_type(name, lists.front().front(), t);
  }
}

void AsC10d::require_each(const Tensors& wholes, const Tensors& parts, const char* name) const {
  if (wholes.size() != parts.size())
    throw InvalidArgument(name, " of several tensors needs as many inputs as outputs, and got ",
                          parts.size(), " and ", wholes.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    require_cpu(name, parts[i]);
    require_cpu(name, wholes[i]);
    require_same_type(name, parts[i], wholes[i]);
    require_numel(name, "tensor of all ranks", wholes[i], parts[i].numel() * size_);
  }
}

AsC10d::Counts AsC10d::counts_of_splits(const at::Tensor& tensor, const Counts& splits,
                                        const char* which) const {
  if (!splits.empty()) {
    if (static_cast<int>(splits.size()) != size_)
      throw InvalidArgument("all_to_all: ", splits.size(), " sizes for ", size_,
                            " ranks: ", list(splits));
    if (std::ranges::any_of(splits, [](std::int64_t n) { return n < 0; }))
      throw InvalidArgument("all_to_all: a size is negative: ", list(splits));
    Counts counts = elements_of(splits, tensor);
    require_numel("all_to_all", which, tensor, total_of(counts));
    return counts;
  }
  if (tensor.numel() % size_ != 0)
    throw InvalidArgument("all_to_all: the ", which, " of ", tensor.numel(),
                          " elements cannot be divided among ", size_, " ranks; give sizes");
  return Counts(size_, tensor.numel() / size_);
}

// ---- one tensor ----

AsC10d::WorkPtr AsC10d::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only("broadcast", tensors);
  TransportCall call = call_of(OpType::BROADCAST, options);
  call.root = required_rank(options.rootRank, "the root of broadcast");
  call.output = rank_ == call.root ? values_of(tensor) : target_of(call, tensor);
  call.results = {tensor};
  return hand(call, &Transport::broadcast);
}

AsC10d::WorkPtr AsC10d::reduced(TransportCall& call, const char* name, const at::Tensor& tensor,
                                const c10d::ReduceOp& op, bool writes, Transport::Function make) {
  const at::NoGradGuard no_grad;
  const Recipe recipe = c10d_reduction(call, name, can_, tensor, op, can_.reduces);
  call.output = recipe.outgoing(tensor, writes);
  call.results = {tensor};
  if (writes && recipe.settles(tensor, call.output))
    call.finish = [=, result = call.output, n = size_] { recipe.settle(tensor, result, n); };
  return hand(call, make);
}

AsC10d::WorkPtr AsC10d::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only("all_reduce", tensors);
  TransportCall call = call_of(OpType::ALLREDUCE, options);
  return reduced(call, "all_reduce", tensor, options.reduceOp, true, &Transport::all_reduce);
}

AsC10d::WorkPtr AsC10d::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only("reduce", tensors);
  TransportCall call = call_of(OpType::REDUCE, options);
  call.root = required_rank(options.rootRank, "the root of reduce");
  return reduced(call, "reduce", tensor, options.reduceOp, rank_ == call.root, &Transport::reduce);
}

AsC10d::WorkPtr AsC10d::_allgather_base(at::Tensor& output, at::Tensor& input,
                                        const c10d::AllgatherOptions& options) {
  require_each({output}, {input}, "all_gather");
  TransportCall call = call_of(OpType::_ALLGATHER_BASE, options);
  call.input = values_of(input);
  call.output = target_of(call, output);
  call.counts.assign(size_, input.numel());
  return hand(call, &Transport::all_gather);
}

AsC10d::WorkPtr AsC10d::reduce_scatter(TransportCall& call, const at::Tensor& output,
                                       const at::Tensor& input, Counts counts,
                                       const c10d::ReduceOp& op) {
  const at::NoGradGuard no_grad;
  const Recipe recipe = c10d_reduction(call, "reduce_scatter", can_, input, op,
                                       can_.reduce_scatters ? can_.reduce_scatters : can_.reduces);
  require_numel("reduce_scatter", "output", output, counts[rank_]);
  call.input = flat(recipe.outgoing(input, false));
  call.counts = times(std::move(counts), recipe.width());
  call.results = {output};
  // Into memory of its own where the output may be a part of the input.
  const bool direct =
      recipe.wire_type() == output.scalar_type() && is_plain(output) && !output.is_alias_of(input);
  call.output = direct ? flat(output)
                       : at::empty({output.numel() * recipe.width()},
                                   output.options().dtype(recipe.wire_type()));
  if (output.numel() > 0 && recipe.settles(output, call.output))
    call.finish = [=, result = call.output, n = size_] { recipe.settle(output, result, n); };
  return hand(call, &Transport::reduce_scatter);
}

AsC10d::WorkPtr AsC10d::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::ReduceScatterOptions& options) {
  require_each({input}, {output}, "reduce_scatter");
  TransportCall call = call_of(OpType::_REDUCE_SCATTER_BASE, options);
  return reduce_scatter(call, output, input, Counts(size_, output.numel()), options.reduceOp);
}

AsC10d::WorkPtr AsC10d::alltoall_base(at::Tensor& output, at::Tensor& input,
                                      std::vector<std::int64_t>& output_splits,
                                      std::vector<std::int64_t>& input_splits,
                                      const c10d::AllToAllOptions& options) {
  require_cpu("all_to_all", output);
  require_cpu("all_to_all", input);
  require_same_type("all_to_all", input, output);
  TransportCall call = call_of(OpType::ALLTOALL_BASE, options);
  call.counts = counts_of_splits(output, output_splits, "output");
  call.input_counts = counts_of_splits(input, input_splits, "input");
  call.input = values_of(input);
  call.output = target_of(call, output);
  return hand(call, &Transport::all_to_all);
}

// ---- lists ----

AsC10d::WorkPtr AsC10d::allgather(TensorLists& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only("all_gather", inputs);
  require_list(outputs, "all_gather", "outputs");
  const Tensors& out = outputs.front();
  require_same_type("all_gather", input, out.front());
  TransportCall call = call_of(OpType::ALLGATHER, options);
  call.counts = numels(out);
  require_numel("all_gather", "input", input, call.counts[rank_]);
  call.input = values_of(input);
  call.output = target_of(call, out);
  return hand(call, &Transport::all_gather);
}

AsC10d::WorkPtr AsC10d::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& options) {
  constexpr auto kName = "all_gather of several tensors";
  if (inputs.empty() || static_cast<int>(outputs.size()) != size_)
    throw InvalidArgument(kName, " needs tensors and a list of outputs for each of ", size_,
                          " ranks, and got ", inputs.size(), " tensors and ", outputs.size(),
                          " lists");
  const at::NoGradGuard no_grad;
  Tensors bytes, results;
  for (const auto& t : inputs) {
    require_cpu(kName, t);
    bytes.push_back(flat_bytes(plain(t)));
  }
  for (const auto& list : outputs) {
    if (list.size() != inputs.size())
      throw InvalidArgument(kName, ": a list of ", list.size(), " outputs for ", inputs.size(),
                            " inputs");
    for (std::size_t i = 0; i < list.size(); ++i) {
      require_cpu(kName, list[i]);
      require_same_type(kName, inputs[i], list[i]);
      require_numel(kName, "output", list[i], inputs[i].numel());
      results.push_back(list[i]);
    }
  }
  TransportCall call = call_of(OpType::ALLGATHER_COALESCED, options);
  call.input = at::cat(bytes);
  call.counts.assign(size_, call.input.numel());
  call.output = at::empty({call.input.numel() * size_}, call.input.options());
  call.results = results;
  call.finish = [all = call.output, results] {
    std::int64_t start = 0;
    for (const auto& result : results) {
      const auto size = static_cast<std::int64_t>(result.nbytes());
      // A copy, since elements that others follow need not begin at a multiple of their size.
      const at::Tensor part = all.narrow(0, start, size).clone();
      result.copy_(part.view(result.scalar_type()).view(result.sizes()));
      start += size;
    }
  };
  return hand(call, &Transport::all_gather);
}

AsC10d::WorkPtr AsC10d::rooted(TransportCall& call, const at::Tensor& part,
                               const TensorLists& lists, bool gathers) {
  const char* name = gathers ? "gather" : "scatter";
  call.counts.assign(size_, part.numel());
  if (rank_ == call.root) {
    require_list(lists, name, gathers ? "outputs on its root" : "inputs on its root");
    const Tensors& all = lists.front();
    require_same_type(name, gathers ? part : all.front(), gathers ? all.front() : part);
    if (can_.gathers_any_sizes) call.counts = numels(all);
    for (std::size_t r = 0; r < all.size(); ++r)
      if (!can_.gathers_any_sizes || r == static_cast<std::size_t>(rank_))
        require_numel(name, gathers ? "output" : "input", all[r], part.numel());
    (gathers ? call.output : call.input) = gathers ? target_of(call, all) : values_of(all);
  }
  if (!can_.gathers_any_sizes)
    return hand(call, gathers ? &Transport::gather : &Transport::scatter);
  // Each rank gives its own counts: the others do not know the sizes of the root's.
  rooted_as_all_to_all(call, rank_, gathers);
  call.agreed = false;
  return hand(call, &Transport::all_to_all);
}

AsC10d::WorkPtr AsC10d::gather(TensorLists& outputs, Tensors& inputs,
                               const c10d::GatherOptions& options) {
  const at::Tensor& input = only("gather", inputs);
  TransportCall call = call_of(OpType::GATHER, options);
  call.root = required_rank(options.rootRank, "the root of gather");
  call.input = values_of(input);
  return rooted(call, input, outputs, true);
}

AsC10d::WorkPtr AsC10d::scatter(Tensors& outputs, TensorLists& inputs,
                                const c10d::ScatterOptions& options) {
  const at::Tensor& output = only("scatter", outputs);
  TransportCall call = call_of(OpType::SCATTER, options);
  call.root = required_rank(options.rootRank, "the root of scatter");
  call.output = target_of(call, output);
  return rooted(call, output, inputs, false);
}

AsC10d::WorkPtr AsC10d::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                       const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only("reduce_scatter", outputs);
  require_list(inputs, "reduce_scatter", "inputs");
  require_same_type("reduce_scatter", inputs.front().front(), output);
  TransportCall call = call_of(OpType::REDUCE_SCATTER, options);
  return reduce_scatter(call, output, values_of(inputs.front()), numels(inputs.front()),
                        options.reduceOp);
}

AsC10d::WorkPtr AsC10d::alltoall(Tensors& outputs, Tensors& inputs,
                                 const c10d::AllToAllOptions& options) {
  require_list({outputs}, "all_to_all", "outputs");
  require_list({inputs}, "all_to_all", "inputs");
  require_same_type("all_to_all", inputs.front(), outputs.front());
  const auto me = static_cast<std::size_t>(rank_);
  require_numel("all_to_all", "input to this rank itself", inputs[me], outputs[me].numel());
  TransportCall call = call_of(OpType::ALLTOALL, options);
  call.counts = numels(outputs);
  call.input_counts = numels(inputs);
  call.input = values_of(inputs);
  call.output = target_of(call, outputs);
  return hand(call, &Transport::all_to_all);
}

AsC10d::WorkPtr AsC10d::in_turn(const Tensors& results,
                                const std::function<WorkPtr(std::size_t)>& make) const {
  return c10::make_intrusive<WorksInTurn>(rank_, results,
                                          mapped(numbers_below(results.size()), make));
}

AsC10d::WorkPtr AsC10d::allreduce_coalesced(Tensors& tensors,
                                            const c10d::AllreduceCoalescedOptions& options) {
  for (const auto& t : tensors) require_cpu("all_reduce of several tensors", t);
  return in_turn(tensors, [&](std::size_t i) {
    Tensors one{tensors[i]};
    return allreduce(one, options);
  });
}

AsC10d::WorkPtr AsC10d::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& options) {
  require_each(outputs, inputs, "all_gather");
  return in_turn(outputs,
                 [&](std::size_t i) { return _allgather_base(outputs[i], inputs[i], options); });
}

AsC10d::WorkPtr AsC10d::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::ReduceScatterOptions& options) {
  // All are checked before the first begins: this rank would be a call ahead of the others.
  require_each(inputs, outputs, "reduce_scatter");
  return in_turn(
      outputs, [&](std::size_t i) { return _reduce_scatter_base(outputs[i], inputs[i], options); });
}

// ---- messages and barriers ----

AsC10d::WorkPtr AsC10d::message(Message::Kind kind, OpType type, const at::Tensor& tensor, int peer,
                                int tag) {
  if (tag < 0) throw InvalidArgument("message tag ", tag, " is negative");
  TransportCall call;
  call.type = type;
  call.tag = tag;
  const bool sends = kind == Message::Kind::send;
  call.messages = {{kind, sends ? values_of(tensor) : target_of(call, tensor), peer}};
  return hand(call, &Transport::exchange);
}

AsC10d::WorkPtr AsC10d::send(Tensors& tensors, int to, int tag) {
  return message(Message::Kind::send, OpType::SEND, only("send", tensors),
                 required_rank(to, "the receiver of send"), tag);
}

AsC10d::WorkPtr AsC10d::recv(Tensors& tensors, int from, int tag) {
  return message(Message::Kind::receive, OpType::RECV, only("receive", tensors),
                 required_rank(from, "the sender of receive"), tag);
}

AsC10d::WorkPtr AsC10d::recvAnysource(Tensors& tensors, int tag) {
  return message(Message::Kind::receive, OpType::RECVANYSOURCE,
                 only("receive from any rank", tensors), TransportCall::kAnyRank, tag);
}

AsC10d::WorkPtr AsC10d::barrier(const c10d::BarrierOptions& options) {
  TransportCall call = call_of(OpType::BARRIER, options);
  return hand(call, &Transport::barrier);
}

}  // namespace tessera::detail
