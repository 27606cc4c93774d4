#include "tessera/tensor/dispatch/internal/kernels.h"

#include <c10/util/Exception.h>

#include "tessera/base/host_lock.h"
#include "tessera/base/text.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail {

void tell_ranks(const std::string& op, const MeshContext& context, const std::string& what) {
  const Mesh& mesh = context.mesh.mesh();
  if (mesh.size() < 2) return;
  context.mesh.manager().fail_groups_within(mesh, concat(op, ": ", what));
}

void rethrow_to_all(const std::string& op, const MeshContext& context) {
  try {
    raising([] { throw; });
    throw;
  } catch (const CommError&) {
    throw;
  } catch (const ImplicitRedistributionError&) {
    throw;  // follows from specs: the same on all ranks, before anything was sent
  } catch (const RuleError& e) {
    tell_ranks(op, context, e.what());
    throw RuleError(op, ": ", e.what());
  } catch (const c10::Error& e) {
    tell_ranks(op, context, e.what_without_backtrace());
    throw;
  } catch (const std::exception& e) {
    tell_ranks(op, context, e.what());
    throw;
  }
}

}  // namespace tessera::detail
