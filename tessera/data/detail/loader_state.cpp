#include "tessera/data/detail/loader_state.h"

#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera::detail {
namespace {

constexpr const char* kHeader = "tessera-loader-2";

std::uint64_t fingerprint(const Order& order) { return Hash().text(order.describe()).value(); }
std::uint64_t checksum(const std::string& text) { return Hash().text(text).value() & 0xffffffffu; }

[[noreturn]] void refuse() {
  throw ConfigurationError("this is no state of a loader, or it was truncated or changed");
}

}  // namespace

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  TextReader in(text);
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

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
  const auto end = state.find_last_not_of(" \t\r\n");  // files often end with a line end
  const auto last = end == std::string::npos ? end : state.rfind(' ', end);
  if (last == std::string::npos ||
      state.substr(last + 1, end - last) != std::to_string(checksum(state.substr(0, last))))
    refuse();
  const auto words = words_of(state.substr(0, last));
  std::size_t at = 0;
  auto word = [&] {
    if (at == words.size()) refuse();
    return words[at++];
  };
  auto number = [&] {
    const auto value = parse_number(word());
    if (!value) refuse();
    return *value;
  };
  auto count = [&] {
    const std::uint64_t n = number();
    if (n > words.size() - at) refuse();
    return static_cast<std::size_t>(n);
  };
  if (word() != kHeader) refuse();
  const std::uint64_t saved = number();
  OrderCursor cursor;
  cursor.step = number();
  if (saved != fingerprint(order))
    throw ConfigurationError(
        "the state was saved by another order; this one is: ", order.describe(),
        ". Resume with the same samples, seed and batch schedule");
  cursor.position.resize(count());
  for (auto& p : cursor.position) p = number();
  cursor.credit.resize(count());
  for (double& c : cursor.credit) {
    const auto value = parse_hex_real(word());
    if (!value) refuse();
    c = *value;
  }
  if (at != words.size()) refuse();
  order.check(cursor);
  return cursor;
}

}  // namespace tessera::detail
