#pragma once
// Copies to memory that another core will read next, and out of it.
//
// A line that one core has written and another one has read is in both caches. To write it again,
// the first core has to take it back from the other one, which costs several times as much as the
// reading did (AMD EPYC: 9 ns a line, 26 between cores without a common cache). Stores that bypass
// the cache (non-temporal ones) avoid that, and so does a reader that writes to each line; below
// some KiB neither gains. Two ranks that both write have a better way: see Core::slot().

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

/// Copies, and then writes to each line of `from`: this core's cache alone holds them afterwards.
/// In blocks that stay in the nearest cache meanwhile.
inline void take_bytes(std::byte* to, std::byte* from, std::size_t bytes) {
  constexpr std::size_t kBlock = 4096, kLine = 64;
  for (std::size_t done = 0; done < bytes; done += kBlock) {
    const std::size_t part = bytes - done < kBlock ? bytes - done : kBlock;
    std::memcpy(to + done, from + done, part);
    for (std::size_t at = 0; at < part; at += kLine) from[done + at] = std::byte{0};
  }
}

/// Prefetches lines that are read soon.
inline void expect_bytes(const std::byte* data, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + at);
}

}  // namespace tessera::shm::detail
