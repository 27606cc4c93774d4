#pragma once
// The text that Loader::state() gives: a header, what the order is, the cursor in exact numbers,
// and a checksum.

#include <string>

#include "tessera/data/order.h"

namespace tessera::detail {

std::string write_state(const Order& order, const OrderCursor& cursor);
/// Throws ConfigurationError for another text, a damaged one, or a state of an order with another
/// description.
OrderCursor read_state(const Order& order, const std::string& state);

}  // namespace tessera::detail
