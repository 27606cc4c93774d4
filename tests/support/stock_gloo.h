#pragma once
// Groups of c10d's that a program has made: libtorch's own Gloo, of which the library has seen
// nothing. Its header names types of Gloo's: see CMakeLists.txt of those that include this one.

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <chrono>
#include <string>

namespace tessera::test {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

inline c10::intrusive_ptr<c10d::Backend> stock_gloo(const StorePtr& store, int rank, int size,
                                                    std::chrono::milliseconds limit) {
  auto options = c10d::ProcessGroupGloo::Options::create(limit);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, std::move(options));
}

/// Collective: the ranks meet in `store`, by `name`.
inline c10::intrusive_ptr<c10d::ProcessGroup> stock_group(
    const StorePtr& store, int rank, int size, const std::string& name = "the program's") {
  const auto own = c10::make_intrusive<c10d::PrefixStore>(name, store);
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(own, rank, size);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO,
                    stock_gloo(own, rank, size, std::chrono::seconds(20)));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  return group;
}

}  // namespace tessera::test
