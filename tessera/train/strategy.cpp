#include "tessera/train/strategy.h"

#include <ATen/ATen.h>

#include <cstring>
#include <set>
#include <utility>

#include "tessera/base/internal/vector.h"
#include "tessera/gradient/sync.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {

namespace {

// A tensor as bytes: dtype, number of dims, sizes, memory. Between ranks of one job alone.
std::string tensor_bytes(const at::Tensor& tensor) {
  const at::Tensor local = tensor.detach().to(at::kCPU).contiguous();
  std::string out;
  const auto number = [&](std::int64_t n) {
    out.append(reinterpret_cast<const char*>(&n), sizeof n);
  };
  number(static_cast<std::int64_t>(local.scalar_type()));
  number(local.dim());
  for (const std::int64_t size : local.sizes()) number(size);
  if (local.numel() > 0)
    out.append(static_cast<const char*>(local.const_data_ptr()), local.nbytes());
  return out;
}

at::Tensor tensor_from_bytes(const std::string& bytes) {
  std::size_t at = 0;
  const auto number = [&] {
    std::int64_t n = 0;
    if (bytes.size() - at < sizeof n) throw Error("all_gather: another rank's tensor is cut short");
    std::memcpy(&n, bytes.data() + at, sizeof n);
    at += sizeof n;
    return n;
  };
  const auto type = static_cast<at::ScalarType>(number());
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(number()));
  for (std::int64_t& size : sizes) size = number();
  at::Tensor tensor = at::empty(sizes, type);
  if (bytes.size() - at != tensor.nbytes())
    throw Error("all_gather: another rank's tensor is not as long as it says");
  if (tensor.numel() > 0) std::memcpy(tensor.data_ptr(), bytes.data() + at, tensor.nbytes());
  return tensor;
}

std::vector<at::Tensor> trained_parameters(const NamedModules& modules) {
  std::vector<at::Tensor> all;
  for (const NamedModule& m : modules) {
    for (const at::Tensor& p : m.module->parameters())
      if (p.requires_grad()) all.push_back(p);
  }
  return all;
}

}  // namespace

Strategy::~Strategy() = default;

void Strategy::setup(const NamedModules& modules) {
  check_modules(modules);
  modules_ = modules;
}

std::vector<double> Strategy::reduced(const std::vector<double>& numbers, ReduceOp op) {
  if (size() == 1) return numbers;
  const at::Tensor all = at::tensor(numbers, at::kDouble).to(root_device());
  reduce(all, op);
  const at::Tensor host = all.to(at::kCPU);
  const auto* values = host.const_data_ptr<double>();
  return {values, values + host.numel()};
}

bool Strategy::any(bool mine) {
  if (size() == 1) return mine;
  const at::Tensor votes =
      at::full({1}, mine ? 1 : 0, at::TensorOptions(at::kLong).device(root_device()));
  reduce(votes, ReduceOp::max);
  return votes.item<std::int64_t>() != 0;
}

std::vector<at::Tensor> Strategy::all_gather(const at::Tensor& mine) {
  return mapped(all_gather(tensor_bytes(mine)), tensor_from_bytes);
}

void Strategy::place(MicroBatch& batch) {
  if (!abilities().moves_modules) return;
  const auto move = [&](at::Tensor& t) {
    if (t.defined() && !is_sharded(t) && t.device() != root_device())
      t = t.to(root_device(), /*non_blocking=*/true);
  };
  for (at::Tensor& t : batch.tensors) move(t);
  move(batch.mask);
}

std::shared_ptr<void> Strategy::no_sync() {
  return std::make_shared<NoSync>(trained_parameters(modules_));
}

void Strategy::reduce_gradients() { tessera::reduce_gradients(trained_parameters(modules_)); }

double Strategy::clip(const std::vector<at::Tensor>& parameters, const ClipOptions& options) {
  if (size() > 1 && manager() == nullptr) {
    throw NotAvailable(
        "this strategy has neither a manager, over whose ranks a norm is taken, nor a clip() of "
        "its own: override one of them");
  }
  return clip_gradients(parameters, manager() ? manager()->group(global_ranks()) : Group(), options,
                        by_hand());
}

std::vector<int> Strategy::global_ranks() const {
  return numbers_below(manager() ? manager()->world_size() : size());
}

void Strategy::abort(const std::string& reason) noexcept {
  const DistributedManager* ranks = manager();
  if (ranks == nullptr || ranks->world_size() == 1) return;
  try {
    const std::vector<int> those = global_ranks();
    ranks->fail_groups_within(Mesh({{"all", static_cast<int>(those.size())}}, those), reason);
  } catch (...) {  // the groups have ended already
  }
}

ManagedStrategy::ManagedStrategy(DistributedManager manager)
    : manager_(std::move(manager)), world_(manager_.world()) {}

ManagedStrategy::ManagedStrategy(DistributedManager manager, Group ranks)
    : manager_(std::move(manager)), world_(std::move(ranks)) {}

void ManagedStrategy::broadcast(const at::Tensor& tensor, int root) {
  world_.broadcast(tensor, root, {.name = "strategy"});
}

std::string ManagedStrategy::broadcast(const std::string& bytes, int root) {
  return world_.broadcast_bytes(bytes, root, {.name = "strategy"});
}

void ManagedStrategy::reduce(const at::Tensor& tensor, ReduceOp op,
                             const std::optional<Group>& group) {
  (group ? *group : world_).all_reduce(tensor, op, {.name = "strategy"});
}

std::vector<std::string> ManagedStrategy::all_gather(const std::string& mine) {
  return world_.all_gather_bytes(mine, {.name = "strategy"});
}

double ManagedStrategy::clip(const std::vector<at::Tensor>& parameters,
                             const ClipOptions& options) {
  return clip_gradients(parameters, world_, options, by_hand());
}

double ManagedStrategy::summed_weight(double mine) {
  return size() == 1 ? mine : reduced({mine}, ReduceOp::sum)[0] / sharing();
}

void check_modules(const NamedModules& modules) {
  std::set<std::string> names;
  for (const NamedModule& m : modules) {
    if (!m.module) throw InvalidArgument("the module '", m.name, "' is null");
    if (m.name.empty() || m.name.find('.') != std::string::npos)
      throw InvalidArgument("a module named '", m.name, "': a name is not empty and has no dot");
    if (!names.insert(m.name).second) throw InvalidArgument("two modules are named '", m.name, "'");
  }
}

}  // namespace tessera
