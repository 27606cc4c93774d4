#include "tessera/tensor/redistribution.h"

#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"
#include "tessera/tensor/dispatch/internal/sparse_rows.h"
#include "tessera/tensor/spec/detail/redistribution_plan.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera {
namespace {

using detail::LocalCallGuard;
using detail::ShardMeta;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Redistribute : torch::autograd::Function<Redistribute> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& t, const ShardSpec& to,
                            const ShardSpec& gradient,
                            const std::shared_ptr<detail::Redistribution>& run) {
    const ShardMeta& meta = detail::fresh_meta(t);
    detail::carry(ctx, gradient);
    ctx->set_materialize_grads(false);  // without a gradient there is nothing to move
    auto layout = detail::make_layout(to, t.strides(), meta.layout->offset, meta.layout->dtype,
                                      meta.layout->device);
    at::Tensor local =
        run ? run->finish() : detail::redistribute_local(detail::on_device(meta), meta.spec(), to);
    const LocalCallGuard guard;
    // A slice of the input is copied: a write to the result must not be one to the input, and the
    // input's memory can be freed.
    if (local.is_alias_of(meta.local)) local = local.clone(at::MemoryFormat::Contiguous);
    if (layout->dense) return detail::wrap_fresh(std::move(local), layout);
    return detail::wrap_fresh(local.contiguous(),
                              detail::make_layout(to, meta.layout->dtype, meta.layout->device));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    if (!g[0].defined()) return variable_list(4);
    const ShardSpec spec = detail::carried(ctx);
    variable_list gradients(4);
    gradients[0] = redistribute(detail::sharded_gradient(g[0], spec), spec);
    return gradients;
  }
};

ShardSpec target_spec(const ShardSpec& from, const std::vector<Placement>& placements,
                      const ShardSizes& sizes) {
  ShardSizes all = sizes;
  for (const auto& [d, kept] : from.with_placements(placements).sizes())
    if (!sizes.contains(d - from.dims())) all.emplace(d, kept);
  return ShardSpec(from.mesh(), from.shape(), placements, all);
}

class Started final : public detail::Unfinished<at::Tensor> {
 public:
  Started(at::Tensor tensor, const ShardSpec& to) : tensor_(std::move(tensor)), to_(to) {
    const ShardMeta& meta = detail::fresh_meta(tensor_);
    run_ =
        std::make_shared<detail::Redistribution>(detail::on_device(meta), meta.spec(), to, false);
  }
  bool done() override { return run_->done(); }
  at::Tensor finish() override {
    return Redistribute::apply(tensor_, to_,
                               detail::gradient_spec(detail::meta_or_throw(tensor_).spec()),
                               std::move(run_));
  }

 private:
  const at::Tensor tensor_;
  const ShardSpec to_;
  std::shared_ptr<detail::Redistribution> run_;
};

}  // namespace

at::Tensor redistribute(const at::Tensor& t, const ShardSpec& to) {
  const ShardSpec from = detail::meta_or_throw(t).spec();
  if (from == to) return t;
  return Redistribute::apply(t.is_sparse() ? detail::with_dense_locals(t) : t, to,
                             detail::gradient_spec(from), nullptr);
}

at::Tensor redistribute(const at::Tensor& t, const std::vector<Placement>& placements,
                        const ShardSizes& sizes,
                        const std::optional<std::vector<Placement>>& gradient) {
  const ShardSpec from = detail::meta_or_throw(t).spec(), to = target_spec(from, placements, sizes);
  return from == to && !gradient
             ? t
             : Redistribute::apply(t.is_sparse() ? detail::with_dense_locals(t) : t, to,
                                   detail::gradient_spec(from, gradient), nullptr);
}

Pending<at::Tensor> start_redistribute(const at::Tensor& t, const ShardSpec& to) {
  if (detail::meta_or_throw(t).spec() == to) return Pending<at::Tensor>(t);
  return Pending<at::Tensor>(std::make_shared<Started>(t, to));
}

Pending<at::Tensor> start_redistribute(const at::Tensor& t,
                                       const std::vector<Placement>& placements,
                                       const ShardSizes& sizes) {
  return start_redistribute(t, target_spec(detail::meta_or_throw(t).spec(), placements, sizes));
}

std::vector<RedistributionCall> explain_redistribution(const ShardSpec& from, const ShardSpec& to) {
  if (from.shape() != to.shape() || detail::context_of(from) != detail::context_of(to))
    throw InvalidArgument("cannot redistribute ", from, " as ", to, ": mesh or shape differ");
  std::vector<RedistributionCall> calls;
  if (from == to) return calls;
  using Plan = detail::RedistributionPlan;
  const auto plan = detail::context_of(from)->redistributions->of(from, to);
  const auto names = [&](const std::vector<int>& axes) {
    std::vector<std::string> all;
    for (const int a : axes) all.push_back(from.mesh().mesh().axes()[a].name);
    return all;
  };
  for (const auto& r : plan->reductions)
    calls.push_back(
        {r.pieces.empty() ? "all_reduce" : "reduce_scatter", names(r.axes), Plan::received(r)});
  static constexpr const char* kNames[] = {"", "all_gather", "broadcast", "all_to_all", "exchange"};
  if (plan->move.kind != Plan::Move::Kind::none)
    calls.push_back(
        {kNames[static_cast<int>(plan->move.kind)], names(plan->move.axes), plan->moved()});
  return calls;
}

}  // namespace tessera
