#pragma once
// Linear layers between data that are sharded along their sequence (SequenceSharding): the input
// is gathered in front of a layer whose rows are sharded, the result reduce-scattered behind one
// whose columns are. Megatron's sequence parallelism (https://arxiv.org/abs/2205.05198).

#include <ATen/core/Tensor.h>

#include <optional>

namespace tessera::detail {

/// linear(x, w, bias), or nothing where the weight does not ask for it or the data do not lie so.
/// With a graph, layers that are given one `x` after the other (query, key and value; gate and up)
/// share one gathered copy, forward and backward, and one reduce-scatter of its gradient. What is
/// saved for backward is the shard: it is gathered again.
std::optional<at::Tensor> sequence_linear(const at::Tensor& x, const at::Tensor& w,
                                          const std::optional<at::Tensor>& bias);
/// The same for matmul(x, w.t()), as torch::nn::Linear calls it.
std::optional<at::Tensor> sequence_matmul(const at::Tensor& x, const at::Tensor& transposed);

}  // namespace tessera::detail
