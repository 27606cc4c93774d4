#include "tessera/ops/rules/detail/field_map.h"

#include <torch/csrc/autograd/custom_function.h>

#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using MapPtr = std::shared_ptr<const FieldMap>;

// A map, or a derivative of it: those of odd orders lead back.
struct Step {
  MapPtr map;
  const char* name;
  int order = 0;

  bool back() const { return order % 2 == 1; }
  const FieldMap::Function& function() const {
    if (back()) return map->backward;
    return order > 0 && map->forward_again ? map->forward_again : map->forward;
  }
};

struct Apply : torch::autograd::Function<Apply> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& field, const Step& step) {
    carry(ctx, step, "step");
    const ShardSpec& to = step.back() ? step.map->x : step.map->y;
    const ShardMeta& meta = fresh_meta(field);
    at::Tensor local = on_locals(step.name, *context_of(to), [&] {
      return step.function()(meta.local.resolve_conj().resolve_neg());
    });
    const LocalCallGuard guard;
    const Dims& strides = step.back() ? step.map->x_strides : step.map->y_strides;
    const auto layout = make_layout(to, strides, 0, local.scalar_type(), local.device());
    return wrap_fresh(std::move(local), layout);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    variable_list gradients(2);
    if (!g[0].defined()) return gradients;
    Step step = carried<Step>(ctx, "step");
    ++step.order;
    const ShardSpec& from = step.back() ? step.map->y : step.map->x;
    gradients[0] = Apply::apply(redistribute(sharded_gradient(g[0], from), from), step);
    return gradients;
  }
};

}  // namespace

at::Tensor laid_out(const char* name, const char* argument, const at::Tensor& field,
                    const ShardSpec& to) {
  const ShardSpec own = spec(field);
  if (own == to) return field;
  check_implicit_moves(name, {{argument, own, to, static_cast<std::int64_t>(field.element_size())}},
                       *context_of(to));
  return redistribute(field, to);
}

at::Tensor apply(const char* name, const at::Tensor& field, const MapPtr& map) {
  return Apply::apply(laid_out(name, "self", field, map->x), Step{map, name});
}

Dims suggested_strides(const at::Tensor& like, const std::vector<std::int64_t>& shape) {
  const auto format = like.suggest_memory_format();
  const at::IntArrayRef sizes(shape);
  if (format == at::MemoryFormat::ChannelsLast && shape.size() == 4)
    return c10::get_channels_last_strides_2d(sizes);
  if (format == at::MemoryFormat::ChannelsLast3d && shape.size() == 5)
    return c10::get_channels_last_strides_3d(sizes);
  return contiguous_strides(shape);
}

}  // namespace tessera::detail
