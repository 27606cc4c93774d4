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
                                                  Counts counts, OwnCall how) {
  const auto limit = how.limit;
  auto call = call_of("all_gather", std::move(how));
  const void* from = readable(call, input);
  void* to = target_of(call, output);
  const auto sizes = sizes_in(input.element_size(), counts);
  return run(
      std::move(call), limit, signature(input.scalar_type()),
      [&](shm::Call o) { group().all_gather(from, to, sizes, o); },
      [&](shm::Call o) { return group().start().all_gather(from, to, sizes, o); });
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
  return run_all(std::move(call), limit_of(options), signature(c10::ScalarType::Undefined),
                 [&](std::vector<shm::Request>& requests, shm::Call o) {
                   for (std::size_t i = 0; i < parts.size(); ++i)
                     requests.push_back(group().start().all_gather(
                         parts[i].first, parts[i].second,
                         sizes_in(inputs[i].element_size(), same_for_all(inputs[i].numel())), o));
                 });
}

ShmBackend::WorkPtr ShmBackend::gather_counts(const at::Tensor& output, const at::Tensor& input,
                                              Counts counts, int root, OwnCall how) {
  const auto limit = how.limit;
  auto call = call_of("gather", std::move(how));
  const void* from = readable(call, input);
  void* to = rank_ == root ? target_of(call, output) : nullptr;
  const auto sizes = sizes_in(input.element_size(), counts);
  return run(
      std::move(call), limit, signature(input.scalar_type()),
      [&](shm::Call o) { group().gather(from, to, sizes, root, o); },
      [&](shm::Call o) { return group().start().gather(from, to, sizes, root, o); });
}

ShmBackend::WorkPtr ShmBackend::scatter_counts(const at::Tensor& output, const at::Tensor& input,
                                               Counts counts, int root, OwnCall how) {
  const auto limit = how.limit;
  auto call = call_of("scatter", std::move(how));
  const void* from = rank_ == root ? readable(call, input) : nullptr;
  void* to = target_of(call, output);
  const auto sizes = sizes_in(output.element_size(), counts);
  return run(
      std::move(call), limit, signature(output.scalar_type()),
      [&](shm::Call o) { group().scatter(from, to, sizes, root, o); },
      [&](shm::Call o) { return group().start().scatter(from, to, sizes, root, o); });
}

ShmBackend::WorkPtr ShmBackend::all_to_all_counts(const at::Tensor& output, Counts output_counts,
                                                  const at::Tensor& input, Counts input_counts,
                                                  OwnCall how) {
  const auto out = sizes_in(output.element_size(), output_counts),
             in = sizes_in(input.element_size(), input_counts);
  const auto limit = how.limit;
  auto call = call_of("all_to_all", std::move(how));
  const void* from = readable(call, input);
  void* to = target_of(call, output);
  return run_messages(std::move(call), limit, signature(input.scalar_type()),
                      [&](shm::Call o) { return group().start().all_to_all(from, in, to, out, o); });
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
  return run_messages(std::move(call), limit_of(options), signature(c10::ScalarType::Undefined),
                      [&](shm::Call o) { return group().start().exchange(messages, o, name); });
}

}  // namespace tessera::detail
