#pragma once
// ShmBackend: a group's collectives through memory that its ranks share.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/backends/own_backend.h"
#include "tessera/comm/backends/shm/shm_work.h"

namespace tessera::detail {

class ShmBackend final : public OwnBackend {
 public:
  ShmBackend(std::shared_ptr<ShmLink> link, std::chrono::milliseconds timeout);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  void abort() override { link_->abort(); }
  /// Waits for calls in progress; later calls fail. The other ranks continue without this one.
  void shutdown() override {
    link_->close();
    link_->group().interrupt("it was shut down");
  }
  /// How calls travel, and why, for reports.
  std::string describe() const { return shm::to_string(link_->group().describe()); }

  Abilities abilities() override;

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr exchange(const std::vector<Message>& messages, CallLimit limit) override;

 private:
  WorkPtr broadcast_one(OwnCall call) override;
  WorkPtr all_reduce_one(OwnCall call) override;
  WorkPtr reduce_one(OwnCall call) override;
  WorkPtr all_gather_counts(OwnCall call) override;
  WorkPtr reduce_scatter_counts(OwnCall call) override;
  WorkPtr gather_counts(OwnCall call) override;
  WorkPtr scatter_counts(OwnCall call) override;
  WorkPtr all_to_all_counts(OwnCall call) override;
  WorkPtr all_reduce_each(OwnCall call) override;
  WorkPtr all_gather_each(const Tensors& inputs, OwnCall call) override;
  WorkPtr reduce_scatter_each(const Tensors& inputs, OwnCall call) override;
  WorkPtr all_to_all_each(const Tensors& inputs, OwnCall call) override;

  /// Makes one call. `block` runs it to its end, `start` begins it; both get its options.
  template <class Block, class Start>
  WorkPtr run(ShmCall call, CallLimit limit, std::uint64_t sign, const Block& block,
              const Start& start);
  /// As run(), for several calls that are started together: `start` adds its requests to a list.
  template <class Start>
  WorkPtr run_all(ShmCall call, CallLimit limit, std::uint64_t sign, const Start& start);
  /// Makes a collective from messages, with a barrier beside them in which it is compared with what
  /// the other ranks call.
  template <class Start>
  WorkPtr run_messages(ShmCall call, CallLimit limit, std::uint64_t sign, const Start& start);
  /// The options of a call: its time limit, and what all ranks must have in common.
  shm::Call options(ShmCall& call, CallLimit limit, std::uint64_t sign);
  /// A signature of the next call: the group's, combined with the dtype.
  std::uint64_t signature(c10::ScalarType dtype);

  std::shared_ptr<shm::Arena> share(std::size_t bytes, const c10::intrusive_ptr<c10d::Store>& store,
                                    std::chrono::milliseconds limit);
  WorkPtr exchange_all(ShmCall call, const std::vector<shm::Message>& messages, CallLimit limit);

  shm::Group& group() { return link_->group(); }

  const std::shared_ptr<ShmLink> link_;
};

}  // namespace tessera::detail
