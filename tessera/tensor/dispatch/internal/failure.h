#pragma once
// A failure on one rank alone, in the middle of an operator, would leave the other ranks waiting
// for it in their next collective; the functions below tell them.

#include <string>

namespace tessera::detail {

struct MeshContext;

/// Tells the other ranks that `op` cannot continue on this rank, for the reason `what`, before this
/// rank throws an error that they may not see because it depends on what this rank alone holds.
/// They get the error that rethrow_to_all() describes.
void tell_ranks(const std::string& op, const MeshContext& context, const std::string& what);

/// In a catch block: rethrows the exception, with the operator's name if it is a RuleError. Unless
/// it comes from communication itself, the other ranks of this mesh are told first: the pending or
/// next call of each throws PeerFailedError with the reason, and ranks that catch it can go on.
[[noreturn]] void rethrow_to_all(const std::string& op, const MeshContext& context);

}  // namespace tessera::detail
