#include "tessera/checkpoint/detail/together.h"

#include <exception>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::detail {

std::string caught_error() {
  try {
    throw;
  } catch (const CommError&) {
    throw;
  } catch (const FileError& e) {
    return concat('F', e.what());
  } catch (const InvalidArgument& e) {
    return concat('I', e.what());
  } catch (const std::exception& e) {
    return concat('E', e.what());
  } catch (...) {
    return "Esomething was thrown that is no std::exception";
  }
}

void throw_error(const std::string& error, const std::string& before) {
  const std::string what = before + error.substr(1);
  if (error[0] == 'F') throw FileError(what);
  if (error[0] == 'I') throw InvalidArgument(what);
  throw Error(what);
}

void together(const Group& group, const char* call, const std::function<void()>& body,
              const CallOptions& options, const std::string& same) {
  // No error begins with it.
  constexpr char done = '=';
  std::string mine;
  try {
    body();
    mine = done + same;
  } catch (...) {
    mine = caught_error();
  }
  const std::vector<std::string> all = group.all_gather_bytes(mine, options);
  for (std::size_t r = 0; r < all.size(); ++r)
    if (all[r][0] != done)
      throw_error(all[r], concat(call, ": ", all.size() > 1 ? concat("rank ", r, ": ") : ""));
  for (std::size_t r = 1; r < all.size(); ++r)
    if (all[r] != all[0])
      throw InvalidArgument(concat(call, ": rank 0 was given ", all[0].substr(1), ", rank ", r, ' ',
                                   all[r].substr(1), "; give all ranks the same"));
}

void on_first_rank(const Group& group, const char* call, const std::function<void()>& body,
                   const CallOptions& options) {
  std::string told;
  if (group.rank() == 0) {
    try {
      body();
    } catch (...) {
      told = caught_error();
    }
  }
  told = group.broadcast_bytes(told, 0, options);
  if (!told.empty()) throw_error(told, concat(call, ": "));
}

std::string packed(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all += concat(text.size(), ' ') + text;
  return all;
}

std::vector<std::string> unpacked(const std::string& text) {
  std::vector<std::string> all;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t space = text.find(' ', at), size = std::stoull(text.substr(at, space - at));
    all.push_back(text.substr(space + 1, size));
    at = space + 1 + size;
  }
  return all;
}

}  // namespace tessera::detail
