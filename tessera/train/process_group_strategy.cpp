#include "tessera/train/strategies.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/job/c10d_interop.h"
#include "tessera/comm/store/store.h"

namespace tessera {

namespace {

constexpr std::int64_t kMostOfAddress = 1024;

/// Where the group's ranks meet: a store that its first rank serves, of whose address the others
/// learn over the group. The group's own may be absent, or each rank's alone.
c10::intrusive_ptr<c10d::Store> meeting_place(c10d::ProcessGroup& group, c10::Device device) {
  if (group.getSize() == 1) return c10::make_intrusive<c10d::HashStore>();
  const std::string host = Environment::of_process().hostname;
  c10d::TCPStoreOptions options;
  options.waitWorkers = false;
  options.timeout = std::chrono::minutes(2);
  c10::intrusive_ptr<c10d::Store> served;
  std::string said;
  if (group.getRank() == 0) {
    options.port = 0;
    options.isServer = true;
    try {
      const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
      said = concat(host, " ", store->getPort());
      served = store;
    } catch (const c10::Error& e) {  // the others are told
      said = concat("! ", e.what_without_backtrace());
    }
  }
  // The last byte stays zero.
  at::Tensor told = at::zeros({kMostOfAddress}, at::kByte);
  std::memcpy(told.data_ptr(), said.data(), std::min<std::size_t>(said.size(), kMostOfAddress - 1));
  std::vector<at::Tensor> sent{told.to(device)};
  group.broadcast(sent)->wait();
  told = sent[0].to(at::kCPU);
  TextReader in(std::string(static_cast<const char*>(told.const_data_ptr())));
  std::string first_host;
  if (in >> first_host >> options.port; !in)
    throw RendezvousError(
        concat("ProcessGroupStrategy: rank 0 of the process group could serve no "
               "store: ",
               in.str()));
  if (served) return served;
  try {
    return c10::make_intrusive<c10d::TCPStore>(first_host == host ? "127.0.0.1" : first_host,
                                               options);
  } catch (const c10::Error& e) {
    throw RendezvousError(concat("ProcessGroupStrategy: no way from ", host, " to rank 0's store, ",
                                 first_host, ":", options.port, ": ", e.what_without_backtrace()));
  }
}

DistributedManager manager_over(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                c10::Device device) {
  if (!group) throw InvalidArgument("ProcessGroupStrategy: there is no process group");
  return manager_of({.group = group, .store = meeting_place(*group, device)}, {.device = device});
}

}  // namespace

ProcessGroupStrategy::ProcessGroupStrategy(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                           c10::Device device)
    : ManagedStrategy(manager_over(group, device)),
      given_(ManagedStrategy::manager()->group(ManagedStrategy::global_ranks(),
                                               {.backend = "c10d"})) {}

Abilities ProcessGroupStrategy::abilities() const {
  return {.owns_accumulation = true,
          .gradients = Abilities::Gradients::summed,
          .reduces_modules_alone = true};
}

void ProcessGroupStrategy::reduce(const at::Tensor& tensor, ReduceOp op,
                                  const std::optional<Group>& group) {
  (group ? *group : given_).all_reduce(tensor, op, {.name = "strategy"});
}

void ProcessGroupStrategy::setup(const NamedModules& modules) {
  Strategy::setup(modules);
  const at::NoGradGuard no_grad;
  for (const NamedModule& m : modules) {
    m.module->to(root_device());
    for (const at::Tensor& t : m.module->parameters()) broadcast(t, 0);
    for (const at::Tensor& t : m.module->buffers()) broadcast(t, 0);
  }
}

// As bytes, in one message.
void ProcessGroupStrategy::share_buffers() {
  if (size() == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> buffers, bytes;
  std::vector<std::int64_t> lengths;
  for (const NamedModule& m : modules())
    for (const at::Tensor& t : m.module->buffers()) {
      if (!t.defined() || t.numel() == 0) continue;
      buffers.push_back(t.detach());
      bytes.push_back(t.detach().contiguous().flatten().view(at::kByte));
      lengths.push_back(bytes.back().numel());
    }
  if (buffers.empty()) return;
  const at::Tensor all = at::cat(bytes);
  broadcast(all, 0);
  const auto parts = all.split_with_sizes(lengths);
  for (std::size_t i = 0; i < buffers.size(); ++i)
    buffers[i].copy_(parts[i].clone().view(buffers[i].scalar_type()).view_as(buffers[i]));
}

void ProcessGroupStrategy::reduce_gradients() {
  const at::NoGradGuard no_grad;
  std::map<at::ScalarType, std::vector<at::Tensor>> by_type;
  for (const NamedModule& m : modules()) {
    for (const at::Tensor& p : m.module->parameters())
      if (p.requires_grad()) by_type[p.scalar_type()].push_back(p);
  }
  for (const auto& [type, parameters] : by_type) {
    // Behind the gradients, on how many ranks each is: one that is nowhere stays undefined.
    const at::Tensor used = at::zeros({static_cast<std::int64_t>(parameters.size())},
                                      parameters[0].options().requires_grad(false));
    std::vector<at::Tensor> flat;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& gradient = parameters[i].grad();
      if (gradient.defined()) used[static_cast<std::int64_t>(i)] = 1;
      flat.push_back((gradient.defined() ? gradient : at::zeros_like(parameters[i])).flatten());
    }
    flat.push_back(used);
    const at::Tensor all = at::cat(flat);
    reduce(all, ReduceOp::sum);
    const auto count = static_cast<std::int64_t>(parameters.size());
    const at::Tensor where = all.narrow(0, all.size(0) - count, count).to(at::kCPU, at::kDouble);
    std::int64_t at = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& p = parameters[i];
      const at::Tensor sum = all.narrow(0, at, p.numel()).view_as(p);
      at += p.numel();
      if (where[static_cast<std::int64_t>(i)].item<double>() == 0) continue;
      if (p.grad().defined())
        p.grad().copy_(sum);
      else
        p.mutable_grad() = sum.clone();
    }
  }
}

}  // namespace tessera
