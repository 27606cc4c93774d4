#include "tessera/comm/agree/agree.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "tessera/base/hash.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/detail/group_state.h"
#include "tessera/comm/group/detail/store_meeting.h"

namespace tessera::agree {
namespace {

// What stands before a rank's bytes: kGood, or 1 + the number of the error's kind. Errors of no
// kind have the number behind the last.
constexpr char kGood = 0;

// What travels has memory, inside a DeferredScope of the caller too.
class InMemory {
  const c10::impl::ExcludeDispatchKeyGuard deferred_{c10::DispatchKey::DeferredInit};
};

std::string blamed(const Group& group, const std::string& what, std::size_t rank) {
  return concat(what, ": ", group.size() > 1 ? concat("rank ", group.ranks()[rank], ": ") : "");
}

// Rows of one size: whether a rank failed, then its bytes.
std::vector<std::string> exchange_rows(const Group& group, const std::string& mine,
                                       std::size_t size, bool failed, const CallOptions& options) {
  const InMemory real;
  const auto row = static_cast<std::int64_t>(size + 1);
  const c10::Device device = detail::control_device(group);
  at::Tensor sent = at::zeros({row}, at::kByte);
  auto* to = static_cast<char*>(sent.mutable_data_ptr());
  to[0] = failed ? 1 : 0;
  if (!failed && size > 0) std::memcpy(to + 1, mine.data(), size);
  at::Tensor all = at::empty({row * group.size()}, sent.options().device(device));
  group.all_gather(all, sent.to(device), {}, options);
  all = all.cpu();
  const auto* from = static_cast<const char*>(all.const_data_ptr());
  std::vector<std::string> rows;
  for (int r = 0; r < group.size(); ++r, from += row)
    rows.emplace_back(from, static_cast<std::size_t>(row));
  return rows;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  TextReader in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(std::move(line));
  return lines;
}

/// The ranks' texts, or an empty list if all are equal. Goes through the store if the group has no
/// other connection (ManagerState::meeting_place()), else through the group's own calls.
std::vector<std::string> texts_that_differ(const Group& group, const std::string& text) {
  const InMemory real;
  constexpr auto kCall = "agreement";
  const std::uint64_t value = Hash().text(text).value();
  detail::GroupState& state = *group.state();
  if (state.meets_at_store() && state.size() > 1) {
    const auto sequence = state.next_sequence();
    state.watch().require_healthy(kCall, sequence);
    state.watch().begin(sequence, kCall);
    try {
      const auto key = concat(kCall, " ", sequence);
      if (detail::agree_at_store(*state.store(), key, state.size(), value, state.timeout()))
        return {};
      return detail::gather_at_store(*state.store(), key, state.rank(), state.size(), text,
                                     state.timeout());
    } catch (...) {
      state.watch().fail(kCall, sequence, std::current_exception(), state.timeout());
    }
  }
  const CallOptions options{.name = kCall};
  const auto hashes =
      exchange_rows(group, Wire<std::uint64_t>::write(value), sizeof value, false, options);
  if (std::ranges::all_of(hashes, [&](const std::string& h) { return h == hashes.front(); }))
    return {};
  // all ranks take this branch together, since all hold the same hashes
  return group.all_gather_bytes(text, options);
}

}  // namespace

std::string failure_of(std::span<const Kind> kinds, const std::function<void()>& body) {
  const auto text = [](std::size_t kind, const std::string& what) {
    return static_cast<char>(1 + kind) + what;
  };
  try {
    body();
    return {};
  } catch (const CommError&) {
    throw;
  } catch (const c10::Error& e) {
    return text(kinds.size(), e.what_without_backtrace());
  } catch (const std::exception& e) {
    const auto it = std::ranges::find_if(kinds, [&](const Kind& k) { return k.is(e); });
    return text(static_cast<std::size_t>(it - kinds.begin()), e.what());
  } catch (...) {
    return text(kinds.size(), "something was thrown that is no std::exception");
  }
}

void raise(std::span<const Kind> kinds, const std::string& failure, const std::string& before) {
  const std::string what = before + failure.substr(1);
  const auto kind = static_cast<std::size_t>(failure[0] - 1);
  if (kind < kinds.size()) kinds[kind].raise(what);
  throw Error(what);
}

std::vector<std::string> exchange(const Group& group, const std::string& what,
                                  const std::string& mine, std::int64_t size,
                                  const std::string& failure, std::span<const Kind> kinds,
                                  const CallOptions& options) {
  const bool fixed = size >= 0;
  std::vector<std::string> all =
      fixed ? exchange_rows(group, mine, static_cast<std::size_t>(size), !failure.empty(), options)
            : group.all_gather_bytes(failure.empty() ? kGood + mine : failure, options);
  if (std::ranges::any_of(all, [](const auto& text) { return text[0] != kGood; })) {
    if (fixed)
      all = group.all_gather_bytes(failure.empty() ? std::string(1, kGood) : failure, options);
    for (std::size_t r = 0; r < all.size(); ++r)
      if (all[r][0] != kGood) raise(kinds, all[r], blamed(group, what, r));
  }
  for (std::string& text : all) text.erase(0, 1);
  return all;
}

std::string from_first(const Group& group, const std::string& what, const std::string& mine,
                       const std::string& failure, std::span<const Kind> kinds,
                       const CallOptions& options) {
  const std::string said =
      group.broadcast_bytes(failure.empty() ? kGood + mine : failure, 0, options);
  if (said[0] != kGood) raise(kinds, said, blamed(group, what, 0));
  return said.substr(1);
}

void require_same(const Group& group, const std::string& what,
                  const std::vector<std::string>& texts) {
  for (std::size_t r = 1; r < texts.size(); ++r)
    if (texts[r] != texts[0])
      throw InvalidArgument(what, ": rank ", group.ranks()[0], " was given ", texts[0], ", rank ",
                            group.ranks()[r], ' ', texts[r], "; give all ranks the same");
}

void same(const Group& group, const std::string& subject, const std::string& text) {
  const auto texts = texts_that_differ(group, text);
  if (texts.empty()) return;
  const auto second = static_cast<std::size_t>(
      std::ranges::find_if(texts, [&](const std::string& t) { return t != texts.front(); }) -
      texts.begin());
  const auto a = lines_of(texts.front()), b = lines_of(texts[second]);
  std::size_t line = 0;
  while (line < a.size() && line < b.size() && a[line] == b[line]) ++line;
  auto shown = [line](const std::vector<std::string>& lines) {
    return line < lines.size() ? concat('"', lines[line], '"') : std::string("nothing");
  };
  std::vector<int> with_first, with_other;
  for (std::size_t r = 0; r < texts.size(); ++r)
    (texts[r] == texts.front() ? with_first : with_other).push_back(group.ranks()[r]);
  throw MismatchError("group '", group.name(), "': the ranks disagree about ", subject,
                      ". First difference, line ", line + 1, ": ranks ", list(with_first), " have ",
                      shown(a), ", rank ", group.ranks()[second], " has ", shown(b),
                      " (ranks that differ from the first: ", list(with_other),
                      "). Give every rank the same.");
}

}  // namespace tessera::agree
