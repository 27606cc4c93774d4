#pragma once
// Numbers of one draw by global index, for rules that draw a box of a tensor that no rank holds.
//
// Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011): a function of a counter and a key, so that any rank can compute the random number of any
// element.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail {

using Words = std::array<std::uint32_t, 4>;

/// Published test vector: counter {0, 0, 0, 0}, key {0, 0} -> {6627e8d5, e169c58d, bc57ac4c,
/// 9b00dbd8}.
constexpr Words philox(Words c, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
    c = {static_cast<std::uint32_t>(b >> 32) ^ c[1] ^ key[0], static_cast<std::uint32_t>(b),
         static_cast<std::uint32_t>(a >> 32) ^ c[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return c;
}

/// The four words of element `index` of draw `stream`.
constexpr Words element_words(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return philox({static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                 static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)},
                {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
}

/// Two words as a double in [0, 1), a multiple of 2^-53.
constexpr double unit_double(std::uint32_t high, std::uint32_t low) {
  return static_cast<double>((static_cast<std::uint64_t>(high) << 32 | low) >> 11) * 0x1p-53;
}

/// One draw: with the global index of an element it gives the element's number.
struct DrawPosition {
  std::uint64_t seed = 0, stream = 0;
};

/// Takes the next draw of this rank. All ranks of the mesh take theirs alike; with
/// CheckLevel::collective they compare them, and throw MismatchError where they differ.
DrawPosition next_draw(const MeshContext& context);

/// Throws ShardingError, with the name of the operator, if a generator is given.
void refuse_generator(const std::string& op, const std::optional<at::Generator>& generator);

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
