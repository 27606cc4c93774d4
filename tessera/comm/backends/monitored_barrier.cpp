#include <string>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/comm/backends/as_c10d.h"
#include "tessera/comm/group/types.h"

namespace tessera::detail {

void AsC10d::monitoredBarrier(const c10d::BarrierOptions& options, bool all_ranks) try {
  c10d::BarrierOptions blocking = options;
  blocking.asyncOp = false;
  barrier(blocking)->wait();
} catch (const TimeoutError& late) {
  // Between hosts a rank of this host may be late because it waits for one of another.
  if (late.missing().empty() || getBackendName() != "shm") throw;
  std::vector<int> named = late.missing();
  if (!all_ranks) named.resize(1);
  // In Gloo's words, which programs look for.
  const std::string reached =
      getRank() == 0 ? ""
                     : concat("Rank ", getRank(),
                              " successfully reached monitoredBarrier, but received errors while "
                              "waiting for send/recv from rank 0: ");
  throw TimeoutError(concat(reached, named.size() == 1 ? "Rank " : "Ranks ", joined(named, ", "),
                            " failed to pass monitoredBarrier: ", late.what()),
                     late.missing());
}

}  // namespace tessera::detail
