#pragma once
// Copies to memory that another core will read next.
//
// A core that reads what another one has just written takes each line out of that core's cache,
// which takes several times as long as from memory on processors whose caches are joined by a mesh
// or lie on several dies (AMD EPYC: 37 ns per line against 10). Stores that bypass the cache
// (non-temporal ones) leave nothing there to be fetched. Below some KiB the way to memory costs
// more than it saves.

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tessera::shm::detail {

/// From this size on copies bypass the cache.
inline constexpr std::size_t kStreamBytes = 2048;

/// As memcpy; the bytes are in place before anything that this thread writes later.
inline void stream_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes == 0) return;
#if defined(__SSE2__)
  constexpr std::size_t kLine = 64;
  if (bytes >= kStreamBytes) {
    const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
    std::memcpy(to, from, head);
    std::size_t at = head;
    for (; at + kLine <= bytes; at += kLine) {
      const auto* source = reinterpret_cast<const __m128i*>(from + at);
      auto* target = reinterpret_cast<__m128i*>(to + at);
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1),
                    c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    // A release store alone does not wait for non-temporal stores.
    _mm_sfence();
    std::memcpy(to + at, from + at, bytes - at);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

/// Prefetches lines that are read soon.
inline void expect_bytes(const std::byte* data, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + at);
}

}  // namespace tessera::shm::detail
