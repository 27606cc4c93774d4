#include "tessera/tensor/dispatch/internal/promote.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/parameter_source.h"
#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {
namespace {

ParameterSources& sources_of(const ShardMeta& meta) {
  return context_of(meta.spec())->state->sources;
}

// The parameter over the memory that its source keeps in another dtype. A write to the parameter
// counts as one to it, so that backward refuses what has changed since.
at::Tensor alias_in(const at::Tensor& parameter, at::Tensor local) {
  const Layout& layout = *meta_of(parameter)->layout;
  LayoutPtr own = marked(
      make_layout(layout.spec, layout.strides, layout.offset, local.scalar_type(), layout.device),
      layout.marks());
  at::Tensor made = wrap_shown(std::move(local), std::move(own), layout.device);
  if (!made.is_inference() && !parameter.is_inference())
    made.unsafeGetTensorImpl()->set_version_counter(
        parameter.unsafeGetTensorImpl()->version_counter());
  return made;
}

struct CastParameter : torch::autograd::Function<CastParameter> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& parameter,
                            const at::Tensor& local) {
    ctx->saved_data["dtype"] = static_cast<std::int64_t>(parameter.scalar_type());
    ctx->set_materialize_grads(false);
    return alias_in(parameter, local);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& g) {
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    return {g[0].defined() ? g[0].to(dtype) : at::Tensor(), at::Tensor()};
  }
};

// One tensor among the arguments.
struct Argument {
  at::Tensor tensor;
  bool written = false;
  // Of a parameter that has one.
  std::shared_ptr<ParameterSource> source = {};
  std::size_t index = 0;
  ParameterPrecision precision = {};
  // Replaces the argument.
  std::function<void(at::Tensor)> set = {};

  // A parameter's copy in another dtype, as autocast makes it, which operators take as it is.
  bool is_copy() const { return source && precision.compute == tensor.scalar_type(); }
  // Whether it is replaced: a copy, where it decides about the dtype of the result.
  bool casts() const {
    return set && precision.compute && (!is_copy() || precision.output) &&
           at::isFloatingType(tensor.scalar_type());
  }
};

void look_up(Argument& argument) {
  const ShardMeta* meta = argument.tensor.defined() ? meta_of(argument.tensor) : nullptr;
  if (!meta || meta->copy) return;
  std::tie(argument.source, argument.index) = sources_of(*meta).find(meta->local);
  if (argument.source) argument.precision = argument.source->precision(argument.index);
}

// Replaces a tensor of the argument `v`: the argument itself, or an element of it. None: it stays.
std::function<void(at::Tensor)> setter_of(OpInfo::Kind kind, c10::IValue& v, int element) {
  if (kind == OpInfo::Kind::tensor) return [&v](at::Tensor made) { v = std::move(made); };
  if (kind != OpInfo::Kind::tensor_list) return nullptr;
  return [&v, element](const at::Tensor& made) {
    // Another list: this one may be the caller's.
    c10::List<at::Tensor> fresh = v.toTensorList().copy();
    fresh.set(static_cast<std::size_t>(element), made);
    v = std::move(fresh);
  };
}

std::vector<Argument> arguments_of(const OpInfo& info, c10::IValue* values) {
  std::vector<Argument> all;
  each_tensor(info, values, [&](const at::Tensor& t, int i, int element) {
    all.push_back({.tensor = t,
                   .written = info.written[i],
                   .set = setter_of(info.kinds[i], values[i], element)});
    look_up(all.back());
  });
  return all;
}

bool never_casts(const OpInfo& info) {
  return info.name.starts_with("aten::_foreach_") || info.name.starts_with("aten::_fused_") ||
         info.name.starts_with("aten::_amp_") || info.name == "aten::copy_" ||
         info.name.find("batch_norm") != std::string::npos;
}

bool is_data(const Argument& a) {
  return !a.source && !a.tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

// Whether the parameter meets data. What works element by element on tensors like it, or on one
// without dims, is an optimizer or a penalty.
bool meets_data(const std::vector<Argument>& all, const Argument& parameter, bool pointwise) {
  return std::ranges::any_of(all, [&](const Argument& a) {
    if (!is_data(a)) return false;
    const at::Tensor &t = a.tensor, &p = parameter.tensor;
    return !pointwise ||
           (t.dim() > 0 && !(t.sizes() == p.sizes() && t.scalar_type() == p.scalar_type()));
  });
}

ParameterCasts cast_all(std::vector<Argument>& all, bool pointwise) {
  ParameterCasts casts;
  const Argument* first = nullptr;
  for (const Argument& a : all) {
    if (a.source && a.written) return {};
    if (!first && a.casts()) first = &a;
  }
  if (!first || !meets_data(all, *first, pointwise)) return {};
  const at::ScalarType compute = *first->precision.compute;
  for (Argument& a : all) {
    if (a.casts()) {
      at::Tensor local = a.source->computed(a.index, *meta_of(a.tensor));
      at::Tensor cast = !local.defined() && a.is_copy() ? a.tensor.clone()
                        : !local.defined()              ? a.tensor.to(*a.precision.compute)
                        : at::GradMode::is_enabled() && a.tensor.requires_grad()
                            ? CastParameter::apply(a.tensor, local)
                            : alias_in(a.tensor, local);
      casts.any = true;
      if (!casts.output) casts.output = a.precision.output;
      a.set(std::move(cast));
    } else if ((is_data(a) || a.is_copy()) && !a.written && a.set && a.tensor.dim() > 0 &&
               at::isFloatingType(a.tensor.scalar_type()) && a.tensor.scalar_type() != compute) {
      casts.any = true;
      a.set(a.tensor.to(compute));
    }
  }
  return casts;
}

}  // namespace

bool casts_parameters(const ShardMeta& meta) { return sources_of(meta).casts(); }

ParameterCasts cast_arguments(const OpInfo& info, c10::IValue* arguments) {
  if (info.view || never_casts(info)) return {};
  std::vector<Argument> all = arguments_of(info, arguments);
  return cast_all(all, info.pointwise);
}

ParameterCasts cast_tensors(at::ArrayRef<at::Tensor*> tensors) {
  std::vector<Argument> all;
  for (at::Tensor* t : tensors)
    if (t->defined())
      all.push_back({.tensor = *t, .set = [t](at::Tensor cast) { *t = std::move(cast); }});
  for (Argument& argument : all) look_up(argument);
  return cast_all(all, false);
}

at::Tensor cast_result(at::Tensor result, const ParameterCasts& casts) {
  return casts.output && result.defined() && at::isFloatingType(result.scalar_type())
             ? result.to(*casts.output)
             : result;
}

void cast_result(const OpInfo& info, torch::jit::Stack* stack, const ParameterCasts& casts) {
  if (!casts.output || info.writes || info.returns.empty() || !info.returns[0].tensor) return;
  c10::IValue& first = (*stack)[stack->size() - info.returns.size()];
  if (first.isTensor()) first = cast_result(first.toTensor(), casts);
}

}  // namespace tessera::detail
