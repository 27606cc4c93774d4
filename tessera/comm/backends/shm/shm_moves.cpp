// Collectives over shm that move data without computing.

#include "tessera/comm/backends/shm/shm_calls.h"

namespace tessera::detail {

namespace {

// Tags of c10d have 31 bits, and exchange has another one.
constexpr std::uint32_t kListTag = 0xc0000000U;

}  // namespace

ShmBackend::WorkPtr ShmBackend::all_gather_counts(OwnCall how) {
  auto call = call_of("all_gather", how);
  const void* from = readable(call, how.input);
  void* to = target_of(call, how.output);
  const auto sizes = sizes_in(how.input.element_size(), how.counts);
  return run(
      std::move(call), how.limit, signature(how.input.scalar_type()),
      [&](shm::Call o) { group().all_gather(from, to, sizes, o); },
      [&](shm::Call o) { return group().started().all_gather(from, to, sizes, o); });
}

ShmBackend::WorkPtr ShmBackend::all_gather_each(const Tensors& inputs, OwnCall how) {
  const Tensors outputs = how.results;
  auto call = call_of("all_gather", how);
  std::vector<std::pair<const void*, void*>> parts;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const void* from = readable(call, inputs[i]);
    parts.emplace_back(from, target_of(call, outputs[i]));
  }
  return run_all(std::move(call), how.limit, signature(c10::ScalarType::Undefined),
                 [&](std::vector<shm::Request>& requests, shm::Call o) {
                   for (std::size_t i = 0; i < parts.size(); ++i)
                     requests.push_back(group().started().all_gather(
                         parts[i].first, parts[i].second,
                         sizes_in(inputs[i].element_size(), same_for_all(inputs[i].numel())), o));
                 });
}

ShmBackend::WorkPtr ShmBackend::gather_counts(OwnCall how) {
  auto call = call_of("gather", how);
  const void* from = readable(call, how.input);
  const int root = how.root;
  void* to = rank_ == root ? target_of(call, how.output) : nullptr;
  const auto sizes = sizes_in(how.input.element_size(), how.counts);
  return run(
      std::move(call), how.limit, signature(how.input.scalar_type()),
      [&](shm::Call o) { group().gather(from, to, sizes, root, o); },
      [&](shm::Call o) { return group().started().gather(from, to, sizes, root, o); });
}

ShmBackend::WorkPtr ShmBackend::scatter_counts(OwnCall how) {
  auto call = call_of("scatter", how);
  const int root = how.root;
  const void* from = rank_ == root ? readable(call, how.input) : nullptr;
  void* to = target_of(call, how.output);
  const auto sizes = sizes_in(how.output.element_size(), how.counts);
  return run(
      std::move(call), how.limit, signature(how.output.scalar_type()),
      [&](shm::Call o) { group().scatter(from, to, sizes, root, o); },
      [&](shm::Call o) { return group().started().scatter(from, to, sizes, root, o); });
}

ShmBackend::WorkPtr ShmBackend::all_to_all_counts(OwnCall how) {
  const auto out = sizes_in(how.output.element_size(), how.counts),
             in = sizes_in(how.input.element_size(), how.input_counts);
  auto call = call_of("all_to_all", how);
  const void* from = readable(call, how.input);
  void* to = target_of(call, how.output);
  return run_messages(
      std::move(call), how.limit, signature(how.input.scalar_type()),
      [&](shm::Call o) { return group().started().all_to_all(from, in, to, out, o); });
}

ShmBackend::WorkPtr ShmBackend::all_to_all_each(const Tensors& inputs, OwnCall how) {
  const Tensors outputs = how.results;
  auto call = call_of("all_to_all", how);
  std::vector<shm::Message> messages;
  for (int step = 1; step < ranks(); ++step) {
    const int from = (rank_ - step + ranks()) % ranks(), to = (rank_ + step) % ranks();
    messages.push_back(
        message_of(call, false, outputs[static_cast<std::size_t>(from)], from, kListTag));
    messages.push_back(message_of(call, true, inputs[static_cast<std::size_t>(to)], to, kListTag));
  }
  const auto me = static_cast<std::size_t>(rank_);
  outputs[me].copy_(inputs[me].view(outputs[me].sizes()));
  const char* name = call.name;
  return run_messages(std::move(call), how.limit, signature(c10::ScalarType::Undefined),
                      [&](shm::Call o) { return group().started().exchange(messages, o, name); });
}

}  // namespace tessera::detail
