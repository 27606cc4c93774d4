#pragma once
// How values and errors of ranks travel; agree.h is what callers use.

#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/group/group.h"

namespace tessera::agree {

/// A type of errors that keeps its type between ranks.
struct Kind {
  bool (*is)(const std::exception&);
  void (*raise)(const std::string& what);
};

template <class E>
constexpr Kind kind_of() {
  return {[](const std::exception& e) { return dynamic_cast<const E*>(&e) != nullptr; },
          [](const std::string& what) { throw E(what); }};
}

/// The kinds that a call names, before those of base/error.h; the first that fits counts.
template <class... Kinds>
constexpr auto kinds_of() {
  return std::array<Kind, sizeof...(Kinds) + 4>{kind_of<Kinds>()..., kind_of<InvalidArgument>(),
                                                kind_of<ConfigurationError>(), kind_of<FileError>(),
                                                kind_of<NotAvailable>()};
}

/// Empty if `body` returns, else what it threw, as bytes that raise() takes. Throws CommErrors on.
std::string failure_of(std::span<const Kind> kinds, const std::function<void()>& body);
/// Throws what failure_of() made, with `before` in front of its message.
[[noreturn]] void raise(std::span<const Kind> kinds, const std::string& failure,
                        const std::string& before);

/// The bytes of every rank, which are `size` on each (below 0: any number), or the first failure.
std::vector<std::string> exchange(const Group& group, const std::string& what,
                                  const std::string& mine, std::int64_t size,
                                  const std::string& failure, std::span<const Kind> kinds,
                                  const CallOptions& options);
/// The bytes of the first rank, or its failure.
std::string from_first(const Group& group, const std::string& what, const std::string& mine,
                       const std::string& failure, std::span<const Kind> kinds,
                       const CallOptions& options);
/// Throws InvalidArgument unless all texts are equal.
void require_same(const Group& group, const std::string& what,
                  const std::vector<std::string>& texts);

/// A value as bytes; `size` below 0 where that depends on the value.
template <class T>
struct Wire {
  static_assert(std::is_trivially_copyable_v<T>);
  static constexpr std::int64_t size = sizeof(T);
  static std::string write(const T& value) {
    return {reinterpret_cast<const char*>(&value), sizeof(T)};
  }
  static T read(const std::string& bytes) {
    T value;
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
};
template <>
struct Wire<void> {
  static constexpr std::int64_t size = 0;
};
template <>
struct Wire<std::string> {
  static constexpr std::int64_t size = -1;
  static std::string write(std::string value) { return value; }
  static std::string read(std::string bytes) { return bytes; }
};
template <class T>
struct Wire<std::vector<T>> {
  static_assert(std::is_trivially_copyable_v<T>);
  static constexpr std::int64_t size = -1;
  static std::string write(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
  }
  static std::vector<T> read(const std::string& bytes) {
    std::vector<T> values(bytes.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
    return values;
  }
};

}  // namespace tessera::agree
