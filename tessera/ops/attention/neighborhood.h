#pragma once
// Neighbourhood attention in one to three spatial dims: each query attends to the keys around it.
// On plain tensors, and on fields that are cut over ranks, where the keys and values come by halo.
//
//   // batch x height x width x heads x channels
//   at::Tensor out = neighborhood_attention_2d(q, k, v, {7, 7});
//   // every second position, the past alone
//   at::Tensor out = neighborhood_attention_1d(q, k, v, {4}, {2}, {true});
//
// The window of a dim with `extent` positions (the published semantics of NATTEN: A. Hassani, S.
// Walton, J. Li, S. Li, H. Shi, "Neighborhood Attention Transformer", CVPR 2023; dilation: A.
// Hassani, H. Shi, "Dilated Neighborhood Attention Transformer", 2022):
//
//   Positions of one remainder modulo the dilation form a group of their own; in it, position i of
//     n sees exactly `kernel` positions, from
//   min(max(i - kernel / 2, 0), n - kernel) on: at the edges the window is shifted, not cut.
//   A causal dim sees i - kernel + 1 ... i, cut at the beginning.
//
// Example: extent 7, kernel 3, dilation 2: position 5 is number 2 of the group 1, 3, 5 and sees 1,
// 3, 5; causal, position 2 sees 0 and 2.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera {

/// One spatial dim.
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
/// channels; v likewise, with any number of channels. One Neighborhood a spatial dim, one to three.
/// `scale` absent: 1 / sqrt(channels). Differentiable once in q, k and v. On CPU a kernel that
/// needs no memory beyond the result; float16 and bfloat16 are computed in float32. On other
/// devices composed of libtorch's operators, with memory for every query's keys.
///
/// Sharded tensors: batch, spatial dims and heads may be sharded over any axes with any sizes; k
/// and v follow q's placements (they are redistributed if they differ), and each rank gets the keys
/// and values that its queries see. All three are sharded, or none is.
///
/// Throws InvalidArgument: shapes that do not belong together, kernel or dilation below 1, kernel *
/// dilation above the extent (a window would not fit into its group; causal dims have no such
/// limit); ShardingError: sharded channels, plain and sharded tensors together.
at::Tensor neighborhood_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const std::vector<Neighborhood>& dims,
                                  std::optional<double> scale = std::nullopt);

/// By lists of one number per dim; empty lists: dilation 1, not causal. Also
/// torch.ops.tessera.neighborhood_attention(q, k, v, kernel, dilation, causal, scale).
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
