#include "tessera/ops/halo/detail/field_halo.h"

#include <ATen/ops/zeros.h>

#include "tessera/ops/rules/detail/windowed.h"

namespace tessera::detail {

Halo halo_of_windows(const ShardSpec& field, const ShardSpec& result, std::size_t windowed,
                     InputsOf inputs) {
  return Halo(field, std::vector<Edge>(static_cast<std::size_t>(field.dims()), Edge::zero),
              [own = field.sharding(), to = result.sharding(), windowed,
               inputs = std::move(inputs)](int position) {
                const Box results = to.box(position);
                Box box = own.box(position);
                if (volume(results) == 0) return Box(box.size());
                const std::size_t lead = box.size() - windowed;
                for (std::size_t i = 0; i < windowed; ++i)
                  box[lead + i] = inputs(i, results[lead + i]);
                return box;
              });
}

bool interior_first(HaloPolicy::Order order, std::int64_t elements, std::int64_t least) {
  return order == HaloPolicy::Order::automatic ? elements >= least
                                               : order != HaloPolicy::Order::assemble;
}

at::Tensor embedded(const at::Tensor& t, const Box& own, const Box& box) {
  if (own == box) return t;
  at::Tensor all = at::zeros(shape_of(box), t.options());
  slice(all, box, own).copy_(t);
  return all;
}

FieldHalo::FieldHalo(ShardSpec x, const ShardSpec& y, std::size_t windowed, InputsOf inputs)
    : x_(std::move(x)),
      windowed_(windowed),
      out_(y.sharding().box(context_of(y)->position)),
      halo_(halo_of_windows(x_, y, windowed, std::move(inputs))) {}

HaloValues FieldHalo::arrived(const at::Tensor& x) const {
  HaloValues values = halo_.start_exchange(x);
  values.arrival().wait();
  return values;
}

}  // namespace tessera::detail
