#include "tessera/launch/internal/node_list.h"

#include <algorithm>
#include <cstdint>

#include "tessera/base/error.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

constexpr std::size_t max_hosts = 1 << 20;
// Of all names together: a few bytes of text can name gigabytes of hosts.
constexpr std::size_t max_bytes = 32 << 20;
constexpr std::size_t max_name = 1024;
// A number wider than this is no host's.
constexpr std::size_t max_digits = 20;

// The position in a list that is being read; `fail` reports it.
class Reader {
 public:
  Reader(std::string_view text, const char* what) : text_(text), what_(what) {}

  bool at_end() const { return at_ == text_.size(); }
  char peek() const { return at_end() ? '\0' : text_[at_]; }
  char next() { return text_[at_++]; }
  bool take(char c) {
    if (peek() != c || at_end()) return false;
    ++at_;
    return true;
  }
  void skip_blanks() {
    while (!at_end() && is_blank(peek())) ++at_;
  }
  std::string digits() {
    const std::size_t begin = at_;
    while (!at_end() && is_digit(peek())) ++at_;
    if (begin == at_) fail("a number is missing");
    if (at_ - begin > max_digits) fail(concat("a number has more than ", max_digits, " digits"));
    return std::string(text_.substr(begin, at_ - begin));
  }
  [[noreturn]] void fail(const std::string& why) const {
    throw ConfigurationError(what_, " '", printable(text_), "', character ", at_ + 1, ": ", why);
  }

 private:
  std::string_view text_;
  const char* what_;
  std::size_t at_ = 0;
};

// "[089, 100-110]" behind the opening bracket.
std::vector<std::string> bracket(Reader& in) {
  std::vector<std::string> numbers;
  do {
    in.skip_blanks();
    const std::string first = in.digits();
    in.skip_blanks();
    if (numbers.size() >= max_hosts) in.fail(concat("more than ", max_hosts, " hosts"));
    if (!in.take('-')) {
      numbers.push_back(first);
    } else {
      in.skip_blanks();
      const std::string last = in.digits();
      in.skip_blanks();
      const auto from = parse_number(first);
      const auto to = parse_number(last);
      if (!from || !to) in.fail("a number is too large");
      if (*from > *to) in.fail(concat("the range ", first, "-", last, " runs backwards"));
      if (*to - *from >= max_hosts - numbers.size())
        in.fail(concat("the range ", first, "-", last, " is too long; at most ", max_hosts,
                       " hosts are read"));
      for (std::uint64_t n = *from; n <= *to; ++n) {
        std::string text = std::to_string(n);
        if (text.size() < first.size()) text.insert(0, first.size() - text.size(), '0');
        numbers.push_back(text);
      }
    }
  } while (in.take(','));
  if (!in.take(']')) in.fail("expected ',' or ']'");
  return numbers;
}

// What stands before a bracket or the end of a name.
std::string plain(Reader& in, const auto& ends_name) {
  std::string text;
  while (!in.at_end() && !ends_name(in.peek()) && in.peek() != '[') {
    const char c = in.next();
    if (c == ']' || c == '(' || c == ')') in.fail(concat("unexpected '", c, "'"));
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) in.fail("a control character in a name");
    text += c;
  }
  return text;
}

// One of each choice, the last one fastest.
std::vector<std::string> products(const std::vector<std::vector<std::string>>& choices) {
  std::vector<std::string> all{""};
  for (const auto& choice : choices) {
    std::vector<std::string> longer;
    longer.reserve(all.size() * choice.size());
    for (const auto& name : all)
      for (const auto& one : choice) longer.push_back(name + one);
    all = std::move(longer);
  }
  return all;
}

}  // namespace

std::vector<std::string> expand_node_list(std::string_view text) {
  Reader in(text, "node list");
  std::vector<std::string> hosts;
  std::size_t bytes = 0;
  bool expected = true;  // A name must follow: at the start, and behind a comma.
  for (in.skip_blanks(); !in.at_end(); in.skip_blanks()) {
    // What a name consists of, text as a choice of one. Multiplied out when all are known, so that
    // the time is that of the names that come of it.
    std::vector<std::vector<std::string>> choices;
    std::size_t count = 1, length = 0;
    const auto ends_name = [&](char c) { return c == ',' || is_blank(c); };
    while (!in.at_end() && !ends_name(in.peek())) {
      std::vector<std::string> choice(1);
      if (in.take('['))
        choice = bracket(in);
      else
        choice[0] = plain(in, ends_name);
      count *= choice.size();
      length += std::ranges::max(choice, {}, &std::string::size).size();
      if (hosts.size() + count > max_hosts) in.fail(concat("more than ", max_hosts, " hosts"));
      if (length > max_name) in.fail(concat("a name of more than ", max_name, " bytes"));
      if (bytes + count * length > max_bytes)
        in.fail(concat("names of more than ", max_bytes, " bytes in all"));
      if (choice.size() == 1 && !choices.empty() && choices.back().size() == 1)
        choices.back()[0] += choice[0];
      else
        choices.push_back(std::move(choice));
    }
    if (choices.empty()) in.fail("a host name is missing");
    for (std::string& name : products(choices)) {
      bytes += name.size();
      hosts.push_back(std::move(name));
    }
    in.skip_blanks();
    expected = in.take(',');
  }
  if (expected) in.fail("a host name is missing");
  return hosts;
}

std::vector<int> expand_task_counts(std::string_view text) {
  Reader in(text, "task counts");
  std::vector<int> counts;
  auto number = [&]() -> int {
    const auto value = parse_number(in.digits());
    if (!value || *value > static_cast<std::uint64_t>(max_hosts))
      in.fail(concat("the number is too large; at most ", max_hosts));
    return static_cast<int>(*value);
  };
  do {
    in.skip_blanks();
    const int tasks = number();
    int times = 1;
    if (in.take('(')) {
      if (!in.take('x')) in.fail("expected 'x'");
      times = number();
      if (times == 0) in.fail("zero times");
      if (!in.take(')')) in.fail("expected ')'");
    }
    if (counts.size() + static_cast<std::size_t>(times) > max_hosts)
      in.fail(concat("more than ", max_hosts, " hosts"));
    counts.insert(counts.end(), static_cast<std::size_t>(times), tasks);
    in.skip_blanks();
  } while (in.take(','));
  if (!in.at_end()) in.fail("expected ',' or the end");
  return counts;
}

}  // namespace tessera
