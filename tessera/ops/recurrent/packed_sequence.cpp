// Packed sequences: the steps of samples of different lengths, one after the other.

#include <ATen/ops/_pack_padded_sequence.h>
#include <ATen/ops/_pad_packed_sequence.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/stack.h>

#include <string_view>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/ops/rules/detail/rules.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::detail::packed_sequence_rules {

namespace {

// The source of each packed step follows from the lengths alone, which are plain and the same on
// all ranks, as are the sizes of the batches that are returned: the program reads them.
std::tuple<at::Tensor, at::Tensor> pack(const at::Tensor& input, const at::Tensor& lengths,
                                        bool batch_first) {
  if (input.dim() < 2)
    throw InvalidArgument(concat("_pack_padded_sequence of a tensor of ", input.dim(),
                                 " dims: it needs samples and steps"));
  const at::Tensor plain = is_sharded(lengths) ? full_tensor(lengths) : lengths;
  const auto rows = input.size(0), columns = input.size(1);
  const at::Tensor places = at::arange(rows * columns, at::kLong).view({rows, columns});
  const auto [from, sizes] = at::_pack_padded_sequence(places, plain, batch_first);
  return {input.flatten(0, 1).index_select(0, from.to(input.device())), sizes};
}

// The inverse: index zero is the padding, packed steps count from one.
std::tuple<at::Tensor, at::Tensor> unpack(const at::Tensor& data, const at::Tensor& batch_sizes,
                                          bool batch_first, const at::Scalar& padding,
                                          std::int64_t total_length) {
  const at::Tensor sizes = is_sharded(batch_sizes) ? full_tensor(batch_sizes) : batch_sizes;
  const auto steps = data.size(0);
  const auto [from, lengths] = at::_pad_packed_sequence(at::arange(1, steps + 1, at::kLong), sizes,
                                                        batch_first, 0, total_length);
  std::vector<std::int64_t> shape = from.sizes().vec(), mask(from.sizes().vec());
  for (std::int64_t d = 1; d < data.dim(); ++d) {
    shape.push_back(data.size(d));
    mask.push_back(1);
  }
  const at::Tensor at = from.reshape({-1}).to(data.device());
  const at::Tensor rows = data.index_select(0, (at - 1).clamp_min(0)).view(shape);
  return {rows.masked_fill(at.eq(0).view(mask), padding), lengths};
}

at::Tensor pad_sequence(at::TensorList sequences, bool batch_first, double padding,
                        std::string_view side) {
  if (side != "left" && side != "right")
    throw InvalidArgument(concat("pad_sequence: padding_side is '", side, "'; left or right"));
  std::int64_t longest = 0;
  for (const at::Tensor& t : sequences) longest = std::max(longest, t.size(0));
  std::vector<at::Tensor> padded;
  for (const at::Tensor& t : sequences) {
    std::vector<std::int64_t> pad(2 * static_cast<std::size_t>(t.dim()), 0);
    pad[pad.size() - (side == "left" ? 2 : 1)] = longest - t.size(0);
    padded.push_back(at::constant_pad_nd(t, pad, padding));
  }
  return at::stack(padded, batch_first ? 0 : 1);
}

const AtStart registered([] {
  register_decomposition("_pack_padded_sequence", pack);
  register_decomposition("_pad_packed_sequence", unpack);
  register_decomposition("pad_sequence", pad_sequence);
});

}  // namespace

}  // namespace tessera::detail::packed_sequence_rules
