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

struct Named {
  MapPtr map;
  const char* name;
};

struct Apply : torch::autograd::Function<Apply> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& field, const MapPtr& map,
                            const char* name) {
    carry(ctx, Named{map, name}, "map");
    const ShardMeta& meta = fresh_meta(field);
    at::Tensor local;
    try {
      const LocalCallGuard guard;
      local = map->run(meta.local.resolve_conj().resolve_neg());
    } catch (...) {
      rethrow_to_all(name, *context_of(map->to));
    }
    const LocalCallGuard guard;
    const auto layout = make_layout(map->to, map->strides, 0, local.scalar_type(), local.device());
    return wrap_fresh(std::move(local), layout);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    variable_list gradients(3);
    if (!g[0].defined()) return gradients;
    const auto [map, name] = carried<Named>(ctx, "map");
    const MapPtr derivative = map->derivative();
    gradients[0] = Apply::apply(
        redistribute(sharded_gradient(g[0], derivative->from), derivative->from), derivative, name);
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
  return Apply::apply(laid_out(name, "self", field, map->from), map, name);
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
