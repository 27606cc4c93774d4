#pragma once
// Calls of neighborhood_kernel.h on tensors: what the kernel of each device is made of.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <tuple>

#include "tessera/ops/attention/detail/neighborhood_kernel.h"

namespace tessera::detail {

/// Numbers of a WindowDim in the operators' list of windows, which has so many for each dim.
constexpr std::size_t kWindowNumbers = 8;

/// The call of dense tensors of batch x positions x heads x channels.
inline NeighborhoodCall neighborhood_call(const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v, at::IntArrayRef windows,
                                          double scale) {
  for (const at::Tensor* t : {&q, &k, &v})
    TORCH_CHECK(t->dim() == 4 && t->is_contiguous(), "neighborhood_attention: a local tensor of ",
                t->sizes(), " is not dense");
  NeighborhoodCall n;
  const std::size_t dims = windows.size() / kWindowNumbers;
  for (std::size_t i = 0; i < dims; ++i) {
    const std::int64_t* w = windows.data() + i * kWindowNumbers;
    WindowDim& d = n.dims[NeighborhoodCall::kDims - dims + i];
    d = {w[0], w[1], w[2], w[3] != 0, w[4], w[5], w[6], w[7]};
    n.queries *= d.queries;
    n.keys *= d.keys;
  }
  n.batch = q.size(0);
  n.heads = q.size(2);
  n.channels = q.size(3);
  n.values = v.size(3);
  n.scale = scale;
  n.q = q.const_data_ptr();
  n.k = k.const_data_ptr();
  n.v = v.const_data_ptr();
  return n;
}

/// Value and logs, which `run(call)` computes.
template <class Run>
std::tuple<at::Tensor, at::Tensor> forward_by(const Run& run, const at::Tensor& q,
                                              const at::Tensor& k, const at::Tensor& v,
                                              at::IntArrayRef windows, double scale) {
  NeighborhoodCall n = neighborhood_call(q, k, v, windows, scale);
  at::Tensor out = at::empty({n.batch, n.queries, n.heads, n.values}, q.options());
  at::Tensor logs =
      at::empty({n.batch, n.queries, n.heads},
                q.options().dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  n.out = out.mutable_data_ptr();
  n.logs = logs.mutable_data_ptr();
  run(n);
  return {out, logs};
}

/// The gradients of q, k and v. `spreads`: the kernel adds to those of k and v, which begin at
/// zero.
template <class Run>
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_by(const Run& run, bool spreads,
                                                           const at::Tensor& g, const at::Tensor& q,
                                                           const at::Tensor& k, const at::Tensor& v,
                                                           const at::Tensor& out,
                                                           const at::Tensor& logs,
                                                           at::IntArrayRef windows, double scale) {
  NeighborhoodCall n = neighborhood_call(q, k, v, windows, scale);
  const auto gradient = [&](const at::Tensor& t) {
    return spreads ? at::zeros_like(t) : at::empty_like(t);
  };
  at::Tensor dq = at::empty_like(q), dk = gradient(k), dv = gradient(v);
  at::Tensor deltas = spreads ? at::Tensor() : at::empty_like(logs);
  n.g = g.const_data_ptr();
  n.out = const_cast<void*>(out.const_data_ptr());  // read alone, as logs
  n.logs = const_cast<void*>(logs.const_data_ptr());
  if (deltas.defined()) n.deltas = deltas.mutable_data_ptr();
  n.dq = dq.mutable_data_ptr();
  n.dk = dk.mutable_data_ptr();
  n.dv = dv.mutable_data_ptr();
  run(n);
  return {dq, dk, dv};
}

}  // namespace tessera::detail
