#pragma once
// The interface that a backend may implement beyond c10d::Backend: collectives with a size per
// rank, and a batch of messages as one call. Where Abilities::uneven is null the group composes
// these from what c10d has.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/group.h"

namespace c10d {
class Work;
struct ReduceOp;
}  // namespace c10d

namespace tessera::detail {

/// The time limit of one call (<= 0: the backend's own), and whether its caller waits at once: then
/// the backend may finish the call before it returns the work, and throw from the call itself. In
/// c10d's options these are `timeout` and `asyncOp = false`.
struct CallLimit {
  std::chrono::milliseconds timeout{0};
  bool blocking = false;
};

/// Collectives with a number of rows per rank. `sizes` are rows along dim 0, one number per rank in
/// group order, the same on every rank, zeros allowed; all tensors share the dims after the first,
/// and the dtype. Tensors are contiguous and on the backend's device, and are kept alive by the
/// work. `root` is a group rank. If ranks 0, 1, 2 hold 3, 0 and 2 rows of 8 columns, sizes are {3,
/// 0, 2} and gathered tensors have shape [5, 8].
class UnevenBackend : public AbleBackend {
 public:
  /// For a backend that lets only the thread that made a call continue it: calls `step` inside all
  /// waits of this thread until it returns true or has expired. Returns false, and keeps nothing,
  /// if any thread may continue a call.
  virtual bool step_in_waits(const std::weak_ptr<const std::function<bool()>>&) { return false; }
  /// False if messages to and from `peer` (group rank) do not go through exchange(), but one by one
  /// through c10d's send and recv, with tags that tell them apart.
  virtual bool batches([[maybe_unused]] int peer) const { return true; }

  /// `output` [sum(sizes), ...], `input` [sizes[rank], ...].
  virtual c10::intrusive_ptr<c10d::Work> all_gather_v(const at::Tensor& output,
                                                      const at::Tensor& input,
                                                      const std::vector<std::int64_t>& sizes,
                                                      CallLimit limit) = 0;
  /// `output` [sizes[rank], ...], `input` [sum(sizes), ...]; `input` keeps its values.
  virtual c10::intrusive_ptr<c10d::Work> reduce_scatter_v(const at::Tensor& output,
                                                          const at::Tensor& input,
                                                          const std::vector<std::int64_t>& sizes,
                                                          const c10d::ReduceOp& op,
                                                          CallLimit limit) = 0;
  /// `output` [sum(sizes), ...] on root, ignored elsewhere (may be undefined).
  virtual c10::intrusive_ptr<c10d::Work> gather_v(const at::Tensor& output, const at::Tensor& input,
                                                  const std::vector<std::int64_t>& sizes, int root,
                                                  CallLimit limit) = 0;
  /// `input` [sum(sizes), ...] on root, ignored elsewhere (may be undefined).
  virtual c10::intrusive_ptr<c10d::Work> scatter_v(const at::Tensor& output,
                                                   const at::Tensor& input,
                                                   const std::vector<std::int64_t>& sizes, int root,
                                                   CallLimit limit) = 0;
  /// All messages at once, without deadlock in any order; two ranks' messages match in list order;
  /// a rank may send to itself. Not collective.
  virtual c10::intrusive_ptr<c10d::Work> exchange(const std::vector<Message>& messages,
                                                  CallLimit limit) = 0;
};

}  // namespace tessera::detail
