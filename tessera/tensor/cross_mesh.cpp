// From one mesh to another. The ranks of both meet in one group; those that do not hold the tensor
// are told its shape and dtype.

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>

#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/partition/transfer.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/redistribution.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/tensor/spec/detail/shard_dims.h"
#include "tessera/tensor/spec/internal/boxes.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Source {
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = false;
  std::vector<std::int64_t> shape;
  std::vector<DimSharding> dims;
};

std::string write(const Source& s) {
  TextStream out;
  out << static_cast<int>(s.dtype) << ' ' << s.requires_grad << ' ' << s.shape.size();
  for (std::size_t d = 0; d < s.shape.size(); ++d) {
    out << ' ' << s.shape[d] << ' ' << s.dims[d].axes.size();
    for (const int a : s.dims[d].axes) out << ' ' << a;
    if (s.dims[d].axes.empty()) continue;
    out << ' ' << s.dims[d].partition.parts();
    for (const auto n : s.dims[d].partition.sizes()) out << ' ' << n;
  }
  return std::move(out).str();
}

Source read(const std::string& text) {
  TextReader in(text);
  Source s;
  int dtype = 0;
  std::size_t dims = 0;
  in >> dtype >> s.requires_grad >> dims;
  s.dtype = static_cast<at::ScalarType>(dtype);
  s.shape.resize(dims);
  s.dims.resize(dims);
  for (std::size_t d = 0; d < dims; ++d) {
    std::size_t axes = 0, parts = 0;
    in >> s.shape[d] >> axes;
    s.dims[d].axes.resize(axes);
    for (int& a : s.dims[d].axes) in >> a;
    if (axes == 0) continue;
    in >> parts;
    std::vector<std::int64_t> sizes(parts);
    for (auto& n : sizes) in >> n;
    s.dims[d].partition = Partition(std::span<const std::int64_t>(sizes));
  }
  return s;
}

// This rank's local on the target mesh, from its local on the source mesh; undefined on a rank that
// is in only one of them.
at::Tensor move(const at::Tensor& local, const Source& source, const DeviceMesh& from,
                const DeviceMesh& to, std::vector<DimSharding> dims, const Group& both) {
  const int me = from.manager().rank();
  const Sharding a(source.shape, detail::axis_sizes(from.mesh()), source.dims, from.mesh().ranks());
  const Sharding b(source.shape, detail::axis_sizes(to.mesh()), std::move(dims), to.mesh().ranks());
  const TransferPlan plan = transfer_plan(a, b, me);
  const auto peer = [&](int rank) {
    return static_cast<int>(std::ranges::find(both.ranks(), rank) - both.ranks().begin());
  };
  const detail::LocalCallGuard guard;
  at::Tensor result;
  Box held, wanted;
  if (a.position(me) >= 0) held = a.box(a.position(me));
  if (b.position(me) >= 0) {
    wanted = b.box(b.position(me));
    result = at::empty(detail::shape_of(wanted),
                       at::TensorOptions(source.dtype)
                           .device(local.defined() ? local.device() : to.manager().device()));
  }
  std::vector<Message> messages;
  std::vector<std::pair<at::Tensor, at::Tensor>> arrivals;
  for (const Piece& p : plan.sends)
    messages.push_back(
        {Message::Kind::send, detail::slice(local, held, p.box).contiguous(), peer(p.rank)});
  for (const Piece& p : plan.receives) {
    const at::Tensor part = detail::slice(result, wanted, p.box);
    const at::Tensor buffer = part.is_contiguous() ? part : at::empty(part.sizes(), part.options());
    if (!buffer.is_same(part)) arrivals.emplace_back(part, buffer);
    messages.push_back({Message::Kind::receive, buffer, peer(p.rank)});
  }
  Request request =
      messages.empty() ? Request() : both.started().exchange(messages, {.name = "redistribute"});
  for (const Box& box : plan.copies)
    detail::slice(result, wanted, box).copy_(detail::slice(local, held, box));
  request.wait();
  for (const auto& [part, buffer] : arrivals) part.copy_(buffer);
  return result;
}

Source describe(const at::Tensor& t) {
  const auto& meta = detail::meta_or_throw(t);
  return {meta.layout->dtype, t.requires_grad() && at::GradMode::is_enabled(), meta.spec().shape(),
          meta.spec().sharding().dims()};
}

std::vector<int> all_ranks(const DeviceMesh& from, const DeviceMesh& to) {
  std::vector<int> ranks = from.mesh().ranks();
  ranks.insert(ranks.end(), to.mesh().ranks().begin(), to.mesh().ranks().end());
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

// For meshes that both contain this rank.
struct ToMesh : torch::autograd::Function<ToMesh> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& t, const ShardSpec& to) {
    const ShardSpec from = spec(t);
    detail::carry(ctx, from);
    ctx->set_materialize_grads(false);  // without a gradient there is nothing to move
    const Group both = from.mesh().manager().group(all_ranks(from.mesh(), to.mesh()));
    at::Tensor local = move(detail::fresh_meta(t).local, describe(t), from.mesh(), to.mesh(),
                            to.sharding().dims(), both);
    const auto layout = detail::make_layout(to, local.scalar_type(), local.device());
    return detail::wrap_fresh(std::move(local), layout);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    if (!g[0].defined()) return {at::Tensor(), at::Tensor()};
    const ShardSpec from = detail::carried(ctx);
    return {redistribute(g[0], spec(g[0]).mesh(), from.mesh(), from.placements(), from.sizes()),
            at::Tensor()};
  }
};

// A value without partial axes: each of them becomes a shard if a dim is free for it, so that the
// reduction moves the fewest bytes.
at::Tensor reduced(const at::Tensor& t) {
  const ShardSpec s = spec(t);
  if (!s.has_partial()) return t;
  auto placements = s.placements();
  int dim = -1;
  for (int d = 0; d < s.dims(); ++d)
    if (!s.is_sharded(d) && (dim < 0 || s.shape()[d] > s.shape()[dim])) dim = d;
  for (Placement& p : placements)
    if (p.is_partial()) p = dim >= 0 ? Shard(dim) : Replicate();
  return redistribute(t, placements);
}

}  // namespace

at::Tensor redistribute(const at::Tensor& tensor, const DeviceMesh& from, const DeviceMesh& to,
                        const std::vector<Placement>& placements, const ShardSizes& sizes) {
  const std::vector<int> ranks = all_ranks(from, to);
  const int me = from.manager().rank();
  if (!(from.manager() == to.manager()))
    throw InvalidArgument("redistribute: the two meshes belong to different managers");
  if (!std::ranges::binary_search(ranks, me)) {
    throw InvalidArgument("redistribute: rank ", me,
                          " is in neither mesh; only the ranks of one of them call this");
  }
  const bool same_ranks =
      ranks.size() == from.mesh().ranks().size() && ranks.size() == to.mesh().ranks().size();
  const Group both = from.manager().group(ranks);
  // A rank that finds a mistake reports it before any rank waits for its data.
  at::Tensor t = tensor;
  const auto all = agree::all<std::string, ShardingError>(
      both, "redistribute to another mesh",
      [&]() -> std::string {
        for (const Placement& p : placements)
          if (p.is_partial())
            throw InvalidArgument("the target may not be partial: ", list(placements),
                                  "; redistribute once it is there");
        if (!from.contains_me()) {
          if (!t.defined()) return {};
          throw InvalidArgument("rank ", me, " is not in `from` but gives a tensor");
        }
        if (!is_sharded(t) || !(spec(t).mesh() == from))
          throw InvalidArgument("rank ", me, " does not give a tensor on `from`");
        t = reduced(t);
        return write(describe(t));
      },
      {.name = "redistribute"});
  std::string description;
  for (const std::string& text : all) {
    if (text.empty()) continue;
    if (!description.empty() && description != text)
      throw InvalidArgument("redistribute to another mesh: the ranks give different tensors");
    description = text;
  }
  const Source source = read(description);
  if (source.requires_grad && !same_ranks) {
    throw ShardingError("redistribute: a tensor that requires grad cannot go from ranks ",
                        list(from.mesh().ranks()), " to ranks ", list(to.mesh().ranks()),
                        ": backward would miss ranks. Detach it, or use meshes of the same ranks.");
  }
  if (same_ranks) return ToMesh::apply(t, ShardSpec(to, source.shape, placements, sizes));
  auto normal = placements;
  const auto dims = detail::shard_dims(to.mesh(), source.shape, normal, sizes);
  const at::Tensor local =
      move(t.defined() ? detail::fresh_meta(t).local : at::Tensor(), source, from, to, dims, both);
  if (!to.contains_me()) return {};
  return from_local(local, ShardSpec(to, source.shape, placements, sizes));
}

}  // namespace tessera
