#pragma once
// Neighbourhood attention in one to three spatial dims: each query attends to the keys around it.
// For plain tensors, and for fields that are sharded, where keys and values are fetched by halo.
//
//   // batch x height x width x heads x channels
//   at::Tensor out = neighborhood_attention_2d(q, k, v, {7, 7});
//   // every second position, only the preceding ones
//   at::Tensor out = neighborhood_attention_1d(q, k, v, {4}, {2}, {true});
//
// The window of a dim with `extent` positions (the published semantics of NATTEN: A. Hassani, S.
// Walton, J. Li, S. Li, H. Shi, "Neighborhood Attention Transformer", CVPR 2023; dilation: A.
// Hassani, H. Shi, "Dilated Neighborhood Attention Transformer", 2022):
//
//   Positions with the same remainder modulo the dilation form a group; in a group of n, position i
//     sees exactly `kernel` positions, from min(max(i - kernel / 2, 0), n - kernel) on: at the
//     edges the window is shifted, not truncated.
//   In a causal dim it sees i - kernel + 1 ... i, truncated at the beginning.
//
// Example: extent 7, kernel 3, dilation 2: position 5 is number 2 of the group 1, 3, 5 and sees 1,
// 3, 5; causal, position 2 sees 0 and 2.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera {

/// The neighbourhood in one spatial dim.
struct Neighborhood {
  std::int64_t kernel = 1, dilation = 1;
  bool causal = false;
  bool operator==(const Neighborhood&) const = default;

  /// The keys that a query sees: begin, begin + dilation, ... (count of them).
  struct Keys {
    std::int64_t begin = 0, count = 0;
  };
  Keys keys(std::int64_t query, std::int64_t extent) const;
};

/// softmax(q k' * scale) v over each query's neighbourhood. q, k: batch x spatial dims x heads x
/// channels; v likewise, with any number of channels. One Neighborhood per spatial dim, one to
/// three. `scale` absent: 1 / sqrt(channels). Differentiable any number of times. On the CPU and on
/// CUDA where Tessera was built with the toolkit's compiler, a kernel that needs no memory beyond
/// the result; float16 and bfloat16 are summed in float32, on the CPU in copies. Elsewhere, and for
/// second derivatives, composed of libtorch's operators, with memory for every query's keys.
///
/// Sharded tensors: batch, spatial dims and heads may be sharded over any axes with any sizes; k
/// and v are redistributed to q's placements if theirs differ, and each rank gets the keys and
/// values that its queries see. Either all three are sharded, or none is.
///
/// Throws InvalidArgument: shapes that do not fit each other, kernel or dilation below 1, kernel *
/// dilation above the extent (a window would not fit into its group; causal dims have no such
/// limit); ShardingError: sharded channels, plain and sharded tensors together; NotAvailable: the
/// kernel for CUDA is there and does not load.
at::Tensor neighborhood_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const std::vector<Neighborhood>& dims,
                                  std::optional<double> scale = std::nullopt);

/// This is neighborhood_attention() with lists of one number per dim; empty lists: dilation 1, not
/// causal. Also available as torch.ops.tessera.neighborhood_attention(q, k, v, kernel, dilation,
/// causal, scale).
at::Tensor neighborhood_attention_1d(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const std::vector<std::int64_t>& kernel,
                                     const std::vector<std::int64_t>& dilation = {},
                                     const std::vector<bool>& causal = {},
                                     std::optional<double> scale = std::nullopt);
at::Tensor neighborhood_attention_2d(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const std::vector<std::int64_t>& kernel,
                                     const std::vector<std::int64_t>& dilation = {},
                                     const std::vector<bool>& causal = {},
                                     std::optional<double> scale = std::nullopt);
at::Tensor neighborhood_attention_3d(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const std::vector<std::int64_t>& kernel,
                                     const std::vector<std::int64_t>& dilation = {},
                                     const std::vector<bool>& causal = {},
                                     std::optional<double> scale = std::nullopt);

}  // namespace tessera
