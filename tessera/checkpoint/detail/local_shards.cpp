#include "tessera/checkpoint/detail/local_shards.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <cstring>

#include "tessera/base/internal/name.h"
#include "tessera/checkpoint/file.h"
#include "tessera/checkpoint/internal/torch_dtypes.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/internal/boxes.h"

namespace tessera::detail {
namespace {

HeldShard described_value(EntryKind kind, const std::string& name, int rank, std::size_t bytes) {
  const auto n = static_cast<std::int64_t>(bytes);
  return {{kind, name, rank, "U8", {n}, {}}, {{0, n}}};
}

at::Tensor bytes_of_value(const std::string& value) {
  const at::Tensor t = at::empty({static_cast<std::int64_t>(value.size())}, at::kByte);
  if (!value.empty()) std::memcpy(t.mutable_data_ptr(), value.data(), value.size());
  return t;
}

at::Tensor on_host(const at::Tensor& t) {
  return t.detach().resolve_conj().resolve_neg().cpu().contiguous();
}

}  // namespace

void need_dense(const std::string& name, const at::Tensor& tensor) {
  const char* what = nullptr;
  if (tensor.layout() != at::kStrided) what = "is not dense";
  if (tensor.is_nested()) what = "is nested";
  if (tensor.is_meta())
    throw InvalidArgument("'", printable(name),
                          "' has no data (device meta): place its module first (fully_shard(), "
                          "distribute_module()), or materialize() it");
  if (what)
    throw InvalidArgument("'", printable(name), "' ", what, " (layout ", tensor.layout(),
                          "): give its dense values, such as to_dense() or its indices and "
                          "values as tensors of their own");
}

HeldShard describe(const CheckpointState::Tensor& tensor) {
  HeldShard held;
  held.info.name = tensor.name;
  const at::Tensor& t = tensor.value;
  need_dense(tensor.name, t);
  held.info.dtype = safetensors_tensor(tensor.name, t.scalar_type(), {1}).dtype;
  if (tensor.shard) {
    if (is_sharded(t))
      throw InvalidArgument("'", tensor.name, "' is a sharded tensor: it needs no shard by hand");
    held.info.shape = tensor.shard->shape;
    for (std::size_t d = 0; d < held.info.shape.size(); ++d) {
      const std::int64_t begin = tensor.shard->offset[d];
      held.box.push_back({begin, begin + t.size(static_cast<std::int64_t>(d))});
    }
    return held;
  }
  held.info.shape = t.sizes().vec();
  if (!is_sharded(t)) {
    held.box = whole_box(held.info.shape);
    return held;
  }
  const ShardSpec s = spec(t);
  held.info.layout = to_json(saved_layout(s));
  for (std::size_t d = 0; d < held.info.shape.size(); ++d)
    held.box.push_back({s.local_offset()[d], s.local_offset()[d] + s.local_shape()[d]});
  return held;
}

std::vector<HeldShard> describe(const CheckpointState& state, int rank) {
  std::vector<HeldShard> held;
  for (const auto& t : state.tensors()) held.push_back(describe(t));
  for (const auto& [name, value] : state.values())
    held.push_back(described_value(EntryKind::value, name, 0, value.size()));
  for (const auto& [name, value] : state.rank_values())
    held.push_back(described_value(EntryKind::rank_value, name, rank, value.size()));
  return held;
}

std::vector<at::Tensor> plain_bytes(const CheckpointState& state) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> all;
  for (const auto& t : state.tensors())
    all.push_back(is_sharded(t.value) ? at::Tensor() : on_host(t.value));
  return all;
}

std::vector<at::Tensor> local_bytes(const CheckpointState& state,
                                    const std::vector<at::Tensor>& plain) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> locals, all;
  // Reductions first, which ranks do together: what comes after may fail on one of them alone.
  for (std::size_t i = 0; i < state.tensors().size(); ++i) {
    at::Tensor local = state.tensors()[i].value.detach();
    if (is_sharded(local))
      local = to_local(tessera::redistribute(local, without_partial(spec(local))));
    locals.push_back(i < plain.size() && plain[i].defined() ? plain[i] : local);
  }
  for (const at::Tensor& local : locals) all.push_back(on_host(local));
  for (const auto& [name, value] : state.values()) all.push_back(bytes_of_value(value));
  for (const auto& [name, value] : state.rank_values()) all.push_back(bytes_of_value(value));
  return all;
}

std::size_t offset_in(const Box& held, const Box& box, std::size_t element) {
  std::int64_t offset = 0;
  for (std::size_t d = 0; d < held.size(); ++d)
    offset = offset * held[d].size() + box[d].begin - held[d].begin;
  return static_cast<std::size_t>(offset) * element;
}

}  // namespace tessera::detail
