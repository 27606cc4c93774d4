#include "tessera/data/orders.h"

#include <algorithm>

#include "tessera/data/orders/detail/describe.h"

namespace tessera {

Order::~Order() = default;

void Order::rows(const OrderBatch& batch, std::uint64_t first, std::span<SampleRef> out) const {
  if (first > batch.rows.size() || out.size() > batch.rows.size() - first)
    throw InvalidArgument(out.size(), " rows from ", first, " on of a batch that lists ",
                          batch.rows.size());
  std::copy_n(batch.rows.begin() + static_cast<std::ptrdiff_t>(first), out.size(), out.begin());
}

void Order::check(const OrderCursor& cursor) const {
  const OrderCursor wanted = start();
  if (cursor.position.size() != wanted.position.size() ||
      cursor.credit.size() != wanted.credit.size())
    detail::refuse_cursor(concat(cursor.position.size(), " positions and ", cursor.credit.size(),
                                 " credits, where this order saves ", wanted.position.size(),
                                 " and ", wanted.credit.size()));
}

}  // namespace tessera
