#pragma once
// Agreement: what one rank sees, all ranks learn. Values, errors and options of ranks go through
// these functions wherever the ranks must go on alike; nothing else encodes them.
//
//   const auto sizes = agree::all<std::int64_t>(group, "load", [&] { return read(path).size(); });
//   agree::all(group, "load", [&] { check(path); });       // an error of any rank, on every rank
//   agree::same(group, "the options of the loader", text); // MismatchError with the first line
//   const auto tag = agree::first<std::string>(group, "load", [&] { return newest(path); });
//
// All calls are collective over the group. An error that `body` throws on any rank is thrown on
// every rank, with the rank in front of its text: the first such rank's, in group order. It keeps
// its type if that is one of base/error.h or of the `Kinds` that the call names; a class derived
// from one of them arrives as that one, anything else as Error. A CommError goes on at once on
// the rank that has it: the other ranks have, or get, one of their own.
//
// Costs: all() of values of a fixed size, or of none, is one all-gather; texts and lists cost two
// (lengths, bytes), first() two broadcasts, same() one exchange of 8 bytes. Errors cost two more.

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "tessera/comm/agree/failure.h"
#include "tessera/comm/group/group.h"

namespace tessera::agree {

/// Every rank's value, in group order. `T`: void, trivially copyable, std::string, or a vector of
/// what is trivially copyable.
template <class T = void, class... Kinds, class Body>
auto all(const Group& group, const std::string& what, const Body& body,
         const CallOptions& options = {}) {
  static constexpr auto kinds = kinds_of<Kinds...>();
  std::string mine;
  const std::string failure = failure_of(kinds, [&] {
    if constexpr (std::is_void_v<T>) {
      body();
    } else {
      mine = Wire<T>::write(body());
    }
  });
  const auto said = exchange(group, what, mine, Wire<T>::size, failure, kinds, options);
  if constexpr (!std::is_void_v<T>) {
    std::vector<T> values;
    values.reserve(said.size());
    for (const std::string& bytes : said) values.push_back(Wire<T>::read(bytes));
    return values;
  }
}

/// The value of `body` on the group's first rank, on all ranks; the others do not run it.
template <class T = void, class... Kinds, class Body>
T first(const Group& group, const std::string& what, const Body& body,
        const CallOptions& options = {}) {
  static constexpr auto kinds = kinds_of<Kinds...>();
  std::string mine, failure;
  if (group.rank() == 0) {
    failure = failure_of(kinds, [&] {
      if constexpr (std::is_void_v<T>) {
        body();
      } else {
        mine = Wire<T>::write(body());
      }
    });
  }
  const std::string said = from_first(group, what, mine, failure, kinds, options);
  if constexpr (!std::is_void_v<T>) return Wire<T>::read(said);
}

/// Compares `text` over the ranks. `subject` names it in the message ("the plan of the process
/// groups"). One option a line lets the message name the option that differs.
///
/// Throws MismatchError on every rank unless all ranks gave the same text; the message shows the
/// first line that differs, with the ranks on either side.
void same(const Group& group, const std::string& subject, const std::string& text);

/// Runs `body` like all(); what it returns chooses the calls that follow, so all ranks must return
/// the same. Throws InvalidArgument on every rank if they do not, with two ranks' texts.
template <class... Kinds>
std::string all_same(const Group& group, const std::string& what,
                     const std::function<std::string()>& body, const CallOptions& options = {}) {
  const auto texts = all<std::string, Kinds...>(group, what, body, options);
  require_same(group, what, texts);
  return texts.front();
}

}  // namespace tessera::agree
