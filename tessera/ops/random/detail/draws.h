#pragma once
// Numbers of one draw by global index, for rules that draw a box of a tensor that no rank holds.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/ops/random/detail/philox.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail {

/// One draw: with the global index of an element it gives the element's number.
struct DrawPosition {
  std::uint64_t seed = 0, stream = 0;
};

/// Takes the next draw of this rank. All ranks of the mesh take theirs alike; with
/// CheckLevel::collective they compare them, and throw MismatchError where they differ.
DrawPosition next_draw(const MeshContext& context);

/// Calls visit(position, words) for the elements of the box `local` at `offset` of a tensor of the
/// shape `global`, in the box's row-major order.
template <class Visit>
void each_element(const DrawPosition& draw, const std::vector<std::int64_t>& global,
                  const std::vector<std::int64_t>& offset, const std::vector<std::int64_t>& local,
                  Visit visit) {
  const auto stride = contiguous_strides(global);
  std::vector<std::int64_t> index(global.size(), 0);
  std::int64_t at = 0, n = 1;
  for (std::size_t d = 0; d < global.size(); ++d) {
    at += offset[d] * stride[d];
    n *= local[d];
  }
  for (std::int64_t i = 0; i < n; ++i) {
    visit(i, element_words(draw.seed, draw.stream, static_cast<std::uint64_t>(at)));
    for (std::size_t d = global.size(); d-- > 0;) {
      at += stride[d];
      if (++index[d] < local[d]) break;
      at -= local[d] * stride[d];
      index[d] = 0;
    }
  }
}

/// What dropout keeps: true with the probability 1 - p. Bool, of the shape `local`, on the CPU.
at::Tensor dropout_mask(const DrawPosition& draw, const std::vector<std::int64_t>& global,
                        const std::vector<std::int64_t>& offset,
                        const std::vector<std::int64_t>& local, double p);

}  // namespace tessera::detail
