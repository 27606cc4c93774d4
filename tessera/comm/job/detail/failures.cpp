#include "tessera/comm/job/detail/failures.h"

#include <algorithm>
#include <charconv>
#include <string_view>

namespace tessera::detail {
namespace {

constexpr std::string_view kPrefix = "failure of ranks ";

// Reads the number at the front of `text` and removes it.
template <class Number>
std::optional<Number> take_number(std::string_view& text) {
  Number n{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return n;
}

}  // namespace

std::string Failure::name() const {
  std::string text(kPrefix);
  for (const int rank : ranks) text += std::to_string(rank) + ",";
  return text + ":" + std::to_string(number);
}

std::optional<Failure> Failure::of_name(const std::string& name) {
  std::string_view text = name;
  if (!text.starts_with(kPrefix)) return std::nullopt;
  text.remove_prefix(kPrefix.size());
  Failure failure;
  while (!text.empty() && text.front() != ':') {
    const auto rank = take_number<int>(text);
    if (!rank || text.empty() || text.front() != ',') return std::nullopt;
    text.remove_prefix(1);
    failure.ranks.push_back(*rank);
  }
  if (text.empty()) return std::nullopt;
  text.remove_prefix(1);
  const auto number = take_number<std::uint64_t>(text);
  if (!number || !text.empty()) return std::nullopt;
  failure.number = *number;
  return failure;
}

bool is_within(const std::vector<int>& members, const std::vector<int>& ranks) {
  return std::ranges::all_of(members,
                             [&](int member) { return std::ranges::binary_search(ranks, member); });
}

std::optional<Failure> Failures::begin(const std::vector<int>& ranks) {
  const std::lock_guard lock(mutex_);
  Counted& counted = counted_[ranks];
  if (counted.heard > counted.number) {
    ++counted.number;
    return std::nullopt;
  }
  const Failure failure{ranks, counted.number};
  counted.heard = ++counted.number;
  return failure;
}

bool Failures::hear(const Failure& failure, News news) {
  const std::lock_guard lock(mutex_);
  Counted& counted = counted_[failure.ranks];
  if (failure.number < counted.heard) return false;
  if (counted.heard <= counted.number) counted.due = false;
  counted.heard = failure.number + 1;
  counted.news = std::move(news);
  return true;
}

std::optional<Failures::News> Failures::make_due(const Failure& failure) {
  const std::lock_guard lock(mutex_);
  Counted& counted = counted_[failure.ranks];
  if (counted.heard == counted.number || failure.number < counted.number) return std::nullopt;
  counted.due = true;
  return counted.news;
}

bool Failures::mark_thrown(const Failure& failure) {
  const std::lock_guard lock(mutex_);
  Counted& counted = counted_[failure.ranks];
  if (counted.heard == counted.number || failure.number < counted.number) return false;
  counted.number = counted.heard;
  return true;
}

std::optional<std::pair<Failure, Failures::News>> Failures::due_failure(
    const std::vector<int>& members) const {
  const std::lock_guard lock(mutex_);
  if (members.size() < 2) return std::nullopt;
  for (const auto& [ranks, counted] : counted_)
    if (counted.heard > counted.number && counted.due && is_within(members, ranks))
      return std::pair(Failure{ranks, counted.heard - 1}, counted.news);
  return std::nullopt;
}

std::uint64_t Failures::count(const std::vector<int>& members) const {
  const std::lock_guard lock(mutex_);
  std::uint64_t all = 0;
  for (const auto& [ranks, counted] : counted_)
    if (members.size() > 1 && is_within(members, ranks)) all += counted.number;
  return all;
}

}  // namespace tessera::detail
