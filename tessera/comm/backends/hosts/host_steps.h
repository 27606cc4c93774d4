#pragma once
// What the steps of HostLinks share, for its sources alone.

#include <ATen/ATen.h>

#include <cstring>
#include <functional>
#include <utility>

#include "tessera/base/hash.h"
#include "tessera/comm/backends/flat.h"
#include "tessera/comm/backends/hosts/host_links.h"

namespace tessera::detail {

inline at::Tensor scratch_bytes(std::int64_t count) {
  return at::empty({count}, at::TensorOptions().dtype(at::kByte));
}

inline void copy_range(const at::Tensor& to, std::int64_t to_begin, const at::Tensor& from,
                       std::int64_t from_begin, std::int64_t bytes) {
  if (bytes == 0) return;
  std::memcpy(static_cast<char*>(to.mutable_data_ptr()) + to_begin,
              static_cast<const char*>(from.const_data_ptr()) + from_begin,
              static_cast<std::size_t>(bytes));
}

inline std::uint64_t sign_of_step(std::uint64_t call, std::uint64_t step) {
  return call == 0 ? 0 : Hash().number(call).number(step).value();
}

/// A call of a step, of which `output` is the result.
inline TransportCall step_of(const at::Tensor& output, const at::Tensor& input = {},
                             HostLinks::Counts counts = {}, int root = -1) {
  TransportCall step;
  step.output = output;
  step.input = input;
  step.counts = std::move(counts);
  step.root = root;
  return step;
}

template <class Make>
void HostLinks::near_step(HostCall& call, TransportCall step, const Make& make) {
  if (!near_) return;
  step.sign = sign_of_step(call.sign, ++call.near);
  step.timeout = call.timeout;
  step.op = call.op;
  step.blocking = true;
  std::invoke(make, *near_, step);
  step.wait();
}

template <class Make>
void HostLinks::far_step(HostCall& call, TransportCall step, const Make& make) {
  step.sign = sign_of_step(call.sign, ++call.far);
  step.timeout = call.timeout;
  step.op = call.op;
  std::invoke(make, *leaders_, step);
  step.wait();
}

}  // namespace tessera::detail
