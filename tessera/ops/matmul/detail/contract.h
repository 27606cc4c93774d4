#pragma once
// contract: products of two tensors in index notation, whatever dims are sharded. Libtorch flattens
// the leading dims of linear and matmul into one, which a sharded dim other than the first does not
// survive; this operator keeps them apart, and is closed under differentiation.
//
// Linear layers between data that are sharded along their sequence (SequenceSharding): the input
// is gathered in front of a layer whose rows are sharded, the result reduce-scattered behind one
// whose columns are. Megatron's sequence parallelism (https://arxiv.org/abs/2205.05198).

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::detail {

/// result[of_result] = sum over labels that are not in the result of a[of_a] * b[of_b]. Every label
/// occurs in at least two of the three, once in each. contract(x, w, {0, 1, 2}, {3, 2}, {0, 1, 3})
/// is linear without bias for x [B, T, C] and w [N, C].
at::Tensor contract(const at::Tensor& a, const at::Tensor& b, const std::vector<std::int64_t>& of_a,
                    const std::vector<std::int64_t>& of_b,
                    const std::vector<std::int64_t>& of_result);

/// The product in the notation of at::einsum(), whose 52 letters the labels count.
std::string equation_of(at::IntArrayRef of_a, at::IntArrayRef of_b, at::IntArrayRef of_result);

/// linear() that folds no leading dims where that would tear a shard.
at::Tensor linear_of_shards(const at::Tensor& x, const at::Tensor& w,
                            const std::optional<at::Tensor>& bias);
/// matmul(), likewise.
at::Tensor matmul_of_shards(const at::Tensor& a, const at::Tensor& b);

/// linear(x, w, bias), or nothing where the weight does not ask for it or the data do not lie so.
/// With a graph, layers that are given one `x` after the other (query, key and value; gate and up)
/// share one gathered copy, forward and backward, and one reduce-scatter of its gradient. What is
/// saved for backward is the shard: it is gathered again. `transposed`: matmul(x, w), of a weight
/// that is given as w.t() is, as torch::nn::Linear calls it.
std::optional<at::Tensor> sequence_linear(const at::Tensor& x, const at::Tensor& w,
                                          const std::optional<at::Tensor>& bias,
                                          bool transposed = false);

}  // namespace tessera::detail
