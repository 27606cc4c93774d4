#include "tessera/train/process_group_strategy.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "tessera/base/text.h"

namespace tessera {

namespace {

at::Tensor bytes_tensor(const std::string& bytes, std::size_t room) {
  const at::Tensor tensor = at::zeros({static_cast<std::int64_t>(room)}, at::kByte);
  if (!bytes.empty()) std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::string tensor_text(const at::Tensor& tensor, std::size_t length) {
  const at::Tensor host = tensor.to(at::kCPU).contiguous();
  return {static_cast<const char*>(host.const_data_ptr()), length};
}

}  // namespace

ProcessGroupStrategy::ProcessGroupStrategy(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                           c10::Device device)
    : group_(std::move(group)), device_(device) {
  if (!group_) throw InvalidArgument("ProcessGroupStrategy: there is no process group");
}

ProcessGroupStrategy::~ProcessGroupStrategy() = default;

Abilities ProcessGroupStrategy::abilities() const {
  Abilities can;
  can.saves_on_all_ranks = false;
  can.owns_accumulation = true;
  can.reduces_modules_alone = true;
  can.gradients = Abilities::Gradients::summed;
  return can;
}

int ProcessGroupStrategy::rank() const { return group_->getRank(); }

int ProcessGroupStrategy::size() const { return group_->getSize(); }

// A group of one rank may be without a backend.
void ProcessGroupStrategy::barrier() {
  if (size() > 1) group_->barrier()->wait();
}

void ProcessGroupStrategy::broadcast(const at::Tensor& tensor, int root) {
  if (size() == 1) return;
  // Backends take dense memory alone.
  std::vector<at::Tensor> sent{tensor.detach().contiguous()};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  group_->broadcast(sent, options)->wait();
  if (!sent[0].is_same(tensor) && sent[0].const_data_ptr() != tensor.const_data_ptr()) {
    const at::NoGradGuard no_grad;
    tensor.detach().copy_(sent[0]);
  }
}

std::string ProcessGroupStrategy::broadcast(const std::string& bytes, int root) {
  if (size() == 1) return bytes;
  const at::Tensor length =
      at::full({1}, static_cast<std::int64_t>(bytes.size()), at::kLong).to(device_);
  broadcast(length, root);
  const auto room = static_cast<std::size_t>(length.item<std::int64_t>());
  if (room == 0) return {};
  const at::Tensor text = bytes_tensor(rank() == root ? bytes : std::string(), room).to(device_);
  broadcast(text, root);
  return tensor_text(text, room);
}

void ProcessGroupStrategy::reduce(const at::Tensor& tensor, ReduceOp op,
                                  const std::optional<Group>& group) {
  if (group) return group->all_reduce(tensor, op);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sent{tensor.detach().contiguous()};
  c10d::AllreduceOptions options;
  // Not every backend has means, nor weights of its own.
  if (op.kind == ReduceOp::Kind::premultiplied) sent[0] = sent[0] * op.factor;
  options.reduceOp = op.kind == ReduceOp::Kind::product ? c10d::ReduceOp::PRODUCT
                     : op.kind == ReduceOp::Kind::min   ? c10d::ReduceOp::MIN
                     : op.kind == ReduceOp::Kind::max   ? c10d::ReduceOp::MAX
                                                        : c10d::ReduceOp::SUM;
  if (size() > 1) group_->allreduce(sent, options)->wait();
  if (op.kind == ReduceOp::Kind::avg) sent[0].div_(size());
  if (sent[0].const_data_ptr() != tensor.const_data_ptr()) tensor.detach().copy_(sent[0]);
}

std::vector<std::string> ProcessGroupStrategy::all_gather(const std::string& mine) {
  if (size() == 1) return {mine};
  const auto count = static_cast<std::size_t>(size());
  const auto gathered = [&](const at::Tensor& own) {
    std::vector<std::vector<at::Tensor>> out(1);
    for (std::size_t r = 0; r < count; ++r) out[0].push_back(at::empty_like(own));
    std::vector<at::Tensor> in{own};
    group_->allgather(out, in)->wait();
    return out[0];
  };
  const auto lengths =
      gathered(at::full({1}, static_cast<std::int64_t>(mine.size()), at::kLong).to(device_));
  std::size_t room = 1;
  for (const at::Tensor& n : lengths)
    room = std::max(room, static_cast<std::size_t>(n.item<std::int64_t>()));
  const auto texts = gathered(bytes_tensor(mine, room).to(device_));
  std::vector<std::string> all;
  for (std::size_t r = 0; r < count; ++r)
    all.push_back(tensor_text(texts[r], static_cast<std::size_t>(lengths[r].item<std::int64_t>())));
  return all;
}

void ProcessGroupStrategy::setup(const NamedModules& modules) {
  Strategy::setup(modules);
  const at::NoGradGuard no_grad;
  for (const NamedModule& m : modules) {
    m.module->to(device_);
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

void ProcessGroupStrategy::abort(const std::string&) noexcept {
  if (size() == 1) return;
  try {
    group_->abort();
  } catch (...) {  // it has ended already
  }
}

double ProcessGroupStrategy::clip(const std::vector<at::Tensor>& parameters,
                                  const ClipOptions& options) {
  return clip_gradients(parameters, Group(), options);
}

}  // namespace tessera
