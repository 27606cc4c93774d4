#pragma once
// What the MPI tests share: values that every rank can compute for every other, and short forms of
// c10d calls.

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/backends/as_c10d.h"
#include "tessera/comm/backends/mpi/mpi.h"
#include "tessera/comm/backends/mpi/mpi_transport.h"

namespace tessera::test {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

constexpr std::chrono::milliseconds kLimit{30000};

/// Whole numbers from -3 to 3, so that sums and products of four are exact in every dtype. The same
/// on every rank for the same arguments.
inline at::Tensor values(std::uint64_t seed, int rank, at::IntArrayRef shape,
                         at::ScalarType dtype) {
  std::int64_t n = 1;
  for (const auto d : shape) n *= d;
  at::Tensor t = at::empty({n}, at::kDouble);
  std::uint64_t x = seed * 1000003 + static_cast<std::uint64_t>(rank) * 7919 + 1;
  for (std::int64_t i = 0; i < n; ++i) {
    x = x * 6364136223846793005ull + 1442695040888963407ull;
    t.data_ptr<double>()[i] = static_cast<double>((x >> 40) % 7) - 3;
  }
  t = t.reshape(shape);
  if (dtype == at::kBool) return t.gt(0);
  if (dtype == at::kByte || dtype == at::kUInt16 || dtype == at::kUInt32 || dtype == at::kUInt64)
    return t.abs().to(at::kLong).to(dtype);
  if (c10::isComplexType(dtype)) return at::complex(t, t.flip({0}).add(1)).to(dtype);
  return t.to(dtype);
}

/// The same values in memory that is not in order.
inline at::Tensor scattered(const at::Tensor& t) {
  at::Tensor wide = at::zeros({t.numel(), 3}, t.options());
  at::Tensor view = wide.select(1, 1).view_as(t);
  view.copy_(t);
  return view;
}

/// What libtessera_mpi.so knows of a world.
inline std::shared_ptr<detail::MpiContext> context_of(const MpiWorld& world) {
  return std::static_pointer_cast<detail::MpiContext>(world.ranks());
}

inline BackendPtr backend(const MpiWorld& world, const std::vector<int>& ranks,
                          const std::string& name = "test", std::int64_t max_count = 0) {
  MpiBackendOptions options;
  options.name = name;
  options.timeout = kLimit;
  if (max_count > 0) options.max_count = max_count;
  return make_mpi_backend(world, ranks, options);
}

/// A call of the transport below a backend.
inline c10::intrusive_ptr<c10d::Work> hand(const BackendPtr& backend,
                                           detail::Transport::Function make, bool blocking,
                                           const at::Tensor& output, const at::Tensor& input,
                                           std::vector<std::int64_t> counts, int root = -1) {
  detail::TransportCall call;
  call.output = output;
  call.input = input;
  call.counts = std::move(counts);
  call.root = root;
  call.timeout = kLimit;
  call.blocking = blocking;
  return dynamic_cast<detail::AsC10d&>(*backend).hand(call, make);
}

inline std::vector<int> all_ranks(const MpiWorld& world) {
  std::vector<int> ranks;
  for (int r = 0; r < world.size(); ++r) ranks.push_back(r);
  return ranks;
}

}  // namespace tessera::test
