// libtessera_cuda.so: neighbourhood attention's operators for tensors on a GPU, on its current
// stream.

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "tessera/base/error.h"
#include "tessera/ops/attention/detail/neighborhood_call.h"
#include "tessera/ops/attention/detail/neighborhood_launch.h"

namespace tessera::detail {
namespace {

using Launch = const char* (*)(const NeighborhoodCall&, ElementType, void*);

ElementType element_type(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kDouble:
      return ElementType::float64;
    case at::kFloat:
      return ElementType::float32;
    case at::kHalf:
      return ElementType::float16;
    case at::kBFloat16:
      return ElementType::bfloat16;
    default:
      throw InvalidArgument("neighborhood_attention on CUDA was given ",
                            c10::toString(t.scalar_type()),
                            "; it takes float64, float32, float16 and bfloat16");
  }
}

auto on_stream_of(const at::Tensor& q, Launch launch) {
  return [type = element_type(q), launch](const NeighborhoodCall& call) {
    if (const char* problem = launch(call, type, c10::cuda::getCurrentCUDAStream().stream()))
      throw Error(concat("neighborhood_attention on CUDA: ", problem));
  };
}

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, at::IntArrayRef windows,
                                           double scale) {
  const c10::cuda::CUDAGuard on(q.device());
  return forward_by(on_stream_of(q, &launch_forward), q, k, v, windows, scale);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& g, const at::Tensor& q,
                                                        const at::Tensor& k, const at::Tensor& v,
                                                        const at::Tensor& out,
                                                        const at::Tensor& logs,
                                                        at::IntArrayRef windows, double scale) {
  const c10::cuda::CUDAGuard on(q.device());
  return backward_by(on_stream_of(q, &launch_backward), false, g, q, k, v, out, logs, windows,
                     scale);
}

TORCH_LIBRARY_IMPL(tessera, CUDA, m) {
  m.impl("_neighborhood_forward", &forward);
  m.impl("_neighborhood_backward", &backward);
}

}  // namespace
}  // namespace tessera::detail
