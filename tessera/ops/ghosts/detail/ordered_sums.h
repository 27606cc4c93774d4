#pragma once
// Sums by an index in an order that the program has named (OwnedRows::edges), which no division of
// rows and edges among ranks changes: each summand of another rank's row is sent to its owner by
// itself, and the owner adds all of a row one after the other, as one process does.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/ops/halo/detail/peer_exchange.h"
#include "tessera/partition/partition.h"

namespace tessera::detail {

/// The number of each of this rank's edges in the order of one process; nullptr: none was named.
using SumOrder = std::shared_ptr<const std::vector<std::int64_t>>;

/// `rows` x numbers.size() / rows, whose memory carries an order: views of it have it too.
at::Tensor with_order(std::vector<std::int64_t> numbers, std::int64_t rows, SumOrder order);
/// The order that the memory of `local` carries.
SumOrder order_of(const at::Tensor& local);

struct OrderedSums {
  SumOrder order;
  std::shared_ptr<PeerExchange> peers = nullptr;
  bool travels = false;
  /// Places of the index that name rows of others, by owner.
  at::Tensor leaving;
  /// The summands of owned row r, in their order: `summands` from first[r] to first[r + 1]. They
  /// are places of the index, and behind these, what arrives.
  std::vector<std::int64_t> first, summands;
};

/// What sums by `ids`, numbers of rows, take: an order of as many. Collective.
std::shared_ptr<const OrderedSums> ordered_sums(const Group& group, const Partition& rows,
                                                std::span<const std::int64_t> ids, SumOrder order);
/// The owned rows, to which the rows of `source` are added that name them; on the CPU. Half
/// precision is added in float32 and rounded once. Collective.
at::Tensor summed_in_order(const OrderedSums& sums, const Group& group, const at::Tensor& rows,
                           const at::Tensor& source);

}  // namespace tessera::detail
