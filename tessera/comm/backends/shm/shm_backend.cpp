#include "tessera/comm/backends/shm/shm_backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "tessera/base/deadline.h"
#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/arguments.h"
#include "tessera/comm/group/detail/backend_calls.h"

namespace tessera::detail {

namespace {

using c10d::OpType;

// Tags of messages: those of c10d have 31 bits.
constexpr std::uint32_t kExchangeTag = 0x80000000U, kListTag = 0xc0000000U;

template <class Options>
CallLimit shm_limit(const Options& options) {
  return {options.timeout, !options.asyncOp};
}

std::optional<shm::Element> element_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Bool:
      return shm::Element::boolean;
    case c10::ScalarType::Char:
      return shm::Element::int8;
    case c10::ScalarType::Byte:
      return shm::Element::uint8;
    case c10::ScalarType::Short:
      return shm::Element::int16;
    case c10::ScalarType::UInt16:
      return shm::Element::uint16;
    case c10::ScalarType::Int:
      return shm::Element::int32;
    case c10::ScalarType::UInt32:
      return shm::Element::uint32;
    case c10::ScalarType::Long:
      return shm::Element::int64;
    case c10::ScalarType::UInt64:
      return shm::Element::uint64;
    case c10::ScalarType::Half:
      return shm::Element::half;
    case c10::ScalarType::BFloat16:
      return shm::Element::bfloat16;
    case c10::ScalarType::Float:
      return shm::Element::float32;
    case c10::ScalarType::Double:
      return shm::Element::float64;
    case c10::ScalarType::ComplexFloat:
      return shm::Element::complex64;
    case c10::ScalarType::ComplexDouble:
      return shm::Element::complex128;
    default:
      return std::nullopt;
  }
}

shm::Reduction::Kind kind_of(ReduceOp::Kind op) {
  switch (op) {
    case ReduceOp::Kind::sum:
      return shm::Reduction::Kind::sum;
    case ReduceOp::Kind::avg:
      return shm::Reduction::Kind::average;
    case ReduceOp::Kind::product:
      return shm::Reduction::Kind::product;
    case ReduceOp::Kind::min:
      return shm::Reduction::Kind::min;
    case ReduceOp::Kind::max:
      return shm::Reduction::Kind::max;
    case ReduceOp::Kind::premultiplied:
      return shm::Reduction::Kind::premultiplied;
  }
  return shm::Reduction::Kind::sum;
}

shm::Reduction reduction_of(const c10d::ReduceOp& op) {
  using Kind = shm::Reduction::Kind;
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return {Kind::sum};
    case c10d::ReduceOp::AVG:
      return {Kind::average};
    case c10d::ReduceOp::PRODUCT:
      return {Kind::product};
    case c10d::ReduceOp::MIN:
      return {Kind::min};
    case c10d::ReduceOp::MAX:
      return {Kind::max};
    case c10d::ReduceOp::BAND:
      return {Kind::bit_and};
    case c10d::ReduceOp::BOR:
      return {Kind::bit_or};
    case c10d::ReduceOp::BXOR:
      return {Kind::bit_xor};
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (!factor || factor->tensor_factor.defined())
        throw InvalidArgument("a premultiplied sum over shared memory takes a number as factor");
      return {Kind::premultiplied, factor->double_factor};
    }
    default:
      throw InvalidArgument(
          "shared memory reduces by sum, product, min, max, average, premultiplied sum and bits");
  }
}

/// What a reduction works on. Throws InvalidArgument if there is no such reduction.
struct Reduces {
  shm::Element element;
  shm::Reduction reduction;
};

Reduces reduces_of(const char* name, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const auto element = element_of(tensor.scalar_type());
  const auto reduction = reduction_of(op);
  if (!element || !shm::reduces(*element, reduction.kind))
    throw InvalidArgument(concat(name, ": ", c10::toString(tensor.scalar_type()),
                                 " has no reduction by ", to_string(reduction.kind),
                                 " over shared memory"));
  return {*element, reduction};
}

/// Memory that the other ranks may read: the tensor's own if it is in row-major order, else a copy.
const void* readable(ShmCall& call, const at::Tensor& tensor) {
  const at::Tensor plain =
      is_plain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
  call.tensors.push_back(plain);
  return plain.const_data_ptr();
}

/// Memory for a result: the tensor's own, or some that is copied to it at the end. `filled`: with
/// the tensor's values.
void* target_of(ShmCall& call, const at::Tensor& tensor, bool filled = false) {
  if (is_plain(tensor)) {
    call.tensors.push_back(tensor);
    return tensor.mutable_data_ptr();
  }
  const at::Tensor scratch =
      at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  if (filled) scratch.copy_(tensor);
  call.tensors.push_back(scratch);
  call.finish.emplace_back([tensor, scratch] { tensor.copy_(scratch); });
  return scratch.mutable_data_ptr();
}

std::vector<std::size_t> sizes_in(std::size_t unit, const std::vector<std::int64_t>& counts) {
  std::vector<std::size_t> result;
  for (const auto n : counts) result.push_back(static_cast<std::size_t>(n) * unit);
  return result;
}

std::vector<std::int64_t> alike(int ranks, std::int64_t count) {
  return std::vector<std::int64_t>(static_cast<std::size_t>(ranks), count);
}

std::uint8_t type_of(const at::Tensor& tensor) {
  return static_cast<std::uint8_t>(tensor.scalar_type());
}

shm::Message message_of(ShmCall& call, bool sends, const at::Tensor& tensor, int peer,
                        std::uint32_t tag) {
  shm::Message message;
  message.kind = sends ? shm::Message::Kind::send : shm::Message::Kind::receive;
  message.data = sends ? const_cast<void*>(readable(call, tensor)) : target_of(call, tensor);
  message.bytes = tensor.nbytes();
  message.peer = peer;
  message.tag = tag;
  message.type = type_of(tensor);
  return message;
}

ShmCall call_of(const char* name, OpType type, std::vector<at::Tensor> results = {}) {
  ShmCall call;
  call.name = name;
  call.type = type;
  call.results = std::move(results);
  return call;
}

}  // namespace

ShmBackend::ShmBackend(std::shared_ptr<ShmLink> link, std::chrono::milliseconds timeout)
    : c10d::Backend(link->rank(), link->size()), link_(std::move(link)), timeout_(timeout) {
  init();
}

ShmBackend::~ShmBackend() { link_->close(); }

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>("shm", timeout_);
}

bool ShmBackend::reduces(c10::ScalarType dtype, ReduceOp::Kind op) const {
  // libtorch divides a complex number by a real one with other rounding.
  if (op == ReduceOp::Kind::avg && c10::isComplexType(dtype)) return false;
  const auto element = element_of(dtype);
  return element && shm::reduces(*element, kind_of(op));
}

void ShmBackend::require_rank(int rank, const char* what) const {
  if (rank < 0 || rank >= ranks())
    throw InvalidArgument(concat(what, " is rank ", rank, " in a group of ", ranks(), " ranks"));
}

void ShmBackend::require_sizes(const Counts& sizes, const char* name) const {
  if (static_cast<int>(sizes.size()) != ranks())
    throw InvalidArgument(
        concat(name, ": ", sizes.size(), " sizes for ", ranks(), " ranks: ", list(sizes)));
  if (std::any_of(sizes.begin(), sizes.end(), [](std::int64_t n) { return n < 0; }))
    throw InvalidArgument(concat(name, ": a size is negative: ", list(sizes)));
}

std::uint64_t ShmBackend::signature(c10::ScalarType dtype) {
  const auto call = signature_;
  signature_ = 0;
  return Hash().number(call).number(static_cast<std::uint64_t>(dtype)).value();
}

shm::Call ShmBackend::options(ShmCall& call, CallLimit limit, std::uint64_t sign) {
  call.timeout = bounded_limit(limit.timeout.count() > 0 ? limit.timeout : timeout_);
  sequence_.fetch_add(1, std::memory_order_relaxed);
  return {call.timeout, sign};
}

template <class Block, class Start>
ShmBackend::WorkPtr ShmBackend::run(ShmCall call, CallLimit limit, std::uint64_t sign,
                                    const Block& block, const Start& start) {
  if (!limit.blocking)
    return run_all(
        std::move(call), limit, sign,
        [&](std::vector<shm::Request>& requests, shm::Call o) { requests.push_back(start(o)); });
  const shm::Call o = options(call, limit, sign);
  try {
    block(o);
  } catch (const InvalidArgument&) {
    throw;
  } catch (const Error&) {
    link_->rethrow();
  }
  return c10::make_intrusive<ShmWork>(link_, std::move(call));
}

template <class Start>
ShmBackend::WorkPtr ShmBackend::run_all(ShmCall call, CallLimit limit, std::uint64_t sign,
                                        const Start& start) {
  const shm::Call o = options(call, limit, sign);
  std::vector<shm::Request> requests;
  try {
    start(requests, o);
  } catch (const InvalidArgument&) {
    throw;
  } catch (const Error&) {
    link_->rethrow();
  }
  auto work = c10::make_intrusive<ShmWork>(link_, std::move(call), std::move(requests));
  if (limit.blocking)
    work->wait();
  else if (!work->isCompleted())
    link_->follow(work);
  return work;
}

template <class Start>
ShmBackend::WorkPtr ShmBackend::run_messages(ShmCall call, CallLimit limit, std::uint64_t sign,
                                             const Start& start) {
  const char* name = call.name;
  return run_all(std::move(call), limit, sign,
                 [&](std::vector<shm::Request>& requests, shm::Call o) {
                   requests.push_back(start(o));
                   requests.push_back(group().start_barrier(o, name));
                 });
}

// ---- collectives ----

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = only("broadcast", tensors);
  const int root = static_cast<int>(options.rootRank);
  require_rank(root, "the root of broadcast");
  auto call = call_of("broadcast", OpType::BROADCAST, {tensor});
  void* data = rank_ == root ? const_cast<void*>(readable(call, tensor)) : target_of(call, tensor);
  return run(
      std::move(call), shm_limit(options), signature(tensor.scalar_type()),
      [&](shm::Call o) { group().broadcast(data, tensor.nbytes(), root, o); },
      [&](shm::Call o) { return group().start_broadcast(data, tensor.nbytes(), root, o); });
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor tensor = only("all_reduce", tensors);
  const auto [element, reduction] = reduces_of("all_reduce", tensor, options.reduceOp);
  auto call = call_of("all_reduce", OpType::ALLREDUCE, {tensor});
  void* data = target_of(call, tensor, true);
  const auto count = static_cast<std::size_t>(tensor.numel());
  return run(
      std::move(call), shm_limit(options), signature(tensor.scalar_type()),
      [&, e = element, r = reduction](shm::Call o) {
        group().all_reduce(data, data, count, e, r, o);
      },
      [&, e = element, r = reduction](shm::Call o) {
        return group().start_all_reduce(data, data, count, e, r, o);
      });
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto call = call_of("all_reduce of several tensors", OpType::ALLREDUCE_COALESCED, tensors);
  std::vector<std::pair<void*, Reduces>> parts;
  for (const auto& t : tensors) {
    require_cpu(call.name, t);
    const auto how = reduces_of(call.name, t, options.reduceOp);
    parts.emplace_back(target_of(call, t, true), how);
  }
  return run_all(std::move(call), shm_limit(options), signature(c10::ScalarType::Undefined),
                 [&](std::vector<shm::Request>& requests, shm::Call o) {
                   for (std::size_t i = 0; i < parts.size(); ++i) {
                     const auto& [data, how] = parts[i];
                     requests.push_back(group().start_all_reduce(
                         data, data, static_cast<std::size_t>(tensors[i].numel()), how.element,
                         how.reduction, o));
                   }
                 });
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor tensor = only("reduce", tensors);
  const int root = static_cast<int>(options.rootRank);
  require_rank(root, "the root of reduce");
  const auto [element, reduction] = reduces_of("reduce", tensor, options.reduceOp);
  auto call = call_of("reduce", OpType::REDUCE, {tensor});
  const void* input = nullptr;
  void* output = nullptr;
  if (rank_ == root)
    input = output = target_of(call, tensor, true);
  else
    input = readable(call, tensor);
  const auto count = static_cast<std::size_t>(tensor.numel());
  return run(
      std::move(call), shm_limit(options), signature(tensor.scalar_type()),
      [&, e = element, r = reduction](shm::Call o) {
        group().reduce(input, output, count, e, r, root, o);
      },
      [&, e = element, r = reduction](shm::Call o) {
        return group().start_reduce(input, output, count, e, r, root, o);
      });
}

ShmBackend::WorkPtr ShmBackend::all_gather_counts(const at::Tensor& output, const at::Tensor& input,
                                                  const Counts& counts, CallLimit limit,
                                                  ShmCall call) {
  require_same_type("all_gather", input, output);
  require_numel("all_gather", "output", output, total_of(counts));
  require_numel("all_gather", "input", input, counts[static_cast<std::size_t>(rank_)]);
  const void* from = readable(call, input);
  void* to = target_of(call, output);
  const auto sizes = sizes_in(input.element_size(), counts);
  return run(
      std::move(call), limit, signature(input.scalar_type()),
      [&](shm::Call o) { group().all_gather(from, to, sizes, o); },
      [&](shm::Call o) { return group().start_all_gather(from, to, sizes, o); });
}

ShmBackend::WorkPtr ShmBackend::allgather(TensorLists& outputs, Tensors& inputs,
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
  auto call = call_of("all_gather", OpType::ALLGATHER, out);
  call.finish.emplace_back([out, parts = buffer.parts] {
    for (std::size_t r = 0; r < out.size(); ++r) out[r].copy_(parts[r]);
  });
  return all_gather_counts(buffer.whole, input, numels(out), shm_limit(options), std::move(call));
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  require_cpu("all_gather", output);
  require_cpu("all_gather", input);
  return all_gather_counts(output, input, alike(ranks(), input.numel()), shm_limit(options),
                           call_of("all_gather", OpType::_ALLGATHER_BASE, {output}));
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  if (outputs.size() != inputs.size())
    throw InvalidArgument(
        concat("all_gather of ", inputs.size(), " inputs into ", outputs.size(), " outputs"));
  auto call = call_of("all_gather", OpType::_ALLGATHER_BASE, outputs);
  std::vector<std::pair<const void*, void*>> parts;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    require_cpu("all_gather", inputs[i]);
    require_cpu("all_gather", outputs[i]);
    require_same_type("all_gather", inputs[i], outputs[i]);
    require_numel("all_gather", "output", outputs[i], inputs[i].numel() * ranks());
    const void* from = readable(call, inputs[i]);
    parts.emplace_back(from, target_of(call, outputs[i]));
  }
  return run_all(std::move(call), shm_limit(options), signature(c10::ScalarType::Undefined),
                 [&](std::vector<shm::Request>& requests, shm::Call o) {
                   for (std::size_t i = 0; i < parts.size(); ++i)
                     requests.push_back(group().start_all_gather(
                         parts[i].first, parts[i].second,
                         sizes_in(inputs[i].element_size(), alike(ranks(), inputs[i].numel())), o));
                 });
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_counts(const at::Tensor& output,
                                                      const at::Tensor& input, const Counts& counts,
                                                      const c10d::ReduceOp& op, CallLimit limit,
                                                      ShmCall call) {
  require_same_type("reduce_scatter", input, output);
  require_numel("reduce_scatter", "input", input, total_of(counts));
  require_numel("reduce_scatter", "output", output, counts[static_cast<std::size_t>(rank_)]);
  const auto [element, reduction] = reduces_of("reduce_scatter", input, op);
  const void* from = readable(call, input);
  void* to = target_of(call, output);
  const auto sizes = sizes_in(1, counts);
  return run(
      std::move(call), limit, signature(input.scalar_type()),
      [&, e = element, r = reduction](shm::Call o) {
        group().reduce_scatter(from, to, sizes, e, r, o);
      },
      [&, e = element, r = reduction](shm::Call o) {
        return group().start_reduce_scatter(from, to, sizes, e, r, o);
      });
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
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
  return reduce_scatter_counts(output, buffer.whole, numels(in), options.reduceOp,
                               shm_limit(options),
                               call_of("reduce_scatter", OpType::REDUCE_SCATTER, {output}));
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  require_cpu("reduce_scatter", output);
  require_cpu("reduce_scatter", input);
  return reduce_scatter_counts(output, input, alike(ranks(), output.numel()), options.reduceOp,
                               shm_limit(options),
                               call_of("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, {output}));
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  if (outputs.size() != inputs.size())
    throw InvalidArgument(
        concat("reduce_scatter of ", inputs.size(), " inputs into ", outputs.size(), " outputs"));
  auto call = call_of("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, outputs);
  std::vector<std::pair<const void*, void*>> parts;
  std::vector<Reduces> how;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    require_cpu("reduce_scatter", inputs[i]);
    require_cpu("reduce_scatter", outputs[i]);
    require_same_type("reduce_scatter", inputs[i], outputs[i]);
    require_numel("reduce_scatter", "input", inputs[i], outputs[i].numel() * ranks());
    how.push_back(reduces_of("reduce_scatter", inputs[i], options.reduceOp));
    const void* from = readable(call, inputs[i]);
    parts.emplace_back(from, target_of(call, outputs[i]));
  }
  return run_all(
      std::move(call), shm_limit(options), signature(c10::ScalarType::Undefined),
      [&](std::vector<shm::Request>& requests, shm::Call o) {
        for (std::size_t i = 0; i < parts.size(); ++i)
          requests.push_back(group().start_reduce_scatter(
              parts[i].first, parts[i].second, sizes_in(1, alike(ranks(), outputs[i].numel())),
              how[i].element, how[i].reduction, o));
      });
}

ShmBackend::WorkPtr ShmBackend::gather_counts(const at::Tensor& output, const at::Tensor& input,
                                              const Counts& counts, int root, CallLimit limit,
                                              ShmCall call) {
  require_numel("gather", "input", input, counts[static_cast<std::size_t>(rank_)]);
  const void* from = readable(call, input);
  void* to = nullptr;
  if (rank_ == root) {
    require_same_type("gather", input, output);
    require_numel("gather", "output", output, total_of(counts));
    to = target_of(call, output);
  }
  const auto sizes = sizes_in(input.element_size(), counts);
  return run(
      std::move(call), limit, signature(input.scalar_type()),
      [&](shm::Call o) { group().gather(from, to, sizes, root, o); },
      [&](shm::Call o) { return group().start_gather(from, to, sizes, root, o); });
}

ShmBackend::WorkPtr ShmBackend::gather(TensorLists& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const at::Tensor input = only("gather", inputs);
  const int root = static_cast<int>(options.rootRank);
  require_rank(root, "the root of gather");
  auto call = call_of("gather", OpType::GATHER);
  at::Tensor whole;
  if (rank_ == root) {
    if (outputs.size() != 1 || static_cast<int>(outputs.front().size()) != ranks())
      throw InvalidArgument(concat("gather needs one list of ", ranks(), " outputs on its root"));
    const Tensors out = outputs.front();
    for (const auto& t : out) {
      require_cpu("gather", t);
      require_same_type("gather", input, t);
      require_numel("gather", "output", t, input.numel());
    }
    const Flat buffer = flattened(out);
    whole = buffer.whole;
    call.results = out;
    call.finish.emplace_back([out, parts = buffer.parts] {
      for (std::size_t r = 0; r < out.size(); ++r) out[r].copy_(parts[r]);
    });
  }
  return gather_counts(whole, input, alike(ranks(), input.numel()), root, shm_limit(options),
                       std::move(call));
}

ShmBackend::WorkPtr ShmBackend::scatter_counts(const at::Tensor& output, const at::Tensor& input,
                                               const Counts& counts, int root, CallLimit limit,
                                               ShmCall call) {
  require_numel("scatter", "output", output, counts[static_cast<std::size_t>(rank_)]);
  const void* from = nullptr;
  if (rank_ == root) {
    require_same_type("scatter", input, output);
    require_numel("scatter", "input", input, total_of(counts));
    from = readable(call, input);
  }
  void* to = target_of(call, output);
  const auto sizes = sizes_in(output.element_size(), counts);
  return run(
      std::move(call), limit, signature(output.scalar_type()),
      [&](shm::Call o) { group().scatter(from, to, sizes, root, o); },
      [&](shm::Call o) { return group().start_scatter(from, to, sizes, root, o); });
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ScatterOptions& options) {
  const at::Tensor output = only("scatter", outputs);
  const int root = static_cast<int>(options.rootRank);
  require_rank(root, "the root of scatter");
  at::Tensor whole;
  if (rank_ == root) {
    if (inputs.size() != 1 || static_cast<int>(inputs.front().size()) != ranks())
      throw InvalidArgument(concat("scatter needs one list of ", ranks(), " inputs on its root"));
    for (const auto& t : inputs.front()) {
      require_cpu("scatter", t);
      require_same_type("scatter", t, output);
      require_numel("scatter", "input", t, output.numel());
    }
    const Flat buffer = flattened(inputs.front());
    for (std::size_t r = 0; r < inputs.front().size(); ++r)
      buffer.parts[r].copy_(inputs.front()[r]);
    whole = buffer.whole;
  }
  return scatter_counts(output, whole, alike(ranks(), output.numel()), root, shm_limit(options),
                        call_of("scatter", OpType::SCATTER, {output}));
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
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
      return sizes_in(tensor.element_size(), result);
    }
    if (tensor.numel() % ranks() != 0)
      throw InvalidArgument(concat("all_to_all: the ", which, " of ", tensor.numel(),
                                   " elements cannot be divided among ", ranks(),
                                   " ranks; give sizes"));
    return sizes_in(tensor.element_size(), alike(ranks(), tensor.numel() / ranks()));
  };
  const auto out = counts(output, output_splits, "output"),
             in = counts(input, input_splits, "input");
  auto call = call_of("all_to_all", OpType::ALLTOALL_BASE, {output});
  const void* from = readable(call, input);
  void* to = target_of(call, output);
  return run_messages(std::move(call), shm_limit(options), signature(input.scalar_type()),
                      [&](shm::Call o) { return group().start_all_to_all(from, in, to, out, o); });
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  if (static_cast<int>(outputs.size()) != ranks() || static_cast<int>(inputs.size()) != ranks())
    throw InvalidArgument(concat("all_to_all needs ", ranks(), " inputs and outputs, and got ",
                                 inputs.size(), " and ", outputs.size()));
  for (const auto* tensors : {&outputs, &inputs})
    for (const auto& t : *tensors) require_cpu("all_to_all", t);
  const auto me = static_cast<std::size_t>(rank_);
  require_numel("all_to_all", "input to this rank itself", inputs[me], outputs[me].numel());
  auto call = call_of("all_to_all", OpType::ALLTOALL, outputs);
  std::vector<shm::Message> messages;
  for (int step = 1; step < ranks(); ++step) {
    const int from = (rank_ - step + ranks()) % ranks(), to = (rank_ + step) % ranks();
    messages.push_back(
        message_of(call, false, outputs[static_cast<std::size_t>(from)], from, kListTag));
    messages.push_back(message_of(call, true, inputs[static_cast<std::size_t>(to)], to, kListTag));
  }
  outputs[me].copy_(inputs[me].view(outputs[me].sizes()));
  const char* name = call.name;
  return run_messages(std::move(call), shm_limit(options), signature(c10::ScalarType::Undefined),
                      [&](shm::Call o) { return group().start_exchange(messages, o, name); });
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return run(
      call_of("barrier", OpType::BARRIER), shm_limit(options),
      signature(c10::ScalarType::Undefined), [&](shm::Call o) { group().barrier(o); },
      [&](shm::Call o) { return group().start_barrier(o); });
}

// ---- messages ----

ShmBackend::WorkPtr ShmBackend::exchange_all(ShmCall call,
                                             const std::vector<shm::Message>& messages,
                                             CallLimit limit) {
  const char* name = call.name;
  return run(
      std::move(call), limit, 0, [&](shm::Call o) { group().exchange(messages, o, name); },
      [&](shm::Call o) { return group().start_exchange(messages, o, name); });
}

namespace {

std::uint32_t shm_tag(int tag) {
  if (tag < 0) throw InvalidArgument(concat("message tag ", tag, " is negative"));
  return static_cast<std::uint32_t>(tag);
}

}  // namespace

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  const at::Tensor tensor = only("send", tensors);
  require_rank(to, "the receiver of send");
  auto call = call_of("send", OpType::SEND);
  const auto message = message_of(call, true, tensor, to, shm_tag(tag));
  return exchange_all(std::move(call), {message}, {});
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) {
  const at::Tensor tensor = only("receive", tensors);
  require_rank(from, "the sender of receive");
  auto call = call_of("receive", OpType::RECV, {tensor});
  const auto message = message_of(call, false, tensor, from, shm_tag(tag));
  return exchange_all(std::move(call), {message}, {});
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor tensor = only("receive from any rank", tensors);
  auto call = call_of("receive from any rank", OpType::RECVANYSOURCE, {tensor});
  const auto message = message_of(call, false, tensor, shm::Message::kAnySource, shm_tag(tag));
  return exchange_all(std::move(call), {message}, {});
}

ShmBackend::WorkPtr ShmBackend::exchange(const std::vector<Message>& messages, CallLimit limit) {
  auto call = call_of("exchange", OpType::COALESCED);
  if (messages.size() == 1)
    call.name = messages.front().kind == Message::Kind::send ? "send" : "receive";
  std::vector<shm::Message> all;
  for (const auto& m : messages) {
    require_cpu("exchange", m.tensor);
    require_rank(m.peer, "a peer of exchange");
    all.push_back(message_of(call, m.kind == Message::Kind::send, m.tensor, m.peer, kExchangeTag));
  }
  return exchange_all(std::move(call), all, limit);
}

// ---- uneven ----

ShmBackend::WorkPtr ShmBackend::all_gather_v(const at::Tensor& output, const at::Tensor& input,
                                             const std::vector<std::int64_t>& sizes,
                                             CallLimit limit) {
  require_cpu("all_gather", output);
  require_cpu("all_gather", input);
  require_sizes(sizes, "all_gather");
  return all_gather_counts(output, input, elements_of(sizes, output), limit,
                           call_of("all_gather", OpType::ALLGATHER, {output}));
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_v(const at::Tensor& output, const at::Tensor& input,
                                                 const std::vector<std::int64_t>& sizes,
                                                 const c10d::ReduceOp& op, CallLimit limit) {
  require_cpu("reduce_scatter", output);
  require_cpu("reduce_scatter", input);
  require_sizes(sizes, "reduce_scatter");
  return reduce_scatter_counts(output, input, elements_of(sizes, input), op, limit,
                               call_of("reduce_scatter", OpType::REDUCE_SCATTER, {output}));
}

ShmBackend::WorkPtr ShmBackend::gather_v(const at::Tensor& output, const at::Tensor& input,
                                         const std::vector<std::int64_t>& sizes, int root,
                                         CallLimit limit) {
  require_cpu("gather", input);
  require_sizes(sizes, "gather");
  require_rank(root, "the root of gather");
  auto call = call_of("gather", OpType::GATHER);
  if (rank_ == root) {
    require_cpu("gather", output);
    call.results = {output};
  }
  return gather_counts(output, input, elements_of(sizes, input), root, limit, std::move(call));
}

ShmBackend::WorkPtr ShmBackend::scatter_v(const at::Tensor& output, const at::Tensor& input,
                                          const std::vector<std::int64_t>& sizes, int root,
                                          CallLimit limit) {
  require_cpu("scatter", output);
  require_sizes(sizes, "scatter");
  require_rank(root, "the root of scatter");
  if (rank_ == root) require_cpu("scatter", input);
  return scatter_counts(output, input, elements_of(sizes, output), root, limit,
                        call_of("scatter", OpType::SCATTER, {output}));
}

}  // namespace tessera::detail
