#pragma once
// ProcessGroupStrategy: data parallelism over a c10d process group of the program's own, of which
// this library knows nothing else.
//
//   auto store = c10::make_intrusive<c10d::TCPStore>(...);
//   auto group = c10::make_intrusive<c10d::ProcessGroup>(...);     // or a backend's
//   options.strategy = std::make_shared<ProcessGroupStrategy>(group);

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tessera/train/strategy.h"

namespace tessera {

class ProcessGroupStrategy : public ManagedStrategy {
 public:
  /// Every rank holds all parameters; their gradients are added up over the group at the end of
  /// each step, in one message a dtype. Modules are moved, and the first rank's values broadcast,
  /// in setup(); its buffers are given to all after each step. All ranks save. What is no gradient
  /// goes through groups of the library's own over the same ranks: a manager of theirs is made
  /// here, for which the ranks meet at a port of the first one that they learn over the group, so
  /// that it needs no store. The group stays the program's. Waits are bounded by the group's own
  /// time limit and the manager's. Collective over the group. Throws InvalidArgument without a
  /// group, and RendezvousError where its ranks do not meet.
  explicit ProcessGroupStrategy(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                c10::Device device = c10::DeviceType::CPU);

  std::string name() const override { return "process_group"; }
  Abilities abilities() const override;
  void reduce(const at::Tensor& tensor, ReduceOp op,
              const std::optional<Group>& group = {}) override;
  void setup(const NamedModules& modules) override;
  void share_buffers() override;
  void reduce_gradients() override;

 private:
  Group given_;
};

}  // namespace tessera
