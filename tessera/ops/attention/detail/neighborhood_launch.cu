#include "tessera/ops/attention/detail/neighborhood_launch.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace tessera::detail {
namespace {

constexpr int kThreads = 256;

/// The sum over the L lanes of a team, which is a part of a warp.
template <class A, int L>
struct Shuffled {
  unsigned lanes;
  __host__ __device__ A sum(A x) const {
#ifdef __CUDA_ARCH__
    for (int other = L / 2; other > 0; other /= 2) x += __shfl_xor_sync(lanes, x, other, L);
#endif
    return x;
  }
};

template <class A, int L, int V, int M, bool kAll>
using Team = Lanes<A, L, V, M, kAll, Shuffled<A, L>>;

enum class Pass { forward, of_queries, of_keys };

template <Pass pass, class T, class A, int L, int V, int M, bool kAll>
__global__ void __launch_bounds__(kThreads) compute(const NeighborhoodCall n, std::int64_t rows) {
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, at = thread / L;
  if (at >= rows) return;  // of all lanes of a team or of none
  const int lane = static_cast<int>(threadIdx.x) % L, in_warp = static_cast<int>(threadIdx.x) % 32;
  const unsigned all = static_cast<unsigned>((std::uint64_t{1} << L) - 1);
  const Team<A, L, V, M, kAll> team{lane, {all << (in_warp - lane)}};
  const std::int64_t positions = pass == Pass::of_keys ? n.keys : n.queries,
                     row = quotient(at, n.heads), head = at - row * n.heads,
                     batch = quotient(row, positions);
  const Seen others = seen<pass == Pass::of_keys>(n, batch, row - batch * positions);
  if constexpr (pass == Pass::forward) {
    attend_query<T, A>(team, n, at, head, others);
  } else if constexpr (pass == Pass::of_queries) {
    gradient_of_query<T, A, false>(team, n, at, head, others);
  } else {
    gradient_of_key<T, A>(team, n, at, head, others);
  }
}

template <Pass pass, class T, class A, int L, int V, int M, bool kAll>
const char* launch(const NeighborhoodCall& n, cudaStream_t stream) {
  const std::int64_t positions = pass == Pass::of_keys ? n.keys : n.queries,
                     rows = n.batch * positions * n.heads, teams = kThreads / L,
                     blocks = (rows + teams - 1) / teams;
  if (rows == 0) return nullptr;
  if (blocks > std::numeric_limits<int>::max())
    return "more rows than a grid of CUDA has blocks for: split the batch";
  compute<pass, T, A, L, V, M, kAll>
      <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(n, rows);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

/// Whether rows can be read four channels at a time.
template <class T>
bool in_fours(const NeighborhoodCall& n) {
  for (const void* p :
       {n.q, n.k, n.v, n.g, static_cast<const void*>(n.out), static_cast<const void*>(n.dq),
        static_cast<const void*>(n.dk), static_cast<const void*>(n.dv)})
    if (reinterpret_cast<std::uintptr_t>(p) % (4 * sizeof(T)) != 0) return false;
  return n.channels % 4 == 0 && n.values % 4 == 0;
}

/// A team has as many lanes as a row has fours of channels; rows of other sizes take a warp.
template <Pass pass, class T, class A = float>
const char* launch_for(const NeighborhoodCall& n, cudaStream_t stream) {
  const std::int64_t widest = n.channels > n.values ? n.channels : n.values;
  if constexpr (sizeof(T) < 8) {
    if (in_fours<T>(n)) {
      if (widest <= 32) return launch<pass, T, A, 8, 4, 1, true>(n, stream);
      if (widest <= 64) return launch<pass, T, A, 16, 4, 1, true>(n, stream);
      if (widest <= 128) return launch<pass, T, A, 32, 4, 1, true>(n, stream);
    }
  }
  return launch<pass, T, A, 32, 1, 4, false>(n, stream);
}

template <Pass pass>
const char* launch_of(const NeighborhoodCall& n, ElementType type, void* on) {
  const auto stream = static_cast<cudaStream_t>(on);
  switch (type) {
    case ElementType::float64:
      return launch_for<pass, double, double>(n, stream);
    case ElementType::float32:
      return launch_for<pass, float>(n, stream);
    case ElementType::float16:
      return launch_for<pass, __half>(n, stream);
    case ElementType::bfloat16:
      return launch_for<pass, __nv_bfloat16>(n, stream);
  }
  return "no such type of elements";
}

}  // namespace

const char* launch_forward(const NeighborhoodCall& call, ElementType type, void* stream) {
  return launch_of<Pass::forward>(call, type, stream);
}

const char* launch_backward(const NeighborhoodCall& call, ElementType type, void* stream) {
  const char* problem = launch_of<Pass::of_queries>(call, type, stream);
  return problem ? problem : launch_of<Pass::of_keys>(call, type, stream);
}

}  // namespace tessera::detail
