#pragma once
// What fails on one rank alone, in the middle of an operator, would leave the others waiting for
// that rank in their next collective: they are told.

#include <string>

namespace tessera::detail {

struct MeshContext;

/// In a catch block: rethrows the exception, with the operator's name if it is a RuleError. Unless
/// it comes from communication itself, every group that was made of this mesh's ranks is aborted
/// first: the other ranks' pending and later calls throw PeerLostError with the reason.
[[noreturn]] void rethrow_to_all(const std::string& op, const MeshContext& context);

}  // namespace tessera::detail
