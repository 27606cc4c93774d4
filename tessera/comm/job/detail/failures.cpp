#include "tessera/comm/job/detail/failures.h"

#include <algorithm>
#include <limits>
#include <string_view>

#include "tessera/base/internal/split.h"
#include "tessera/base/number.h"

namespace tessera::detail {
namespace {

constexpr std::string_view kPrefix = "failure of ranks ";

}  // namespace

std::string Failure::name() const {
  std::string text(kPrefix);
  for (const int rank : ranks) text += std::to_string(rank) + ",";
  return text + ":" + std::to_string(number);
}

std::optional<Failure> Failure::of_name(const std::string& name) {
  const auto colon = name.find(':');
  if (!name.starts_with(kPrefix) || colon == std::string::npos) return std::nullopt;
  auto texts = split(name.substr(kPrefix.size(), colon - kPrefix.size()), ',');
  const auto number = parse_number(std::string_view(name).substr(colon + 1));
  // A comma follows each rank.
  if (!number || !texts.back().empty()) return std::nullopt;
  texts.pop_back();
  Failure failure{{}, *number};
  for (const auto& text : texts) {
    const auto rank = parse_number(text);
    if (!rank || *rank > std::numeric_limits<int>::max()) return std::nullopt;
    failure.ranks.push_back(static_cast<int>(*rank));
  }
  return failure;
}

bool is_within(const std::vector<int>& members, const std::vector<int>& ranks) {
  return std::ranges::all_of(members,
                             [&](int member) { return std::ranges::binary_search(ranks, member); });
}

std::optional<Failure> Failures::begin(const std::vector<int>& ranks) {
  Counted& counted = counted_[ranks];
  if (counted.heard > counted.number) {
    ++counted.number;
    return std::nullopt;
  }
  const Failure failure{ranks, counted.number};
  counted.heard = ++counted.number;
  return failure;
}

bool Failures::hear(const Failure& failure, Poison news) {
  Counted& counted = counted_[failure.ranks];
  if (failure.number < counted.heard) return false;
  if (counted.heard <= counted.number) counted.due = false;
  counted.heard = failure.number + 1;
  counted.news = std::move(news);
  return true;
}

std::optional<Poison> Failures::make_due(const Failure& failure) {
  Counted& counted = counted_[failure.ranks];
  if (counted.heard == counted.number || failure.number < counted.number) return std::nullopt;
  counted.due = true;
  return counted.news;
}

bool Failures::mark_thrown(const Failure& failure) {
  Counted& counted = counted_[failure.ranks];
  if (counted.heard == counted.number || failure.number < counted.number) return false;
  counted.number = counted.heard;
  return true;
}

std::optional<std::pair<Failure, Poison>> Failures::due_failure(
    const std::vector<int>& members) const {
  if (members.size() < 2) return std::nullopt;
  for (const auto& [ranks, counted] : counted_)
    if (counted.heard > counted.number && counted.due && is_within(members, ranks))
      return std::pair(Failure{ranks, counted.heard - 1}, counted.news);
  return std::nullopt;
}

std::uint64_t Failures::count(const std::vector<int>& members) const {
  std::uint64_t all = 0;
  for (const auto& [ranks, counted] : counted_)
    if (members.size() > 1 && is_within(members, ranks)) all += counted.number;
  return all;
}

}  // namespace tessera::detail
