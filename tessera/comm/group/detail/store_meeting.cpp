#include "tessera/comm/group/detail/store_meeting.h"

#include <algorithm>
#include <map>
#include <random>
#include <string_view>
#include <thread>

#include "tessera/base/deadline.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::detail {

bool agree_at_store(c10d::Store& store, const std::string& key, int size, std::uint64_t value,
                    std::chrono::milliseconds limit) {
  const std::string mine = concat(key, "/", value), verdict = key + "/verdict";
  // Every rank counts its value before it counts itself: the last one finds all values counted.
  store.add(mine, 1);
  if (store.add(key + "/here", 1) == size)
    store.set(verdict,
              std::vector<std::uint8_t>{static_cast<std::uint8_t>(store.add(mine, 0) == size)});
  store.wait({verdict}, limit);
  const bool agreed = store.get(verdict).at(0) == 1;
  // The last rank that read the verdict removes the keys. If the values differ, the texts follow,
  // and all keys are removed with the group.
  if (agreed && store.add(key + "/read", 1) == size)
    for (const auto& left : {mine, key + "/here", verdict, key + "/read"}) store.deleteKey(left);
  return agreed;
}

namespace {

void put_count(std::vector<std::uint8_t>& bytes, std::uint64_t value) {
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<std::uint8_t>(value >> (8 * i)));
}

std::uint64_t take_count(const std::vector<std::uint8_t>& bytes, std::size_t& at) {
  if (bytes.size() - at < 8) throw Error("the texts of the ranks at their store are damaged");
  std::uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value |= static_cast<std::uint64_t>(bytes[at++]) << (8 * i);
  return value;
}

/// Texts as bytes; one that several ranks gave is there once.
std::vector<std::uint8_t> packed_texts(const std::vector<std::vector<std::uint8_t>>& texts) {
  const auto key = [](const std::vector<std::uint8_t>& text) {
    return std::string_view(reinterpret_cast<const char*>(text.data()), text.size());
  };
  std::map<std::string_view, std::uint64_t> known;
  std::vector<std::uint8_t> different, bytes;
  for (const auto& text : texts) {
    if (!known.emplace(key(text), known.size()).second) continue;
    put_count(different, text.size());
    different.insert(different.end(), text.begin(), text.end());
  }
  put_count(bytes, known.size());
  bytes.insert(bytes.end(), different.begin(), different.end());
  // Runs of ranks: hosts have their ranks one after the other.
  for (std::size_t first = 0, next = 0; first < texts.size(); first = next) {
    while (next < texts.size() && texts[next] == texts[first]) ++next;
    put_count(bytes, known.at(key(texts[first])));
    put_count(bytes, next - first);
  }
  return bytes;
}

std::vector<std::string> unpacked_texts(const std::vector<std::uint8_t>& bytes, std::size_t size) {
  std::size_t at = 0;
  std::vector<std::string> different, all;
  for (auto left = take_count(bytes, at); left > 0; --left) {
    const auto length = take_count(bytes, at);
    if (bytes.size() - at < length) break;
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    different.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(length));
    at += length;
  }
  while (at < bytes.size() && all.size() < size) {
    const auto which = take_count(bytes, at), count = take_count(bytes, at);
    if (which >= different.size() || count > size - all.size()) break;
    all.insert(all.end(), count, different[which]);
  }
  if (all.size() != size) throw Error("the texts of the ranks at their store are damaged");
  return all;
}

}  // namespace

std::vector<std::string> gather_at_store(c10d::Store& store, const std::string& key, int rank,
                                         int size, const std::string& mine,
                                         std::chrono::milliseconds limit) {
  const Deadline deadline = deadline_after(limit);
  std::vector<std::string> keys;
  const auto key_of = [&](int r) { return concat(key, "/of rank ", r); };
  store.set(key_of(rank), std::vector<std::uint8_t>(mine.begin(), mine.end()));
  const std::string everything = key + "/of all";
  if (rank == 0) {
    for (int r = 0; r < size; ++r) keys.push_back(key_of(r));
    store.wait(keys, limit);
    store.set(everything, packed_texts(store.multiGet(keys)));
  }
  // For some stores a limit of zero means no limit.
  store.wait({everything}, std::max(time_left(deadline), std::chrono::milliseconds(1)));
  return unpacked_texts(store.get(everything), static_cast<std::size_t>(size));
}

// Every rank leaves a random word. Rank 0 publishes the words that it has read, and does so again
// until each rank has found its own among them: a word of an earlier life does not suffice for
// that, nor do the words that an earlier rank 0 has published.
std::string name_of_life(c10d::Store& store, int rank, int size, std::chrono::milliseconds limit) {
  using std::chrono::milliseconds;
  const Deadline deadline = deadline_after(limit);
  const std::string words = concat("life/words of ", size, " ranks");
  std::random_device random;
  const std::string mine = concat(random(), '.', random(), '.', random());
  auto nap = [&, pause = milliseconds(1)](const char* what) mutable {
    if (time_left(deadline).count() == 0)
      throw Error("timed out: ", what, " within ", limit.count(), " ms");
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, milliseconds(100));
  };
  // For some stores a limit of zero means no limit.
  const auto left = [&] { return std::max(time_left(deadline), milliseconds(1)); };
  std::vector<std::string> keys, seen;
  for (int r = 0; r < size; ++r) keys.push_back(concat("life/of rank ", r));
  const auto seen_by = [&](const std::string& life, int r) {
    return concat("life/", life, "/seen by rank ", r);
  };
  store.set(keys[rank], mine);
  if (rank == 0) {
    for (int r = 1; r < size; ++r) seen.push_back(seen_by(mine, r));
    store.wait(keys, left());
    while (!store.check(seen)) {
      store.set(words, packed_texts(store.multiGet(keys)));
      nap("rank 0 was not seen by every rank of its group");
    }
    return mine;
  }
  for (;; nap("rank 0 of the group did not come")) {
    store.wait({words}, left());
    const auto all = unpacked_texts(store.get(words), static_cast<std::size_t>(size));
    if (all[rank] != mine) continue;
    store.set(seen_by(all[0], rank), mine);
    return all[0];
  }
}

}  // namespace tessera::detail
