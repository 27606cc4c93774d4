#include "tessera/shm/detail/reduce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tessera/shm/detail/stream.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define TESSERA_SHM_AVX2 __attribute__((target("avx2,f16c")))
#endif
#define TESSERA_SHM_INLINE __attribute__((always_inline)) inline

namespace tessera::shm {
namespace {

using Kind = Reduction::Kind;

// Bytes that one block combines: small enough to stay in the first-level cache from the first
// source to the last.
constexpr std::size_t kBlockBytes = 4096;

struct Half {
  std::uint16_t bits;
};
struct Bfloat16 {
  std::uint16_t bits;
};
template <class F>
struct Complex {
  F re, im;
};

// IEEE 754 binary16: 5 bits of exponent (bias 15), 10 of fraction.
TESSERA_SHM_INLINE float widen(Half h) {
  const std::uint32_t sign = std::uint32_t{h.bits & 0x8000U} << 16;
  const std::uint32_t rest = h.bits & 0x7fffU;
  if (rest >= 0x7c00U) {  // Infinity or NaN; a signalling NaN becomes a quiet one, as in the CPU.
    const std::uint32_t quiet = rest > 0x7c00U ? 0x400000U : 0U;
    return std::bit_cast<float>(sign | 0x7f800000U | ((rest & 0x3ffU) << 13) | quiet);
  }
  if (rest >= 0x400U) return std::bit_cast<float>(sign | ((rest << 13) + 0x38000000U));
  // Below the smallest normal number: an integer multiple of 2^-24.
  const float magnitude = static_cast<float>(rest) * 0x1p-24F;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

/// Rounds to nearest, ties to even.
TESSERA_SHM_INLINE Half narrow_half(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t rest = bits & 0x7fffffffU;
  const auto with_sign = [sign](std::uint32_t low) {
    return Half{static_cast<std::uint16_t>(sign | low)};
  };
  if (rest > 0x7f800000U) return with_sign(0x7e00U | ((rest >> 13) & 0x1ffU));
  if (rest >= 0x477ff000U) return with_sign(0x7c00U);  // 65520 and more round to infinity.
  if (rest < 0x38800000U) {                            // Below 2^-14: a multiple of 2^-24.
    // 0.5 has its last bit at 2^-24, so the addition rounds there.
    const float shifted = std::bit_cast<float>(rest) + 0.5F;
    return with_sign(std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0.5F));
  }
  const std::uint32_t odd = (rest >> 13) & 1U;
  return with_sign((rest - 0x38000000U + 0xfffU + odd) >> 13);
}

TESSERA_SHM_INLINE float widen(Bfloat16 b) {
  return std::bit_cast<float>(std::uint32_t{b.bits} << 16);
}

TESSERA_SHM_INLINE Bfloat16 narrow_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x40U;
  return {static_cast<std::uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? quiet : rounded)};
}

// ---- how values of one type are combined ----

template <class T, Kind kind>
TESSERA_SHM_INLINE T meet(T a, T b) {
  if constexpr (kind == Kind::sum)
    return static_cast<T>(a + b);
  else if constexpr (kind == Kind::product && std::is_integral_v<T>)
    return static_cast<T>(1U * a * b);  // Small ones would become int, which may not overflow.
  else if constexpr (kind == Kind::product)
    return a * b;
  else if constexpr (kind == Kind::min)
    return (b < a) | (b != b) ? b : a;
  else if constexpr (kind == Kind::max)
    return (b > a) | (b != b) ? b : a;
  else if constexpr (kind == Kind::bit_and)
    return static_cast<T>(a & b);
  else if constexpr (kind == Kind::bit_or)
    return static_cast<T>(a | b);
  else
    return static_cast<T>(a ^ b);
}

/// Booleans are bytes of which any that is not 0 means true; results are 0 or 1.
struct Boolean {
  std::uint8_t byte;
};
template <class T, Kind kind>
  requires std::is_same_v<T, Boolean>
TESSERA_SHM_INLINE T meet(T a, T b) {
  const bool x = a.byte != 0, y = b.byte != 0;
  if constexpr (kind == Kind::bit_and) return {static_cast<std::uint8_t>(x & y)};
  if constexpr (kind == Kind::bit_or) return {static_cast<std::uint8_t>(x | y)};
  return {static_cast<std::uint8_t>(x ^ y)};
}

template <class T, Kind kind>
  requires(std::is_same_v<T, Complex<float>> || std::is_same_v<T, Complex<double>>)
TESSERA_SHM_INLINE T meet(T a, T b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

template <class T>
TESSERA_SHM_INLINE T* typed(std::byte* p) {
  return reinterpret_cast<T*>(p);
}
template <class T>
TESSERA_SHM_INLINE const T* typed(const std::byte* p) {
  return reinterpret_cast<const T*>(p);
}

// `ivdep`: an output is one of the sources or disjoint from all, so no element depends on
// another's.
template <class T, Kind kind>
TESSERA_SHM_INLINE void pairwise(T* out, const T* a, const T* b, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) out[i] = meet<T, kind>(a[i], b[i]);
}

/// At most kBlockBytes of elements that are reduced in their own type.
template <class T, Kind kind>
TESSERA_SHM_INLINE void plain_block(std::byte* out, const std::byte* const* sources, std::size_t at,
                                    int ranks, std::size_t count) {
  const T *first = typed<T>(sources[0] + at), *second = typed<T>(sources[1] + at);
  if (ranks == 2) {
    pairwise<T, kind>(typed<T>(out), first, second, count);
    return;
  }
  alignas(64) std::array<T, kBlockBytes / sizeof(T)> sum;
  pairwise<T, kind>(sum.data(), first, second, count);
  for (int r = 2; r < ranks; ++r)
    pairwise<T, kind>(sum.data(), sum.data(), typed<T>(sources[r] + at), count);
  std::memcpy(out, sum.data(), count * sizeof(T));
}

// ---- values that are reduced in another type, or with factors ----

TESSERA_SHM_INLINE void narrow(Bfloat16& to, float from) { to = narrow_bfloat16(from); }
TESSERA_SHM_INLINE void narrow(Half& to, float from) { to = narrow_half(from); }

#if defined(__x86_64__)
// Not inlined into their callers: only functions of the same target may contain these.
TESSERA_SHM_AVX2 __attribute__((noinline)) void load_avx2(float* to, const Half* from,
                                                          std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  for (; i < count; ++i) to[i] = widen(from[i]);
}
TESSERA_SHM_AVX2 __attribute__((noinline)) void store_avx2(Half* to, const float* from,
                                                           std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < count; ++i) to[i] = narrow_half(from[i]);
}
#endif

template <bool avx2, class A, class T>
TESSERA_SHM_INLINE void load(A* to, const T* from, std::size_t count) {
  if constexpr (std::is_same_v<A, T>) std::memcpy(to, from, count * sizeof(T));
#if defined(__x86_64__)
  else if constexpr (avx2 && std::is_same_v<T, Half>)
    load_avx2(to, from, count);
#endif
  else
    for (std::size_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}
template <bool avx2, class A, class T>
TESSERA_SHM_INLINE void store(T* to, const A* from, std::size_t count) {
  if constexpr (std::is_same_v<A, T>) std::memcpy(to, from, count * sizeof(T));
#if defined(__x86_64__)
  else if constexpr (avx2 && std::is_same_v<T, Half>)
    store_avx2(to, from, count);
#endif
  else
    for (std::size_t i = 0; i < count; ++i) narrow(to[i], from[i]);
}

/// T: in memory; A: what is computed in.
template <bool avx2, class T, class A, Kind kind>
TESSERA_SHM_INLINE void staged_block(std::byte* out, const std::byte* const* sources,
                                     std::size_t at, int ranks, std::size_t count,
                                     const double* factors) {
  constexpr Kind inner = kind == Kind::average || kind == Kind::premultiplied ? Kind::sum : kind;
  alignas(64) std::array<A, kBlockBytes / sizeof(T)> sum;
  alignas(64) std::array<A, kBlockBytes / sizeof(T)> next;
  load<avx2>(sum.data(), typed<T>(sources[0] + at), count);
  if constexpr (kind == Kind::premultiplied) {
    const A factor = static_cast<A>(factors[0]);
    for (std::size_t i = 0; i < count; ++i) sum[i] = sum[i] * factor;
  }
  for (int r = 1; r < ranks; ++r) {
    load<avx2>(next.data(), typed<T>(sources[r] + at), count);
    if constexpr (kind == Kind::premultiplied) {
      const A factor = static_cast<A>(factors[r]);
      for (std::size_t i = 0; i < count; ++i) next[i] = next[i] * factor;
    }
    pairwise<A, inner>(sum.data(), sum.data(), next.data(), count);
  }
  if constexpr (kind == Kind::average) {
    const A divisor = static_cast<A>(ranks);
    for (std::size_t i = 0; i < count; ++i) sum[i] = sum[i] / divisor;
  }
  store<avx2>(typed<T>(out), sum.data(), count);
}

template <bool avx2, class T, Kind kind>
TESSERA_SHM_INLINE void block_body(std::byte* out, const std::byte* const* sources, std::size_t at,
                                   int ranks, std::size_t count, const double* factors) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Bfloat16>)
    staged_block<avx2, T, float, kind>(out, sources, at, ranks, count, factors);
  else if constexpr (kind == Kind::average || kind == Kind::premultiplied)
    staged_block<avx2, T, T, kind>(out, sources, at, ranks, count, factors);
  else
    plain_block<T, kind>(out, sources, at, ranks, count);
}

template <class T, Kind kind>
void block_baseline(std::byte* out, const std::byte* const* sources, std::size_t at, int ranks,
                    std::size_t count, const double* factors) {
  block_body<false, T, kind>(out, sources, at, ranks, count, factors);
}

#if defined(__x86_64__)
template <class T, Kind kind>
TESSERA_SHM_AVX2 void block_avx2(std::byte* out, const std::byte* const* sources, std::size_t at,
                                 int ranks, std::size_t count, const double* factors) {
  block_body<true, T, kind>(out, sources, at, ranks, count, factors);
}
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}
#else
bool has_avx2() { return false; }
#endif

template <class T, Kind kind>
Reducer::Block pick([[maybe_unused]] bool vectors) {
#if defined(__x86_64__)
  if (vectors && has_avx2()) return block_avx2<T, kind>;
#endif
  return block_baseline<T, kind>;
}

/// The block of `kind`, which is one of `kinds`.
template <class T, Kind... kinds>
Reducer::Block pick_one(Kind kind, bool vectors) {
  Reducer::Block found = nullptr;
  ((kind == kinds ? void(found = pick<T, kinds>(vectors)) : void()), ...);
  return found;
}

Reducer::Block pick_boolean(Kind kind, bool vectors) {
  const bool any = kind == Kind::sum || kind == Kind::max, all = !any && kind < Kind::bit_and;
  return pick_one<Boolean, Kind::bit_and, Kind::bit_or, Kind::bit_xor>(any   ? Kind::bit_or
                                                                       : all ? Kind::bit_and
                                                                             : kind,
                                                                       vectors);
}

template <class T>
Reducer::Block pick_integer(Kind kind, bool vectors) {
  if (kind == Kind::min || kind == Kind::max)
    return pick_one<T, Kind::min, Kind::max>(kind, vectors);
  // Sums and products wrap around, which signed numbers may not.
  return pick_one<std::make_unsigned_t<T>, Kind::sum, Kind::product, Kind::bit_and, Kind::bit_or,
                  Kind::bit_xor>(kind, vectors);
}

template <class T>
Reducer::Block pick_floating(Kind kind, bool vectors) {
  return pick_one<T, Kind::sum, Kind::product, Kind::min, Kind::max, Kind::average,
                  Kind::premultiplied>(kind, vectors);
}

template <class T>
Reducer::Block pick_complex(Kind kind, bool vectors) {
  return kind == Kind::product ? pick<Complex<T>, Kind::product>(vectors)
                               : pick_floating<T>(kind, vectors);
}

/// In the order of Element.
constexpr Reducer::Block (*kPicks[])(Kind kind, bool vectors) = {pick_boolean,
                                                                 pick_integer<std::int8_t>,
                                                                 pick_integer<std::uint8_t>,
                                                                 pick_integer<std::int16_t>,
                                                                 pick_integer<std::uint16_t>,
                                                                 pick_integer<std::int32_t>,
                                                                 pick_integer<std::uint32_t>,
                                                                 pick_integer<std::int64_t>,
                                                                 pick_integer<std::uint64_t>,
                                                                 pick_floating<Half>,
                                                                 pick_floating<Bfloat16>,
                                                                 pick_floating<float>,
                                                                 pick_floating<double>,
                                                                 pick_complex<float>,
                                                                 pick_complex<double>};

}  // namespace

Reducer::Reducer(Element element, Kind kind, bool vectors)
    : element_(element),
      factored_(kind == Kind::premultiplied),
      element_bytes_(size_of(element)),
      item_bytes_(element_bytes_) {
  if (!reduces(element, kind))
    throw InvalidArgument("shm: ", to_string(kind), " of ", to_string(element),
                          " has no meaning: complex numbers have no order, ",
                          "average and premultiplied are for floating-point and complex "
                          "numbers, and, or, xor for integers and bool");
  block_ = kPicks[static_cast<std::size_t>(element)](kind, vectors);
  if (element >= Element::complex64 && kind != Kind::product) item_bytes_ /= 2;
}

const char* Reducer::unit() { return has_avx2() ? "avx2" : "baseline"; }

void Reducer::operator()(std::byte* out, std::byte* copy, const std::byte* const* sources,
                         int ranks, std::size_t count, const double* factors,
                         bool past_cache) const {
  const std::size_t bytes = count * element_bytes_;
  if (ranks == 1 && !factored_) {
    if (bytes != 0 && out != sources[0]) std::memmove(out, sources[0], bytes);
    if (bytes != 0 && copy != nullptr && copy != sources[0]) std::memcpy(copy, sources[0], bytes);
    return;
  }
  for (std::size_t done = 0; done < bytes; done += kBlockBytes) {
    const std::size_t part = std::min(kBlockBytes, bytes - done);
    block_(out + done, sources, done, ranks, part / item_bytes_, factors);
    if (copy == nullptr) continue;
    if (past_cache)
      detail::stream_bytes(copy + done, out + done, part);
    else
      std::memcpy(copy + done, out + done, part);
  }
}

}  // namespace tessera::shm
