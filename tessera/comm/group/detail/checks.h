#pragma once
// Checks before data moves: this rank's arguments, and, with CheckLevel::collective, that all ranks
// make the same call.

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/comm/group/detail/request_state.h"
#include "tessera/comm/group/group.h"

namespace tessera::detail {

/// Throws InvalidArgument: "all_gather 'x' in group 'world': ...".
template <class... Args>
[[noreturn]] void refuse(const RequestState& call, const Args&... what) {
  throw InvalidArgument(call.describe(), " in group '", call.group().name(), "': ", what...);
}

inline std::string show(const at::Tensor& t) {
  return t.defined() ? concat(c10::toString(t.scalar_type()), t.sizes(), " on ", t.device())
                     : std::string("an undefined tensor");
}

// Arguments of this rank. What could make a backend read or write out of bounds is checked at
// every level.

/// Checks a tensor that is read: defined, dense, backed by memory, on a device that the group
/// serves.
void check_tensor(const RequestState& call, const char* role, const at::Tensor& tensor);
/// Checks a tensor that is written: as check_tensor(), and writable.
void check_target(const RequestState& call, const char* role, const at::Tensor& tensor);
/// Checks that `rank`, which is the call's `what`, is a rank of its group.
void check_rank(const RequestState& call, const char* what, int rank);
/// Checks that both tensors have the same dtype and device.
void check_alike(const RequestState& call, const at::Tensor& output, const at::Tensor& input);
/// Checks `sizes` (one number per rank, none negative): `whole` has their sum as rows and `part`
/// this rank's; with empty sizes `whole` has n times the elements of `part`. Either may be
/// undefined where the rank does not need it.
void check_sizes(const RequestState& call, const at::Tensor& whole, const at::Tensor& part,
                 const Sizes& sizes);
/// Checks `sizes` (one number per rank, none negative): they add up to the tensor's rows; with
/// empty sizes the number of its elements is divisible by n.
void check_rows(const RequestState& call, const char* role, const at::Tensor& tensor,
                const Sizes& sizes);
/// From CheckLevel::local on: no two elements of an output share memory, and output and input do
/// not overlap.
void check_overlap(const RequestState& call, const at::Tensor& output, const at::Tensor& input);
/// From CheckLevel::local on: no received tensor shares memory with another tensor of the call.
void check_apart(const RequestState& call, const std::vector<Message>& messages);

/// Runs `check` and turns what libtorch itself throws in it into InvalidArgument: a check that
/// fails leaves the group usable.
void checked(const RequestState& call, c10::function_ref<void()> check);

// ---- the same call on all ranks ----

/// The arguments of a call: what must be the same on all ranks, and what only helps to understand
/// an error.
struct Signature {
  /// Compared: dtype, shape or trailing dims, root, reduce operation, sizes.
  std::string same;
  /// Not compared.
  std::string shown;
};

/// Runs `check`, begins the collective call and, with CheckLevel::collective, compares it with the
/// other ranks' calls; `signature` is only asked for then. Throws InvalidArgument (this rank's
/// arguments), or MismatchError on every rank, before data moves.
void begin(RequestState& call, c10::function_ref<void()> check,
           c10::function_ref<Signature()> signature);

/// With CheckLevel::collective: checks that rank r's `output_counts[me]` is this rank's
/// `input_counts[r]` for all pairs of ranks. Throws MismatchError on every rank.
void compare_pairs(RequestState& call, const Sizes& output_counts, const Sizes& input_counts);

/// With CheckLevel::collective, both ends of the messages of one call describe them to each other
/// before the data moves.
class MessageCards {
 public:
  /// Starts to tell the peers what this rank sends and waits for, or, with a `problem`, what it
  /// refused. `messages` holds none from this rank to itself.
  MessageCards(const RequestState& call, const std::vector<Message>& messages,
               const std::string& problem = {});

  /// The exchange of the descriptions; wait for it before compare().
  const std::shared_ptr<RequestState>& request() const { return request_; }
  /// Throws MismatchError on both ranks of a message whose ends differ, with both descriptions.
  /// Where more ranks take part in the call the group is aborted too, so that no rank waits for
  /// data that will not come.
  void compare() const;
  /// The tag of a message, for backends that take tags: data does not travel in the order of calls.
  int tag(std::size_t message) const;

 private:
  GroupState& group_;
  std::vector<int> peers_;
  std::vector<bool> sent_;
  // numbers of the messages between this rank and each peer, in the direction of the message
  std::vector<std::uint64_t> numbers_;
  at::Tensor mine_, theirs_;
  std::shared_ptr<RequestState> request_;
};

}  // namespace tessera::detail
