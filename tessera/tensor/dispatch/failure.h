#pragma once
// What fails on one rank alone, in the middle of an operator, would leave the others waiting for
// that rank in their next collective: they are told.

#include <string>

namespace tessera::detail {

struct MeshContext;

/// This rank is about to throw what the other ranks may not: `op` cannot go on here, for the reason
/// `what`, which depends on what this rank alone holds. They are told as by rethrow_to_all().
void tell_ranks(const std::string& op, const MeshContext& context, const std::string& what);

/// In a catch block: rethrows the exception, with the operator's name if it is a RuleError. Unless
/// it comes from communication itself, the other ranks of this mesh are told first: the pending or
/// next call of each throws PeerFailedError with the reason, and the groups of those that catch it
/// go on.
[[noreturn]] void rethrow_to_all(const std::string& op, const MeshContext& context);

}  // namespace tessera::detail
