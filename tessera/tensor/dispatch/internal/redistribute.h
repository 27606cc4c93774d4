#pragma once
// Redistribution of locals: from one spec to another of the same mesh and shape.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include "tessera/base/pinned.h"
#include "tessera/comm/group/group.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

struct RedistributionPlan;

/// What changes no sum: -0.0 where there is one, since -0.0 + x is x for both zeros.
at::Scalar no_summand(at::ScalarType dtype);

/// A redistribution in progress on this rank: its first collective is started by the constructor,
/// the others by finish().
class Redistribution : Pinned {
 public:
  /// `blocking`: finish() follows at once, and backends are told so. Throws InvalidArgument if mesh
  /// or shape differ.
  Redistribution(const at::Tensor& local, const ShardSpec& from, const ShardSpec& to,
                 bool blocking);
  /// True if finish() would not wait.
  bool done() const;
  /// The local under `to`; may share memory with the one given. Call it once.
  at::Tensor finish();

 private:
  void launch();
  void launch_reduction();
  void launch_move();
  void launch_all_gather(const Box& held);
  void launch_broadcast(const Box& held);
  void launch_all_to_all(const Box& held);
  void launch_exchange(const Box& held);
  const Box& held_box() const;
  /// Has the collective `call` made by the ranks: at once if this is blocking, else as `request_`.
  template <class Call>
  void start(const Group& ranks, const Call& call);
  Group group(const std::vector<int>& axes) const;

  const ShardSpec from_;
  std::shared_ptr<const RedistributionPlan> plan_;
  const bool blocking_;
  at::Tensor local_;
  bool own_ = false;       // no other tensor uses the memory of local_
  std::size_t stage_ = 0;  // a reduction, or, after them, the move
  Request request_;
  std::function<at::Tensor()> complete_;  // of the call in progress
};

/// This rank's local under `to`, made from its local under `from`. Collective over the axes that
/// change. The result may share memory with `local`.
at::Tensor redistribute_local(const at::Tensor& local, const ShardSpec& from, const ShardSpec& to);

/// Number of elements of other ranks' shards that this rank receives (reducing a partial value does
/// not count).
std::int64_t elements_moved(const ShardSpec& from, const ShardSpec& to);

/// True if shards move between ranks (reducing a partial value does not count). The same on all
/// ranks.
bool moves_shards(const ShardSpec& from, const ShardSpec& to);

}  // namespace tessera::detail
