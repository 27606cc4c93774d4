// Sharded tensors made of a whole one, and new ones.

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>

#include <functional>
#include <vector>

#include "tessera/comm/agree/agree.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera {
namespace {

at::Tensor made(const ShardSpec& spec, const at::TensorOptions& options,
                const std::function<at::Tensor(const at::TensorOptions&)>& make) {
  const auto device = options.has_device() ? options.device() : spec.mesh().manager().device();
  return from_local(make(options.device(device).requires_grad(false)), spec)
      .requires_grad_(options.requires_grad());
}

void refuse_partial(const ShardSpec& spec, const char* what) {
  if (spec.has_partial()) throw InvalidArgument(what, ": a new tensor cannot be partial: ", spec);
}

}  // namespace

at::Tensor distribute_tensor(const at::Tensor& full, const ShardSpec& spec) {
  detail::ensure_registered();
  detail::require_plain(full, "distribute_tensor");
  if (full.sizes() != at::IntArrayRef(spec.shape()))
    throw InvalidArgument("distribute_tensor: a tensor of shape ", full.sizes(), " for the spec ",
                          spec);
  return redistribute(detail::promote(full, detail::context_of(spec)), spec);
}

at::Tensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh,
                             const std::vector<Placement>& placements, const ShardSizes& sizes) {
  detail::require_plain(full, "distribute_tensor");
  return distribute_tensor(full, ShardSpec(mesh, full.sizes().vec(), placements, sizes));
}

at::Tensor scatter(const at::Tensor& full, const DeviceMesh& mesh,
                   const std::vector<Placement>& placements, const ShardSizes& sizes, int root) {
  const Group all = mesh.all();
  // All say their root; it alone gives a tensor, and the others learn its shape and dtype.
  const auto said = agree::all<std::vector<std::int64_t>, ShardingError>(
      all, "scatter",
      [&] {
        if (root < 0 || root >= all.size())
          throw InvalidArgument("root ", root, " of a mesh of ", all.size());
        std::vector<std::int64_t> numbers{root};
        if (all.rank() != root) return numbers;
        detail::require_plain(full, "scatter");
        numbers.insert(numbers.end(), full.sizes().begin(), full.sizes().end());
        numbers.push_back(static_cast<std::int64_t>(full.scalar_type()));
        return numbers;
      },
      {.name = "scatter"});
  for (std::size_t r = 1; r < said.size(); ++r)
    if (said[r].front() != said[0].front())
      throw MismatchError("scatter: rank ", all.ranks()[0], " has root ", said[0].front(),
                          ", rank ", all.ranks()[r], " has root ", said[r].front(),
                          "; give all ranks the same");
  std::vector<std::int64_t> shape(said[root].begin() + 1, said[root].end());
  const auto dtype = static_cast<at::ScalarType>(shape.back());
  shape.pop_back();
  const ShardSpec target(mesh, shape, placements, sizes);
  const auto part_of = [&](int position) {
    at::Tensor part = full;
    const Box box = target.sharding().box(position);
    for (std::size_t d = 0; d < box.size(); ++d)
      part = part.narrow(static_cast<std::int64_t>(d), box[d].begin, box[d].size());
    // On a partial axis the first rank holds the value.
    for (int a = 0; a < target.mesh_dims(); ++a) {
      const Placement p = placements[a];
      const int c = target.sharding().coordinate(position, a);
      if (p.is_partial(ReduceOp::Kind::sum) && c > 0)
        part = at::full_like(part, detail::no_summand(part.scalar_type()));
      if (p.is_partial(ReduceOp::Kind::product) && c > 0) part = at::ones_like(part);
    }
    return part.contiguous();
  };
  const detail::LocalCallGuard guard;
  at::Tensor mine;
  std::vector<Message> messages;
  if (all.rank() == root) {
    mine = part_of(root).clone();
    for (int r = 0; r < all.size(); ++r)
      if (r != root) messages.push_back({Message::Kind::send, part_of(r), r});
  } else {
    mine =
        at::empty(target.local_shape(), at::TensorOptions(dtype).device(mesh.manager().device()));
    messages.push_back({Message::Kind::receive, mine, root});
  }
  all.exchange(messages, {.name = "scatter"});
  return from_local(mine, target);
}

at::Tensor empty(const ShardSpec& spec, const at::TensorOptions& options) {
  return made(spec, options,
              [&](const at::TensorOptions& o) { return at::empty(spec.local_shape(), o); });
}
at::Tensor full(const ShardSpec& spec, const at::Scalar& value, const at::TensorOptions& options) {
  refuse_partial(spec, "full");
  return made(spec, options,
              [&](const at::TensorOptions& o) { return at::full(spec.local_shape(), value, o); });
}
at::Tensor zeros(const ShardSpec& spec, const at::TensorOptions& options) {
  return made(spec, options,
              [&](const at::TensorOptions& o) { return at::zeros(spec.local_shape(), o); });
}
at::Tensor ones(const ShardSpec& spec, const at::TensorOptions& options) {
  refuse_partial(spec, "ones");
  return made(spec, options,
              [&](const at::TensorOptions& o) { return at::ones(spec.local_shape(), o); });
}
at::Tensor arange(const ShardSpec& spec, const at::TensorOptions& options) {
  return arange(spec, 0, 1, options);
}
at::Tensor arange(const ShardSpec& spec, const at::Scalar& start, const at::Scalar& step,
                  const at::TensorOptions& options) {
  refuse_partial(spec, "arange");
  if (spec.dims() != 1) throw InvalidArgument("arange: a spec of one dim is needed, not ", spec);
  const std::int64_t begin = spec.local_offset()[0];
  const bool integral = start.isIntegral(false) && step.isIntegral(false);
  const auto dtype = options.has_dtype() ? c10::typeMetaToScalarType(options.dtype())
                     : integral          ? at::kLong
                                         : at::kFloat;
  return made(spec, options.dtype(dtype), [&](const at::TensorOptions& o) {
    // As libtorch computes an element: start + i * step, in the dtype that the numbers need.
    return at::arange(begin, begin + spec.local_shape()[0],
                      o.dtype(integral ? at::kLong : at::kDouble))
        .mul(step)
        .add(start)
        .to(dtype);
  });
}
at::Tensor rand(const ShardSpec& spec, const at::TensorOptions& options) {
  refuse_partial(spec, "rand");
  const at::Tensor t = empty(spec, options.requires_grad(false));
  return t.uniform_().requires_grad_(options.requires_grad());
}
at::Tensor randn(const ShardSpec& spec, const at::TensorOptions& options) {
  refuse_partial(spec, "randn");
  const at::Tensor t = empty(spec, options.requires_grad(false));
  return t.normal_().requires_grad_(options.requires_grad());
}

}  // namespace tessera
