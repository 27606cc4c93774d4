// Collectives over shm that move data without computing.

#include "tessera/base/text.h"
#include "tessera/comm/backends/shm/shm_calls.h"

namespace tessera::detail {

namespace {

using c10d::OpType;

// Tags of c10d have 31 bits, and exchange has another one.
constexpr std::uint32_t kListTag = 0xc0000000U;

}  // namespace

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

ShmBackend::WorkPtr ShmBackend::all_gather_v(const at::Tensor& output, const at::Tensor& input,
                                             const std::vector<std::int64_t>& sizes,
                                             CallLimit limit) {
  require_cpu("all_gather", output);
  require_cpu("all_gather", input);
  require_sizes(sizes, "all_gather");
  return all_gather_counts(output, input, elements_of(sizes, output), limit,
                           call_of("all_gather", OpType::ALLGATHER, {output}));
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
