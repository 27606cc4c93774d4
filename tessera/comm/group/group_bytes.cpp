// Strings between ranks: their lengths first, then the bytes, so two collective calls each.

#include <ATen/ATen.h>

#include <cstring>

#include "tessera/comm/backends/flat.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/group/group.h"

namespace tessera {
namespace {

at::Tensor to_tensor(const std::string& bytes, c10::Device device) {
  auto tensor = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor.to(device);
}

std::string to_string(const at::Tensor& tensor) {
  const auto host = tensor.cpu();
  return {static_cast<const char*>(host.const_data_ptr()), static_cast<std::size_t>(host.numel())};
}

std::vector<std::string> split(const at::Tensor& tensor, const Sizes& sizes) {
  const auto host = tensor.cpu();
  const auto* data = static_cast<const char*>(host.const_data_ptr());
  std::vector<std::string> parts;
  parts.reserve(sizes.size());
  for (const auto size : sizes) {
    parts.emplace_back(data, static_cast<std::size_t>(size));
    data += size;
  }
  return parts;
}

at::Tensor numbers(const Sizes& values, c10::Device device) {
  return at::tensor(values, at::kLong).to(device);
}

Sizes values(const at::Tensor& tensor) {
  const auto host = tensor.cpu();
  const auto* data = host.const_data_ptr<std::int64_t>();
  return {data, data + host.numel()};
}

Sizes all_lengths(const Group& group, const std::string& mine, c10::Device device,
                  const CallOptions& options) {
  auto lengths = at::empty({group.size()}, at::TensorOptions(at::kLong).device(device));
  group.all_gather(lengths, numbers({static_cast<std::int64_t>(mine.size())}, device), {}, options);
  return values(lengths);
}

}  // namespace

c10::Device detail::control_device(const Group& group) {
  const auto& state = *group.state();
  return state.size() > 1 && !state.has_endpoint(c10::DeviceType::CPU)
             ? c10::Device(c10::DeviceType::CUDA)
             : c10::Device(c10::DeviceType::CPU);
}

std::vector<std::string> Group::all_gather_bytes(const std::string& mine,
                                                 const CallOptions& options) const {
  const auto device = detail::control_device(*this);
  const Sizes sizes = all_lengths(*this, mine, device, options);
  auto all = at::empty({detail::total_of(sizes)}, at::TensorOptions(at::kByte).device(device));
  all_gather(all, to_tensor(mine, device), sizes, options);
  return split(all, sizes);
}

std::string Group::broadcast_bytes(const std::string& bytes, int root,
                                   const CallOptions& options) const {
  const auto device = detail::control_device(*this);
  auto length = numbers({static_cast<std::int64_t>(bytes.size())}, device);
  broadcast(length, root, options);
  const bool is_root = rank() == root;
  auto data = is_root ? to_tensor(bytes, device)
                      : at::empty({values(length)[0]}, at::TensorOptions(at::kByte).device(device));
  broadcast(data, root, options);
  return is_root ? bytes : to_string(data);
}

std::vector<std::string> Group::gather_bytes(const std::string& mine, int root,
                                             const CallOptions& options) const {
  const auto device = detail::control_device(*this);
  const Sizes sizes = all_lengths(*this, mine, device, options);
  at::Tensor all;
  if (rank() == root)
    all = at::empty({detail::total_of(sizes)}, at::TensorOptions(at::kByte).device(device));
  gather(all, to_tensor(mine, device), root, sizes, options);
  return rank() == root ? split(all, sizes) : std::vector<std::string>{};
}

std::string Group::scatter_bytes(const std::vector<std::string>& parts, int root,
                                 const CallOptions& options) const {
  const auto device = detail::control_device(*this);
  Sizes sizes(size(), 0);
  std::string joined;
  // The other ranks are in the broadcast of the lengths, which tells them.
  const bool refused = rank() == root && static_cast<int>(parts.size()) != size();
  if (refused) sizes[0] = -1 - static_cast<std::int64_t>(parts.size());
  if (rank() == root && !refused)
    for (int r = 0; r < size(); ++r) {
      sizes[r] = static_cast<std::int64_t>(parts[r].size());
      joined += parts[r];
    }
  auto lengths = numbers(sizes, device);
  broadcast(lengths, root, options);
  sizes = values(lengths);
  if (sizes[0] < 0)
    throw InvalidArgument("scatter_bytes in group '", name(), "': the root, rank ", root, ", gave ",
                          -1 - sizes[0], " texts for ", size(), " ranks");
  auto mine = at::empty({sizes[rank()]}, at::TensorOptions(at::kByte).device(device));
  scatter(mine, rank() == root ? to_tensor(joined, device) : at::Tensor(), root, sizes, options);
  return to_string(mine);
}

}  // namespace tessera
