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

class ProcessGroupStrategy : public Strategy {
 public:
  /// Every rank holds all parameters; their gradients are added up at the end of each step, in one
  /// message a dtype. Modules are moved, and the first rank's values broadcast, in setup(). Its
  /// buffers are given to all after each step. The first rank saves: random states and running sums
  /// of metrics of the others are not in a checkpoint. Waits are bounded by the group's own time
  /// limit.
  /// Throws InvalidArgument without a group.
  explicit ProcessGroupStrategy(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                c10::Device device = c10::DeviceType::CPU);
  ~ProcessGroupStrategy() override;

  std::string name() const override { return "process_group"; }
  Abilities abilities() const override;
  int rank() const override;
  int size() const override;
  c10::Device root_device() const override { return device_; }
  void barrier() override;
  void broadcast(const at::Tensor& tensor, int root) override;
  std::string broadcast(const std::string& bytes, int root) override;
  void reduce(const at::Tensor& tensor, ReduceOp op,
              const std::optional<Group>& group = {}) override;
  using Strategy::all_gather;
  std::vector<std::string> all_gather(const std::string& mine) override;
  void setup(const NamedModules& modules) override;
  void share_buffers() override;
  void reduce_gradients() override;
  /// Aborts the group: the others' pending and later calls on it throw at once where its backend
  /// can (NCCL, Tessera's Gloo), and after the group's time limit where not (c10d's Gloo).
  void abort(const std::string& reason) noexcept override;
  /// The gradients are the same on every rank.
  double clip(const std::vector<at::Tensor>& parameters, const ClipOptions& options) override;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
};

}  // namespace tessera
