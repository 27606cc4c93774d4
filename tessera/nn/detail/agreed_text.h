#pragma once
// What one rank refuses to do with a module is refused on all.

#include <exception>
#include <functional>
#include <string>

#include "tessera/comm/agree/agree.h"
#include "tessera/comm/job/device_mesh.h"

namespace tessera::detail {

/// Runs `plan`, whose text must be the same on all ranks of the mesh, where the message of what it
/// throws is its text. Throws MismatchError, which names `subject`, on all ranks if they differ;
/// else on all what `plan` threw.
inline void agree_on_plan(const DeviceMesh& mesh, const std::string& subject,
                          const std::function<std::string()>& plan) {
  std::exception_ptr refused;
  std::string text;
  try {
    text = plan();
  } catch (const std::exception& e) {
    refused = std::current_exception();
    text = e.what();
  }
  if (const Group ranks = mesh.all(); ranks.size() > 1) agree::same(ranks, subject, text);
  if (refused) std::rethrow_exception(refused);
}

}  // namespace tessera::detail
