// partition_by_metis() in a build without METIS: how to get it.
#include "tessera/base/error.h"
#include "tessera/partition/partitioners.h"

namespace tessera {

std::vector<int> partition_by_metis(std::int64_t, std::span<const std::int64_t>,
                                    std::span<const std::int64_t>, int, std::span<const double>) {
  throw NotAvailable(
      "this Tessera was built without METIS: install it (Debian: libmetis-dev) and configure "
      "again, "
      "or divide points by bisect_points() or partition_along_curve()");
}

}  // namespace tessera
