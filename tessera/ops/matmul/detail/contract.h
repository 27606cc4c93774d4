#pragma once
// contract: products of two tensors in index notation, whatever dims are sharded. Libtorch flattens
// the leading dims of linear and matmul into one, which a sharded dim other than the first does not
// survive; this operator keeps them apart, and is closed under differentiation.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera::detail {

/// result[of_result] = sum over labels that are not in the result of a[of_a] * b[of_b]. Every label
/// occurs in at least two of the three, once in each. contract(x, w, {0, 1, 2}, {3, 2}, {0, 1, 3})
/// is linear without bias for x [B, T, C] and w [N, C].
at::Tensor contract(const at::Tensor& a, const at::Tensor& b, const std::vector<std::int64_t>& of_a,
                    const std::vector<std::int64_t>& of_b,
                    const std::vector<std::int64_t>& of_result);

/// linear() that folds no leading dims where that would tear a shard.
at::Tensor linear_of_shards(const at::Tensor& x, const at::Tensor& w,
                            const std::optional<at::Tensor>& bias);
/// matmul(), likewise.
at::Tensor matmul_of_shards(const at::Tensor& a, const at::Tensor& b);

}  // namespace tessera::detail
