// Calls of HostsBackend on lists of tensors, made of its other calls.

#include <ATen/ATen.h>

#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/backends/arguments.h"
#include "tessera/comm/backends/hosts/hosts_backend.h"

namespace tessera::detail {
namespace {

using c10d::OpType;

/// The bytes of each tensor of a list.
HostLinks::Counts bytes_of_each(const std::vector<at::Tensor>& tensors) {
  HostLinks::Counts counts;
  for (const auto& t : tensors) counts.push_back(static_cast<std::int64_t>(t.nbytes()));
  return counts;
}

}  // namespace

HostsBackend::WorkPtr HostsBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                             const c10d::AllToAllOptions& options) {
  if (static_cast<int>(inputs.size()) != ranks() || static_cast<int>(outputs.size()) != ranks())
    throw InvalidArgument(concat("all_to_all needs ", ranks(), " inputs and ", ranks(),
                                 " outputs, and got ", inputs.size(), " and ", outputs.size()));
  for (const auto* list : {&inputs, &outputs})
    for (const auto& t : *list) {
      require_cpu("all_to_all", t);
      require_same_type("all_to_all", t, inputs.front());
    }
  const Flat from = flattened(inputs), to = flattened(outputs);
  for (std::size_t r = 0; r < inputs.size(); ++r) from.parts[r].copy_(inputs[r]);
  return post({OpType::ALLTOALL, limit_of(options), outputs, {}},
              [from, to, outputs, sent = bytes_of_each(inputs), received = bytes_of_each(outputs)](
                  HostLinks& links, HostCall& call) {
                links.all_to_all(call, to.whole.view(at::kByte), received,
                                 from.whole.view(at::kByte), sent);
                for (std::size_t r = 0; r < outputs.size(); ++r) outputs[r].copy_(to.parts[r]);
              });
}

HostsBackend::WorkPtr HostsBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  if (outputs.size() != inputs.size())
    throw InvalidArgument(
        concat("reduce_scatter of ", inputs.size(), " inputs into ", outputs.size(), " outputs"));
  // All are checked before the first begins: this rank would be a call ahead of the others.
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    require_cpu("reduce_scatter", inputs[i]);
    require_cpu("reduce_scatter", outputs[i]);
    require_same_type("reduce_scatter", inputs[i], outputs[i]);
    require_numel("reduce_scatter", "input", inputs[i], outputs[i].numel() * ranks());
  }
  std::vector<WorkPtr> works;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    works.push_back(_reduce_scatter_base(outputs[i], inputs[i], options));
  // Calls end in the order in which they were made: by then these have.
  return post({OpType::COALESCED, limit_of(options), outputs, {}},
              [works = std::move(works)](HostLinks&, HostCall&) {
                for (const auto& work : works) work->wait();
              });
}

}  // namespace tessera::detail
