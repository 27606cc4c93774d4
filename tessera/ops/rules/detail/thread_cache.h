#pragma once
// ThreadCache: values that are computed once for each key. Per thread, as the plans of operators
// are, so that a look-up takes no lock and a rank on a thread has its own; nothing but a cache.

#include <unordered_map>
#include <utility>

#include "tessera/tensor/dispatch/internal/plan_cache.h"

namespace tessera::detail {

/// `Tag` tells caches of one type of value apart.
template <class Value, class Tag>
class ThreadCache {
 public:
  /// The value of `key`, made by `make()` the first time. Pointers in a key must be kept alive by
  /// the value. When 1024 values are held all are dropped.
  template <class Make>
  static Value find_or_make(Key key, const Make& make) {
    static thread_local std::unordered_map<Key, Value, KeyHash, KeyEqual> all;
    if (const auto found = all.find(key); found != all.end()) return found->second;
    Value value = make();
    if (all.size() >= 1024) all.clear();
    all.emplace(std::move(key), value);
    return value;
  }
};

}  // namespace tessera::detail
