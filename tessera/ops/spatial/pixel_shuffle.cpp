// Shuffles between channels and space.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_unsafe_view.h>

#include <vector>

#include "tessera/base/text.h"
#include "tessera/ops/rules/detail/decomposition.h"
#include "tessera/ops/rules/detail/field_map.h"
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
  if (r >= 1 << 16) throw InvalidArgument(concat(name, ": factor ", r, " is too large"));
}

// In memory of its own, also where reshape() would give a view: by factor 1, of 1 x 1 pixels.
at::Tensor reshaped_copy(const at::Tensor& t, at::IntArrayRef shape) {
  return at::_unsafe_view(t.clone(at::MemoryFormat::Contiguous), shape);
}

// [.., C r r, H, W] -> [.., C, H r, W r].
at::Tensor pixel_shuffle(const at::Tensor& self, std::int64_t r) {
  check_factor("pixel_shuffle", r);
  TORCH_CHECK(self.dim() >= 3 && r > 0 && self.size(-3) % (r * r) == 0, "pixel_shuffle: channels ",
              self.sizes(), " and factor ", r);
  const auto lead = self.sizes().slice(0, self.dim() - 3).vec();
  auto split = lead, joined = lead;
  const auto c = self.size(-3) / (r * r), h = self.size(-2), w = self.size(-1);
  for (const auto n : {c, r, r, h, w}) split.push_back(n);
  for (const auto n : {c, h * r, w * r}) joined.push_back(n);
  std::vector<std::int64_t> order(lead.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  const auto n = static_cast<std::int64_t>(lead.size());
  for (const auto d : {0, 3, 1, 4, 2}) order.push_back(n + d);
  const at::Tensor channels = sharded_at_multiples("pixel_shuffle", self, -3, r * r);
  return reshaped_copy(channels.reshape(split).permute(order), joined);
}
at::Tensor pixel_unshuffle(const at::Tensor& self, std::int64_t r) {
  check_factor("pixel_unshuffle", r);
  TORCH_CHECK(self.dim() >= 3 && r > 0 && self.size(-2) % r == 0 && self.size(-1) % r == 0,
              "pixel_unshuffle: ", self.sizes(), " and factor ", r);
  const auto lead = self.sizes().slice(0, self.dim() - 3).vec();
  auto split = lead, joined = lead;
  const auto c = self.size(-3), h = self.size(-2) / r, w = self.size(-1) / r;
  for (const auto n : {c, h, r, w, r}) split.push_back(n);
  for (const auto n : {c * r * r, h, w}) joined.push_back(n);
  std::vector<std::int64_t> order(lead.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  const auto n = static_cast<std::int64_t>(lead.size());
  for (const auto d : {0, 2, 4, 1, 3}) order.push_back(n + d);
  const at::Tensor rows = sharded_at_multiples("pixel_unshuffle", self, -2, r);
  const at::Tensor columns = sharded_at_multiples("pixel_unshuffle", rows, -1, r);
  return reshaped_copy(columns.reshape(split).permute(order), joined);
}
at::Tensor channel_shuffle(const at::Tensor& self, std::int64_t groups) {
  TORCH_CHECK(self.dim() > 2 && groups > 0 && self.size(1) % groups == 0,
              "channel_shuffle: channels of ", self.sizes(), " and groups ", groups);
  auto split = self.sizes().vec();
  split[1] = self.size(1) / groups;
  split.insert(split.begin() + 1, groups);
  return reshaped_copy(self.reshape(split).transpose(1, 2), self.sizes());
}

const bool registered = [] {
  register_decomposition("pixel_shuffle", pixel_shuffle);
  register_decomposition("pixel_unshuffle", pixel_unshuffle);
  register_decomposition("channel_shuffle", channel_shuffle);
  return true;
}();

}  // namespace

}  // namespace tessera::detail::pixel_shuffle_rules
