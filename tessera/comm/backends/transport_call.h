#pragma once
// TransportCall: one call of a Transport, and what it has left to wait for.

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "tessera/comm/group/detail/abilities.h"
#include "tessera/comm/group/detail/call_card.h"
#include "tessera/comm/group/group.h"

namespace tessera::detail {

/// How a call waits for a work: until its limit; in slices, looking at the group's watch between
/// them; or in a single wait, since one that runs out breaks the work (Gloo's messages), which says
/// only by wait() that it is done, and is aborted with the group.
enum class Wait : unsigned char { for_all, in_slices, at_one_go };

/// A work that a call has left in progress.
struct Started {
  c10::intrusive_ptr<c10d::Work> work;
  /// A group chooses between the first two by the transport's abilities.
  Wait wait = Wait::in_slices;
  /// A message whose ends are compared if the wait lasts long has one.
  std::optional<MessageCard> card = std::nullopt;
};

/// One call. Tensors are in plain row-major order, on the transport's device and of one dtype, and
/// hold as many elements as the counts say; the caller has checked that.
struct TransportCall {
  using Counts = std::vector<std::int64_t>;
  /// Any number, or what follows: messages between two ranks match in list order; those that a
  /// transport sends itself, beside its callers'.
  static constexpr int kInOrder = -1, kInternal = -2, kAnyRank = -1;

  /// Broadcast, all-reduce and reduce work in place on `output`; reduce leaves the tensors of other
  /// ranks as they are. Undefined on the ranks other than root: the output of gather and the input
  /// of scatter. All others leave `input` as it is.
  at::Tensor output, input;
  /// Elements, one number per rank and the same on all ranks; of all-to-all this rank's own, with
  /// `input_counts`.
  Counts counts, input_counts;
  /// False for an all-to-all whose counts the ranks have not compared: what does not fit is
  /// refused.
  bool agreed = true;
  ReduceOp op = ReduceOp::sum;
  /// Takes the place of `op` unless it is none.
  Bits bits = Bits::none;
  int root = -1;
  /// Exchange moves these. The peer of a receive may be kAnyRank where there is a tag.
  std::vector<Message> messages;
  int tag = kInOrder;

  std::chrono::milliseconds timeout{0};
  /// The caller waits at once: the call may be complete on return, and throw its errors.
  bool blocking = false;
  /// Stands for the operation and its arguments (CallCard::hash()): ranks that give different
  /// numbers do not touch each other's memory. 0: nothing is known of the call.
  std::uint64_t sign = 0;
  /// What the call is for, to show where calls differ; null: not known. Lives as long as the call
  /// is being handed over.
  const CallSource* source = nullptr;
  /// The number of the call in its group.
  std::uint64_t number = 0;

  /// A call of c10d's has these: what Work::result() returns, and what is left to do before the
  /// work that the transport leaves is complete.
  c10d::OpType type = c10d::OpType::UNKNOWN;
  std::vector<at::Tensor> results;
  std::function<void()> finish;

  /// Left by the transport: what is to be waited for, and what is to be done after that.
  c10::SmallVector<Started, 1> works;
  std::function<void()> then;
  std::vector<at::Tensor> kept;

  void wait() {
    for (auto& started : works) started.work->wait();
    if (then) then();
  }
};

}  // namespace tessera::detail
