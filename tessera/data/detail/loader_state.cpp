#include "tessera/data/detail/loader_state.h"

#include <cstdlib>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/text.h"

namespace tessera::detail {
namespace {

constexpr const char* kHeader = "tessera-loader-2";

std::uint64_t fingerprint(const Order& order) { return Hash().text(order.describe()).value(); }
std::uint64_t checksum(const std::string& text) { return Hash().text(text).value() & 0xffffffffu; }

[[noreturn]] void refuse() {
  throw ConfigurationError("this is no state of a loader, or it was cut off or changed");
}

}  // namespace

std::string write_state(const Order& order, const OrderCursor& cursor) {
  TextStream out;
  out << kHeader << ' ' << fingerprint(order) << ' ' << cursor.step << ' '
      << cursor.position.size();
  for (auto p : cursor.position) out << ' ' << p;
  out << ' ' << cursor.credit.size() << std::hexfloat;  // exact
  for (double c : cursor.credit) out << ' ' << c;
  const std::string text = std::move(out).str();
  return concat(text, ' ', checksum(text));
}

OrderCursor read_state(const Order& order, const std::string& state) {
  const auto end = state.find_last_not_of(" \t\r\n");  // files like to end in a line end
  const auto last = end == std::string::npos ? end : state.rfind(' ', end);
  if (last == std::string::npos ||
      state.substr(last + 1, end - last) != std::to_string(checksum(state.substr(0, last))))
    refuse();
  TextReader in(state.substr(0, last));
  std::string header;
  std::uint64_t saved = 0;
  OrderCursor cursor;
  auto count = [&] {
    std::size_t n = 0;
    if (!(in >> n) || n > state.size()) refuse();
    return n;
  };
  if (!(in >> header >> saved >> cursor.step) || header != kHeader) refuse();
  if (saved != fingerprint(order))
    throw ConfigurationError(
        concat("the state was saved by another order; this one is: ", order.describe(),
               ". Resume with the same samples, seed and batch schedule"));
  cursor.position.resize(count());
  for (auto& p : cursor.position) in >> p;
  cursor.credit.resize(count());
  for (double& c : cursor.credit) {
    std::string number;  // streams do not read hexadecimal floats back
    in >> number;
    c = std::strtod(number.c_str(), nullptr);
  }
  if (!in) refuse();
  order.check(cursor);
  return cursor;
}

}  // namespace tessera::detail
