// Collectives over shm that reduce.

#include "tessera/base/text.h"
#include "tessera/comm/backends/shm/shm_calls.h"

namespace tessera::detail {

namespace {

using c10d::OpType;

}  // namespace

ShmBackend::WorkPtr ShmBackend::all_reduce_one(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                               OwnCall how) {
  const auto [element, reduction] = reduces_of("all_reduce", tensor, op);
  const auto limit = how.limit;
  auto call = call_of("all_reduce", std::move(how));
  void* data = target_of(call, tensor, true);
  const auto count = static_cast<std::size_t>(tensor.numel());
  return run(
      std::move(call), limit, signature(tensor.scalar_type()),
      [&, e = element, r = reduction](shm::Call o) {
        group().all_reduce(data, data, count, e, r, o);
      },
      [&, e = element, r = reduction](shm::Call o) {
        return group().start().all_reduce(data, data, count, e, r, o);
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
  return run_all(std::move(call), limit_of(options), signature(c10::ScalarType::Undefined),
                 [&](std::vector<shm::Request>& requests, shm::Call o) {
                   for (std::size_t i = 0; i < parts.size(); ++i) {
                     const auto& [data, how] = parts[i];
                     requests.push_back(group().start().all_reduce(
                         data, data, static_cast<std::size_t>(tensors[i].numel()), how.element,
                         how.reduction, o));
                   }
                 });
}

ShmBackend::WorkPtr ShmBackend::reduce_one(const at::Tensor& tensor, const c10d::ReduceOp& op,
                                           int root, OwnCall how) {
  const auto [element, reduction] = reduces_of("reduce", tensor, op);
  const auto limit = how.limit;
  auto call = call_of("reduce", std::move(how));
  const void* input = nullptr;
  void* output = nullptr;
  if (rank_ == root)
    input = output = target_of(call, tensor, true);
  else
    input = readable(call, tensor);
  const auto count = static_cast<std::size_t>(tensor.numel());
  return run(
      std::move(call), limit, signature(tensor.scalar_type()),
      [&, e = element, r = reduction](shm::Call o) {
        group().reduce(input, output, count, e, r, root, o);
      },
      [&, e = element, r = reduction](shm::Call o) {
        return group().start().reduce(input, output, count, e, r, root, o);
      });
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_counts(const at::Tensor& output,
                                                      const at::Tensor& input, Counts counts,
                                                      const c10d::ReduceOp& op, OwnCall how) {
  const auto [element, reduction] = reduces_of("reduce_scatter", input, op);
  const auto limit = how.limit;
  auto call = call_of("reduce_scatter", std::move(how));
  const void* from = readable(call, input);
  void* to = target_of(call, output);
  const auto sizes = sizes_in(1, counts);
  return run(
      std::move(call), limit, signature(input.scalar_type()),
      [&, e = element, r = reduction](shm::Call o) {
        group().reduce_scatter(from, to, sizes, e, r, o);
      },
      [&, e = element, r = reduction](shm::Call o) {
        return group().start().reduce_scatter(from, to, sizes, e, r, o);
      });
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
      std::move(call), limit_of(options), signature(c10::ScalarType::Undefined),
      [&](std::vector<shm::Request>& requests, shm::Call o) {
        for (std::size_t i = 0; i < parts.size(); ++i)
          requests.push_back(group().start().reduce_scatter(
              parts[i].first, parts[i].second, sizes_in(1, same_for_all(outputs[i].numel())),
              how[i].element, how[i].reduction, o));
      });
}

}  // namespace tessera::detail
