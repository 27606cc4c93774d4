#pragma once
// What is verified before data moves: this rank's arguments, and with CheckLevel::collective that
// all ranks make the same call.

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
  throw InvalidArgument(
      concat(call.describe(), " in group '", call.group().name(), "': ", what...));
}

inline std::string show(const at::Tensor& t) {
  return t.defined() ? concat(c10::toString(t.scalar_type()), t.sizes(), " on ", t.device())
                     : std::string("an undefined tensor");
}

// Arguments of this rank. What could make a backend read or write out of bounds is checked at
// every level.

/// A tensor that is read: defined, dense, in memory that it has, on a device the group serves.
void check_tensor(const RequestState& call, const char* role, const at::Tensor& tensor);
/// The same for one that is written.
void check_target(const RequestState& call, const char* role, const at::Tensor& tensor);
void check_root(const RequestState& call, int root);
void check_peer(const RequestState& call, int peer);
/// Same dtype and device.
void check_alike(const RequestState& call, const at::Tensor& output, const at::Tensor& input);
/// One size a rank, none negative; `whole` has their sum as rows and `part` this rank's; with empty
/// sizes `whole` has n times the elements of `part`. Either may be undefined where the rank does
/// not need it.
void check_sizes(const RequestState& call, const at::Tensor& whole, const at::Tensor& part,
                 const Sizes& sizes);
/// One size a rank, none negative, adding up to the tensor's rows; with empty sizes its elements
/// divide by n.
void check_rows(const RequestState& call, const char* role, const at::Tensor& tensor,
                const Sizes& sizes);
/// From CheckLevel::local on: no two elements of an output share memory, and output and input do
/// not overlap.
void check_overlap(const RequestState& call, const at::Tensor& output, const at::Tensor& input);
/// From CheckLevel::local on: no received tensor shares memory with another tensor of the call.
void check_apart(const RequestState& call, const std::vector<Message>& messages);

/// Runs `check`, and turns what libtorch itself throws in it into InvalidArgument: a check that
/// fails leaves the group sound.
void checked(const RequestState& call, c10::function_ref<void()> check);

// ---- the same call on all ranks ----

/// What must be the same on all ranks, and what only helps to understand an error.
struct Signature {
  /// Compared: dtype, shape or trailing dims, root, reduce operation, sizes.
  std::string same;
  /// Not compared.
  std::string shown;
};

/// Runs `check`; begins the collective call; with CheckLevel::collective compares it with the other
/// ranks'. `signature` is only asked for then. Throws InvalidArgument (this rank's arguments), or
/// MismatchError on every rank, before data moves.
void begin(RequestState& call, c10::function_ref<void()> check,
           c10::function_ref<Signature()> signature);

/// With CheckLevel::collective: rank r's `output_sizes[me]` must be this rank's `input_sizes[r]`,
/// for all pairs. Element counts. Throws MismatchError on every rank.
void compare_pairs(RequestState& call, const Sizes& output_counts, const Sizes& input_counts);

/// What both ends of the messages of one call tell each other with CheckLevel::collective, before
/// the data moves.
class MessageCards {
 public:
  /// Begins to tell the peers what this rank sends and waits for, or, with a `problem`, what it
  /// refused. No message to this rank itself.
  MessageCards(const RequestState& call, const std::vector<Message>& messages,
               const std::string& problem = {});

  /// To be waited for before compare().
  const std::shared_ptr<RequestState>& request() const { return request_; }
  /// Throws MismatchError if an end of a message does not fit the other: on both its ranks, with
  /// both. Where more ranks take part in the call the group is aborted too, so that nobody waits
  /// for what does not come.
  void compare() const;
  /// For backends that take tags: data does not travel in the order of the calls.
  int tag(std::size_t message) const;

 private:
  GroupState& group_;
  std::vector<int> peers_;
  std::vector<bool> sent_;
  // of the messages between this rank and the peer, in this direction
  std::vector<std::uint64_t> numbers_;
  at::Tensor mine_, theirs_;
  std::shared_ptr<RequestState> request_;
};

}  // namespace tessera::detail
