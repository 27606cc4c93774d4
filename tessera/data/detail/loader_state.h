#pragma once
// The text that Loader::state() returns: a header, the description of the order, the cursor in
// exact numbers, and a checksum.

#include <string>
#include <vector>

#include "tessera/data/orders.h"

namespace tessera::detail {

/// The words of a text between blanks.
std::vector<std::string> words_of(const std::string& text);

std::string write_state(const Order& order, const OrderCursor& cursor);
/// The cursor in a text of write_state(). Throws ConfigurationError for another text, a damaged
/// one, or a state of an order with another description.
OrderCursor read_state(const Order& order, const std::string& state);

}  // namespace tessera::detail
