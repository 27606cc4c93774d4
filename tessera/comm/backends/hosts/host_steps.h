#pragma once
// What the steps of HostLinks share, for its sources alone.

#include <ATen/ATen.h>

#include <cstring>
#include <numeric>

#include "tessera/base/hash.h"
#include "tessera/comm/backends/hosts/host_links.h"

namespace tessera::detail {

inline std::int64_t sum_of_counts(const HostLinks::Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

inline at::Tensor scratch_bytes(std::int64_t count) {
  return at::empty({count}, at::TensorOptions().dtype(at::kByte));
}

// The same memory as bytes. A tensor of one element may have any stride.
inline at::Tensor bytes_view(const at::Tensor& flat) {
  return flat.as_strided({flat.numel()}, {1}).view(at::kByte);
}

inline void copy_range(const at::Tensor& to, std::int64_t to_begin, const at::Tensor& from,
                       std::int64_t from_begin, std::int64_t bytes) {
  if (bytes == 0) return;
  std::memcpy(static_cast<char*>(to.mutable_data_ptr()) + to_begin,
              static_cast<const char*>(from.const_data_ptr()) + from_begin,
              static_cast<std::size_t>(bytes));
}

inline HostLinks::Counts begins_of(const HostLinks::Counts& counts) {
  HostLinks::Counts begins;
  std::int64_t begin = 0;
  for (const auto count : counts) {
    begins.push_back(begin);
    begin += count;
  }
  return begins;
}

inline std::uint64_t sign_of_step(std::uint64_t call, std::uint64_t step) {
  return call == 0 ? 0 : Hash().number(call).number(step).value();
}

template <class Options>
Options HostLinks::near_options(HostCall& call) {
  const CallLimit limit = near_limit(call);
  Options options;
  options.timeout = limit.timeout;
  options.asyncOp = false;
  return options;
}

template <class Options>
Options HostLinks::far_options(HostCall& call) {
  far_can_.sign(sign_of_step(call.sign, ++call.far));
  Options options;
  options.timeout = call.limit;
  return options;
}

}  // namespace tessera::detail
