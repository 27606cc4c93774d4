#include "tessera/comm/group/detail/store_meeting.h"

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

std::vector<std::string> gather_at_store(c10d::Store& store, const std::string& key, int rank,
                                         int size, const std::string& mine,
                                         std::chrono::milliseconds limit) {
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(concat(key, "/of rank ", r));
  store.set(keys[rank], std::vector<std::uint8_t>(mine.begin(), mine.end()));
  store.wait(keys, limit);
  std::vector<std::string> all;
  for (const auto& bytes : store.multiGet(keys)) all.emplace_back(bytes.begin(), bytes.end());
  return all;
}

}  // namespace tessera::detail
