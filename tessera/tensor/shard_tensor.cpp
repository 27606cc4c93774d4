#include "tessera/tensor/shard_tensor.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Formatting.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <iostream>

#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/comm/agree/agree.h"
#include "tessera/comm/job/internal/failures.h"
#include "tessera/gradient/internal/announce.h"
#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/promote.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"
#include "tessera/tensor/dispatch/internal/sparse_rows.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/detail/shard_dims.h"
#include "tessera/tensor/spec/internal/boxes.h"
#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera {

namespace detail {

void require_plain(const at::Tensor& t, const char* call) {
  if (!t.defined()) throw InvalidArgument(call, ": the tensor is undefined");
  if (is_sharded(t))
    throw InvalidArgument(call, ": the tensor is itself a ShardTensor, ", spec(t),
                          ": tessera::redistribute() gives it other placements");
  if (t.layout() != c10::kStrided || t.is_quantized() || t.is_nested())
    throw ShardingError(
        "a ", t.toString(),
        " tensor cannot be sharded: sparse, quantized and nested tensors are not supported");
}

const ShardMeta& meta_or_throw(const at::Tensor& t) {
  const ShardMeta* meta = t.defined() ? meta_of(t) : nullptr;
  if (!meta)
    throw InvalidArgument(
        t.defined()
            ? concat("a plain tensor of shape ", t.sizes(),
                     " where a sharded one is needed: use tessera::distribute_tensor or from_local")
            : "an undefined tensor where a sharded one is needed");
  return *meta;
}

at::Tensor local_values(const at::Tensor& t) {
  return is_sharded(t) ? to_local(t.detach()) : t.detach();
}

const ShardMeta& fresh_meta(const at::Tensor& t) {
  const ShardMeta& meta = meta_or_throw(t);
  if (meta.copy && !meta.copy->fresh()) meta.copy->refresh();
  return meta;
}

ShardSpec gradient_spec(const ShardSpec& spec,
                        const std::optional<std::vector<Placement>>& chosen) {
  if (chosen)
    return spec.with_placements(ShardSpec(spec.mesh(), spec.shape(), *chosen).placements());
  return without_partial(spec);
}

at::Tensor sharded_gradient(const at::Tensor& g, const ShardSpec& like) {
  return meta_of(g) ? g : promote(g, context_of(like));
}

}  // namespace detail

namespace {

using detail::carried;
using detail::carry;
using detail::gradient_spec;
using detail::meta_or_throw;
using detail::sharded_gradient;

using detail::LocalCallGuard;
using detail::RankState;
using detail::ShardMeta;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void share_version(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_inference() && !b.is_inference())
    a.unsafeGetTensorImpl()->set_version_counter(b.unsafeGetTensorImpl()->version_counter());
}

// The global ranks that differ from this one along the axes that are Replicate, or along the
// others, and this one itself.
std::vector<int> ranks_along(const ShardSpec& spec, bool replicated) {
  const auto& context = detail::context_of(spec);
  std::vector<int> axes;
  for (int axis = 0; axis < spec.mesh_dims(); ++axis)
    if (spec.placements()[axis].is_replicate() == replicated && context->sizes[axis] > 1)
      axes.push_back(axis);
  const Mesh& layout = context->mesh.mesh();
  return axes.empty() ? std::vector<int>() : layout.group(axes, layout.ranks()[context->position]);
}

// Checks that backward enters the sharded tensors with gradients of the sum of the ranks' losses.
void require_sum(const ShardSpec& gradient, const char* name) {
  if (detail::averaged_above(ranks_along(gradient, false)))
    throw GradientError(
        name,
        ": its gradient comes from a mean_loss that is scaled for a mean over ranks, but gradients "
        "of sharded tensors are sums over ranks: they would be too large by their number. Give "
        "mean_loss the operation ReduceOp::sum, and DistributedDataParallelOptions::reduction the "
        "same.");
}

// A solver that goes on in its own memory, and sees nothing of the tensor, is told once.
void warn_of_copy(const at::Tensor& local, const ShardSpec& spec) {
  const auto* memory = local.has_storage() ? local.storage().unsafeGetStorageImpl() : nullptr;
  if (!memory || memory->resizable()) return;  // libtorch's own
  RankState& state = *detail::context_of(spec)->state;
  {
    const std::lock_guard lock(state.mutex);
    if (!state.warned.insert("from_local copies").second) return;
  }
  TORCH_WARN("from_local: a local of shape ", local.sizes(), " and strides ", local.strides(),
             " in memory of the program's own was copied, for it is not in row-major order without "
             "gaps: what is written to that memory later does not reach the tensor, nor the other "
             "way. from_blob of tessera/tensor/blob.h shares memory with ghost cells, with strides "
             "or in Fortran order; local.clone() says that a copy is meant.");
}

struct FromLocal : torch::autograd::Function<FromLocal> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& local, const ShardSpec& spec) {
    carry(ctx, gradient_spec(spec));
    ctx->set_materialize_grads(false);  // without a gradient there is nothing to move
    if (spec.has_partial()) {
      carry(ctx, spec, "summands");
      if (of_values(spec)) ctx->save_for_backward({local});
    }
    const LocalCallGuard guard;
    const bool shares = local.is_contiguous() && !local.is_conj() && !local.is_neg();
    if (!shares) warn_of_copy(local, spec);
    at::Tensor own = shares ? local.detach() : local.resolve_conj().resolve_neg().contiguous();
    at::Tensor t =
        detail::wrap(own, detail::make_layout(spec, local.scalar_type(), local.device()));
    if (shares) share_version(t, local);
    return t;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    if (!g[0].defined()) return {at::Tensor(), at::Tensor()};
    const ShardSpec spec = carried(ctx);
    // The uses that ranks make of their locals have several gradients: summands if the locals
    // differ, the same one if they are replicated.
    const ShardSpec locals =
        ctx->saved_data.count("summands") > 0 ? carried(ctx, "summands") : spec;
    detail::announce_gradient(GradientForm::partial, ranks_along(locals, false),
                              detail::from_sharded);
    detail::announce_gradient(GradientForm::complete, ranks_along(locals, true),
                              detail::from_sharded);
    at::Tensor gradient = to_local(redistribute(sharded_gradient(g[0], spec), spec));
    if (ctx->saved_data.count("summands") > 0) {
      const ShardSpec summands = carried(ctx, "summands");
      const auto saved = ctx->get_saved_variables();
      gradient = of_summand(std::move(gradient), saved.empty() ? at::Tensor() : saved[0], summands);
    }
    return {gradient, at::Tensor()};
  }

 private:
  static bool of_values(const ShardSpec& spec) {
    return std::ranges::any_of(spec.placements(), [](const Placement& p) {
      return p.is_partial() && !p.is_partial(ReduceOp::Kind::sum) &&
             !p.is_partial(ReduceOp::Kind::avg);
    });
  }

  // The derivative of the value with respect to this rank's local. For a sum it is 1, for a mean
  // over n ranks 1/n, for a product that of the other locals; for an extremum the gradient is
  // divided equally among the locals that attain it, as in amax.
  static at::Tensor of_summand(at::Tensor gradient, const at::Tensor& local,
                               const ShardSpec& summands) {
    const auto& context = detail::context_of(summands);
    for (int axis = 0; axis < summands.mesh_dims(); ++axis) {
      const Placement& p = summands.placements()[axis];
      const int ranks = context->sizes[axis];
      if (!p.is_partial() || ranks == 1 || p.is_partial(ReduceOp::Kind::sum)) continue;
      if (p.is_partial(ReduceOp::Kind::avg)) {
        gradient = gradient / ranks;
        continue;
      }
      if (std::ranges::count_if(summands.placements(),
                                [](const Placement& q) { return q.is_partial(); }) > 1)
        throw ShardingError("from_local: the gradient of the summands of ", summands,
                            " is not defined here: make one axis Partial at a time");
      if (at::GradMode::is_enabled())
        throw ShardingError("from_local: the summands of a ", p, " have no second derivative");
      const at::Tensor own = local.detach();
      const Group group = context->group(axis);
      at::Tensor gathered = at::empty({ranks * own.numel()}, own.options());
      group.all_gather(gathered, own.contiguous().view({-1}), Sizes(ranks, own.numel()),
                       {.name = "from_local"});
      std::vector<std::int64_t> shape = own.sizes().vec();
      shape.insert(shape.begin(), ranks);
      const at::Tensor each = gathered.view(shape);
      if (p.is_partial(ReduceOp::Kind::product)) {
        const int me = context->coordinate[axis];
        for (int r = 0; r < ranks; ++r)
          if (r != me) gradient = gradient * each[r].conj();
      } else {
        const at::Tensor value = p.is_partial(ReduceOp::Kind::max) ? each.amax(0) : each.amin(0);
        gradient = gradient * own.eq(value) / each.eq(value).sum(0);
      }
    }
    return gradient;
  }
};

struct ToLocal : torch::autograd::Function<ToLocal> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& t, const ShardSpec& gradient) {
    const ShardMeta& meta = meta_or_throw(t);
    // No other rank takes part here, so that it cannot be taken again.
    if (meta.copy) meta.copy->require_fresh("to_local");
    carry(ctx, gradient);
    if (detail::in_host_memory(meta)) ctx->saved_data["device"] = meta.layout->device;
    const LocalCallGuard guard;
    // A write to it could not reach the base: docs/shard_tensor.md says so.
    if (meta.copy) return meta.local.clone();
    at::Tensor local = meta.local.detach();
    // a mutation of the local is one of the tensor: saved variables must notice it
    share_version(local, t);
    return local;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    if (!g[0].defined()) return {at::Tensor(), at::Tensor()};
    require_sum(carried(ctx), "to_local");
    if (detail::meta_of(g[0])) return {g[0], at::Tensor()};
    const auto shown = ctx->saved_data.find("device");
    const at::Tensor local =
        shown == ctx->saved_data.end() ? g[0] : g[0].to(shown->second.toDevice());
    return {from_local(local, carried(ctx)), at::Tensor()};
  }
};

struct FullTensor : torch::autograd::Function<FullTensor> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& t, const ShardSpec& whole,
                            const ShardSpec& gradient) {
    const ShardMeta& meta = detail::fresh_meta(t);
    carry(ctx, gradient);
    carry(ctx, gradient_spec(meta.spec()), "own");
    const at::Tensor local =
        detail::redistribute_local(detail::on_device(meta), meta.spec(), whole);
    const LocalCallGuard guard;
    // A write to the value must not be one to the tensor, whatever its placement.
    return local.is_alias_of(meta.local) ? local.clone() : local;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    if (!g[0].defined()) return variable_list(3);
    require_sum(carried(ctx), "full_tensor");
    variable_list gradients(3);
    gradients[0] = redistribute(detail::meta_of(g[0]) ? g[0] : from_local(g[0], carried(ctx)),
                                carried(ctx, "own"));
    return gradients;
  }
};

// The spec that a local and the sizes of every sharded dim determine; nullopt if they do not.
std::optional<ShardSpec> spec_of_sizes(const at::Tensor& local, const DeviceMesh& mesh,
                                       const std::vector<Placement>& placements,
                                       const ShardSizes& sizes) {
  std::vector<std::int64_t> shape = local.sizes().vec();
  const int dims = static_cast<int>(local.dim());
  bool sharded = false;
  for (const Placement& p : placements) {
    if (!p.is_shard()) continue;
    sharded = true;
    const int d = p.dim < 0 ? p.dim + dims : p.dim;
    if (d < 0 || d >= dims) return std::nullopt;
    auto it = sizes.find(d);
    if (it == sizes.end()) it = sizes.find(d - dims);
    if (it == sizes.end()) return std::nullopt;
    shape[d] = 0;
    for (const auto n : it->second) shape[d] += n;
  }
  if (!sharded) return std::nullopt;
  return ShardSpec(mesh, shape, placements, sizes);
}

// Every rank's local shape, by row-major mesh position. What must be the same on all ranks is
// compared at the same time, so that all of them throw. `wrong`: this rank's own arguments are.
std::vector<std::vector<std::int64_t>> gather_shapes(
    const at::Tensor& local, const DeviceMesh& mesh, const std::vector<Placement>& placements,
    const ShardSizes& given, const std::string& kind, const std::exception_ptr& wrong) {
  std::string alike = concat(kind, ", placements ", list(placements));
  for (const auto& [dim, sizes] : given) alike += concat(", dim ", dim, " sizes ", list(sizes));
  std::string mine = alike + "|";
  if (!wrong)
    for (const auto n : local.sizes()) mine += concat(n, ",");
  const auto all = agree::all<std::string, ShardingError>(mesh.all(), "from_local",
                                                          [&] {
                                                            if (wrong)
                                                              std::rethrow_exception(wrong);
                                                            return mine;
                                                          },
                                                          {.name = "from_local"});
  std::vector<std::vector<std::int64_t>> shapes;
  std::string first;
  for (const std::string& text : all) {
    const auto end = text.find('|');
    if (shapes.empty()) first = text.substr(0, end);
    if (first != text.substr(0, end))
      throw InvalidArgument("from_local: the ranks' locals differ: at mesh position 0 ", first,
                            "; at ", shapes.size(), " ", text.substr(0, end),
                            ": give them one dtype, device and placements");
    std::vector<std::int64_t> shape;
    for (std::size_t at = end + 1; at < text.size();) {
      const auto comma = text.find(',', at);
      shape.push_back(std::stoll(text.substr(at, comma - at)));
      at = comma + 1;
    }
    shapes.push_back(std::move(shape));
  }
  return shapes;
}

ShardSpec gathered_spec(const at::Tensor& local, const DeviceMesh& mesh,
                        const std::vector<Placement>& placements, const ShardSizes& given,
                        const std::string& kind, const std::exception_ptr& wrong) {
  const Mesh& layout = mesh.mesh();
  const auto shapes = gather_shapes(local, mesh, placements, given, kind, wrong);
  const auto say = [&](const char* what, int dim) {
    const auto all = joined(shapes, " ", [](const auto& shape) { return list(shape); });
    return InvalidArgument(concat("from_local: ", what, dim < 0 ? "" : concat(" in dim ", dim),
                                  " under ", list(placements), "; local shapes by mesh position: ",
                                  all, ". Shard the dims in which they differ, and no others"));
  };
  const std::size_t dims = shapes[0].size();
  for (const auto& s : shapes)
    if (s.size() != dims) throw say("the ranks' locals have different numbers of dims", -1);
  std::vector<std::int64_t> shape(dims);
  ShardSizes sizes;
  for (std::size_t d = 0; d < dims; ++d) {
    const auto axes = detail::axes_where(placements, [&](const Placement& p) {
      const int from_first = p.dim < 0 ? p.dim + static_cast<int>(dims) : p.dim;
      return p.is_shard() && from_first == static_cast<int>(d);
    });
    Sizes of_part(layout.group_size(axes), -1);
    for (std::size_t position = 0; position < shapes.size(); ++position) {
      std::int64_t& size = of_part[layout.group_rank(axes, layout.ranks()[position])];
      if (size >= 0 && size != shapes[position][d])
        throw say("ranks that should hold the same shard disagree", static_cast<int>(d));
      size = shapes[position][d];
    }
    for (const auto n : of_part) shape[d] += n;
    if (!axes.empty()) sizes[static_cast<int>(d)] = of_part;
  }
  for (const auto& [dim, list_of_sizes] : given) {
    const int d = dim < 0 ? dim + static_cast<int>(dims) : dim;
    if (!sizes.contains(d) || sizes[d] != list_of_sizes)
      throw say("the sizes given are not those of the locals", d);
  }
  return ShardSpec(mesh, shape, placements, sizes);
}

}  // namespace

bool detail::from_sharded(const torch::autograd::Node& node) {
  return dynamic_cast<const torch::autograd::CppNode<ToLocal>*>(&node) ||
         dynamic_cast<const torch::autograd::CppNode<FullTensor>*>(&node) || is_demotion(node);
}

bool is_sharded(const at::Tensor& t) { return t.defined() && detail::meta_of(t); }
ShardSpec spec(const at::Tensor& t) { return meta_or_throw(t).spec(); }
const std::vector<Placement>& placements(const at::Tensor& t) {
  return meta_or_throw(t).spec().placements();
}

at::Tensor from_local(const at::Tensor& local, const ShardSpec& spec) {
  detail::ensure_registered();
  detail::require_plain(local, "from_local");
  if (local.sizes() != at::IntArrayRef(spec.local_shape())) {
    throw InvalidArgument("from_local: the local has shape ", local.sizes(), ", the spec ", spec,
                          " says ", list(spec.local_shape()), " for this rank");
  }
  return FromLocal::apply(local, spec);
}

at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                      const std::vector<Placement>& placements, const ShardSizes& sizes) {
  detail::ensure_registered();
  detail::Agreed& agreed = detail::MeshContext::of(mesh)->state->agreed;
  const std::vector<int>& ranks = mesh.mesh().ranks();
  const std::uint64_t failures = failures_of(mesh);
  std::string kind;
  const auto key = [&](const ShardSpec& spec) {
    return Hash().text(concat(spec, ", ", kind)).value();
  };
  std::optional<ShardSpec> known;
  // The other ranks may be asking this one for its shape: they are told.
  std::exception_ptr wrong;
  try {
    detail::require_one_per_axis(mesh.mesh(), placements);
    detail::require_plain(local, "from_local");
    kind = concat(toString(local.scalar_type()),
                  local.requires_grad() && at::GradMode::is_enabled() ? ", requiring grad" : "");
    known = spec_of_sizes(local, mesh, placements, sizes);
  } catch (const Error&) {
    wrong = std::current_exception();
  }
  // Ranks that have agreed once need not communicate again.
  if (known && agreed.contains(ranks, failures, key(*known))) return from_local(local, *known);
  const ShardSpec spec = gathered_spec(local, mesh, placements, sizes, kind, wrong);
  agreed.add(ranks, failures, key(spec));
  return from_local(local, spec);
}

at::Tensor from_blob(void* data, const ShardSpec& spec, const at::TensorOptions& options,
                     std::function<void(void*)> deleter) {
  if (!data && spec.local_numel() > 0)
    throw InvalidArgument("from_blob: no memory for the local of ", spec);
  return from_local(
      at::from_blob(
          data, spec.local_shape(), deleter ? std::move(deleter) : [](void*) {}, options),
      spec);
}

at::Tensor to_local(const at::Tensor& t, const std::optional<std::vector<Placement>>& gradient) {
  const ShardSpec own = spec(t);
  const ShardSpec wanted = gradient_spec(own, gradient);
  if (wanted.local_shape() != own.local_shape()) {
    throw InvalidArgument("to_local: a gradient placed as ", list(*gradient),
                          " has another local shape than the tensor, ", own);
  }
  return ToLocal::apply(t, wanted);
}

at::Tensor full_tensor(const at::Tensor& t, const std::optional<std::vector<Placement>>& gradient) {
  const ShardSpec own = spec(t), whole = detail::replicated(own);
  if (gradient) {
    for (const Placement& p : *gradient)
      if (p.is_shard())
        throw InvalidArgument(
            "full_tensor: every rank's gradient is complete, it cannot be placed as ",
            list(*gradient));
  }
  return FullTensor::apply(t.is_sparse() ? detail::with_dense_locals(t) : t, whole,
                           gradient ? whole.with_placements(*gradient) : whole);
}

std::string summary(const at::Tensor& t) {
  const ShardMeta& meta = meta_or_throw(t);
  return concat("ShardTensor ", toString(meta.layout->dtype), " ", meta.spec(), ", local ",
                list(meta.spec().local_shape()), " at ", list(meta.spec().local_offset()));
}

void print(const at::Tensor& t) {
  meta_or_throw(t);
  const at::Tensor whole = full_tensor(t.detach());
  if (spec(t).mesh().all().rank() == 0) std::cout << summary(t) << "\n" << whole << "\n";
}

}  // namespace tessera
