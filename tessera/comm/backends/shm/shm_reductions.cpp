// Collectives over shm that reduce.

#include "tessera/comm/backends/shm/shm_calls.h"

namespace tessera::detail {

ShmBackend::WorkPtr ShmBackend::all_reduce_one(OwnCall how) {
  const at::Tensor& tensor = how.output;
  const auto [element, reduction] = reduces_of("all_reduce", tensor, how.op);
  auto call = call_of("all_reduce", how);
  void* data = target_of(call, tensor, true);
  const auto count = static_cast<std::size_t>(tensor.numel());
  return run(
      std::move(call), how.limit, signature(tensor.scalar_type()),
      [&, e = element, r = reduction](shm::Call o) {
        group().all_reduce(data, data, count, e, r, o);
      },
      [&, e = element, r = reduction](shm::Call o) {
        return group().started().all_reduce(data, data, count, e, r, o);
      });
}

ShmBackend::WorkPtr ShmBackend::all_reduce_each(OwnCall how) {
  const Tensors tensors = how.results;
  auto call = call_of("all_reduce of several tensors", how);
  std::vector<std::pair<void*, Reduces>> parts;
  for (const auto& t : tensors) {
    const auto reduces = reduces_of(call.name, t, how.op);
    parts.emplace_back(target_of(call, t, true), reduces);
  }
  return run_all(std::move(call), how.limit, signature(c10::ScalarType::Undefined),
                 [&](std::vector<shm::Request>& requests, shm::Call o) {
                   for (std::size_t i = 0; i < parts.size(); ++i) {
                     const auto& [data, reduces] = parts[i];
                     requests.push_back(group().started().all_reduce(
                         data, data, static_cast<std::size_t>(tensors[i].numel()), reduces.element,
                         reduces.reduction, o));
                   }
                 });
}

ShmBackend::WorkPtr ShmBackend::reduce_one(OwnCall how) {
  const at::Tensor& tensor = how.output;
  const int root = how.root;
  const auto [element, reduction] = reduces_of("reduce", tensor, how.op);
  auto call = call_of("reduce", how);
  const void* input = nullptr;
  void* output = nullptr;
  if (rank_ == root)
    input = output = target_of(call, tensor, true);
  else
    input = readable(call, tensor);
  const auto count = static_cast<std::size_t>(tensor.numel());
  return run(
      std::move(call), how.limit, signature(tensor.scalar_type()),
      [&, e = element, r = reduction](shm::Call o) {
        group().reduce(input, output, count, e, r, root, o);
      },
      [&, e = element, r = reduction](shm::Call o) {
        return group().started().reduce(input, output, count, e, r, root, o);
      });
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_counts(OwnCall how) {
  const auto [element, reduction] = reduces_of("reduce_scatter", how.input, how.op);
  auto call = call_of("reduce_scatter", how);
  const void* from = readable(call, how.input);
  void* to = target_of(call, how.output);
  const auto sizes = sizes_in(1, how.counts);
  return run(
      std::move(call), how.limit, signature(how.input.scalar_type()),
      [&, e = element, r = reduction](shm::Call o) {
        group().reduce_scatter(from, to, sizes, e, r, o);
      },
      [&, e = element, r = reduction](shm::Call o) {
        return group().started().reduce_scatter(from, to, sizes, e, r, o);
      });
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_each(const Tensors& inputs, OwnCall how) {
  const Tensors outputs = how.results;
  auto call = call_of("reduce_scatter", how);
  std::vector<std::pair<const void*, void*>> parts;
  std::vector<Reduces> reduces;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    reduces.push_back(reduces_of("reduce_scatter", inputs[i], how.op));
    const void* from = readable(call, inputs[i]);
    parts.emplace_back(from, target_of(call, outputs[i]));
  }
  return run_all(
      std::move(call), how.limit, signature(c10::ScalarType::Undefined),
      [&](std::vector<shm::Request>& requests, shm::Call o) {
        for (std::size_t i = 0; i < parts.size(); ++i)
          requests.push_back(group().started().reduce_scatter(
              parts[i].first, parts[i].second, sizes_in(1, same_for_all(outputs[i].numel())),
              reduces[i].element, reduces[i].reduction, o));
      });
}

}  // namespace tessera::detail
