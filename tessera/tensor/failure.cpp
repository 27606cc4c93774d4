#include "tessera/tensor/detail/failure.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "tessera/base/text.h"
#include "tessera/comm/detail/group_state.h"
#include "tessera/comm/detail/manager_state.h"
#include "tessera/tensor/detail/mesh_context.h"
#include "tessera/tensor/errors.h"

namespace tessera::detail {

namespace {

void tell(const std::string& op, const MeshContext& context, const std::string& what) {
  const Mesh& mesh = context.mesh.layout();
  if (mesh.size() < 2) return;
  const std::string reason = concat(op, " failed there: ", what);
  for (const auto& group : context.mesh.manager().state()->groups()) {
    const auto& ranks = group->ranks();
    if (ranks.size() > 1 && std::all_of(ranks.begin(), ranks.end(), [&](int r) { return mesh.contains(r); })) Group(group).abort(reason);
  }
}

}  // namespace

void rethrow_to_all(const std::string& op, const MeshContext& context) {
  try {
    throw;
  } catch (const CommError&) {
    throw;
  } catch (const ImplicitRedistributionError&) {
    throw;  // decided from specs: the same on all ranks, before anything was sent
  } catch (const RuleError& e) {
    tell(op, context, e.what());
    throw RuleError(concat(op, ": ", e.what()));
  } catch (const c10::Error& e) {
    tell(op, context, e.what_without_backtrace());
    throw;
  } catch (const std::exception& e) {
    tell(op, context, e.what());
    throw;
  }
}

}  // namespace tessera::detail
