// Shuffles between channels and space.

#include <ATen/ops/_unsafe_view.h>

#include "tessera/base/internal/vector.h"
#include "tessera/ops/rules/detail/field_map.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/ops/rules/detail/windowed.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail::pixel_shuffle_rules {
namespace {

// `factor` divides the dim, which is about to be split: boundaries inside of a block that stays
// together move to its nearest end, which moves less than gathering the dim.
at::Tensor sharded_at_multiples(const char* name, const at::Tensor& t, std::int64_t dim,
                                std::int64_t factor) {
  const ShardSpec own = spec(t);
  const auto d = static_cast<int>(dim + t.dim());
  if (!is_distributed(own, d)) return t;
  return laid_out(name, "self", t,
                  with_parts(own, {{d, scaled(in_units(own.dim(d).partition, factor), factor)}}));
}

// Of larger ones the products overflow.
void check_factor(const char* name, std::int64_t r) {
  if (r >= 1 << 16) throw InvalidArgument(name, ": factor ", r, " is too large");
}

// In memory of its own, also where reshape() would give a view: by factor 1, of 1 x 1 pixels.
at::Tensor reshaped_copy(const at::Tensor& t, at::IntArrayRef shape) {
  return at::_unsafe_view(t.clone(at::MemoryFormat::Contiguous), shape);
}

// [.., C, H, W] with the last three dims split, in another order, and joined again.
at::Tensor regrouped(const at::Tensor& t, std::initializer_list<std::int64_t> split,
                     std::initializer_list<std::int64_t> order,
                     std::initializer_list<std::int64_t> joined) {
  const std::int64_t lead = t.dim() - 3;
  std::vector<std::int64_t> from = t.sizes().slice(0, lead).vec(), to = from,
                            dims = numbers_below(lead);
  for (const auto d : order) dims.push_back(lead + d);
  from.insert(from.end(), split);
  to.insert(to.end(), joined);
  return reshaped_copy(t.reshape(from).permute(dims), to);
}

// [.., C r r, H, W] -> [.., C, H r, W r].
at::Tensor pixel_shuffle(const at::Tensor& self, std::int64_t r) {
  check_factor("pixel_shuffle", r);
  TORCH_CHECK(self.dim() >= 3 && r > 0 && self.size(-3) % (r * r) == 0, "pixel_shuffle: channels ",
              self.sizes(), " and factor ", r);
  const auto c = self.size(-3) / (r * r), h = self.size(-2), w = self.size(-1);
  return regrouped(sharded_at_multiples("pixel_shuffle", self, -3, r * r), {c, r, r, h, w},
                   {0, 3, 1, 4, 2}, {c, h * r, w * r});
}
at::Tensor pixel_unshuffle(const at::Tensor& self, std::int64_t r) {
  check_factor("pixel_unshuffle", r);
  TORCH_CHECK(self.dim() >= 3 && r > 0 && self.size(-2) % r == 0 && self.size(-1) % r == 0,
              "pixel_unshuffle: ", self.sizes(), " and factor ", r);
  const auto c = self.size(-3), h = self.size(-2) / r, w = self.size(-1) / r;
  const at::Tensor rows = sharded_at_multiples("pixel_unshuffle", self, -2, r);
  return regrouped(sharded_at_multiples("pixel_unshuffle", rows, -1, r), {c, h, r, w, r},
                   {0, 2, 4, 1, 3}, {c * r * r, h, w});
}
at::Tensor channel_shuffle(const at::Tensor& self, std::int64_t groups) {
  TORCH_CHECK(self.dim() > 2 && groups > 0 && self.size(1) % groups == 0,
              "channel_shuffle: channels of ", self.sizes(), " and groups ", groups);
  auto split = self.sizes().vec();
  split[1] = self.size(1) / groups;
  split.insert(split.begin() + 1, groups);
  return reshaped_copy(self.reshape(split).transpose(1, 2), self.sizes());
}

const AtStart registered([] {
  register_decomposition("pixel_shuffle", pixel_shuffle);
  register_decomposition("pixel_unshuffle", pixel_unshuffle);
  register_decomposition("channel_shuffle", channel_shuffle);
});

}  // namespace
}  // namespace tessera::detail::pixel_shuffle_rules
