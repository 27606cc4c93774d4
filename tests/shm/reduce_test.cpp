// Reductions: every element type and kind against plain loops, with and without the vector unit,
// and their bits on all ranks.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <random>

#include "ranks.h"
#include "tessera/base/text.h"
#include "tessera/shm/detail/reduce.h"

namespace tessera::shm::testing {
namespace {

using Kind = Reduction::Kind;
constexpr Kind kKinds[] = {Kind::sum,     Kind::product, Kind::min,
                           Kind::max,     Kind::average, Kind::premultiplied,
                           Kind::bit_and, Kind::bit_or,  Kind::bit_xor};
constexpr Element kElements[] = {
    Element::boolean,  Element::int8,    Element::uint8,   Element::int16,     Element::uint16,
    Element::int32,    Element::uint32,  Element::int64,   Element::uint64,    Element::half,
    Element::bfloat16, Element::float32, Element::float64, Element::complex64, Element::complex128};

// The two short formats by their definitions, in double: sign, exponent of `bits` bits, fraction.
double value_of(std::uint16_t word, int fraction_bits) {
  const int exponent_bits = 15 - fraction_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = (word & 0x8000) != 0 ? -1 : 1;
  const int exponent = (word >> fraction_bits) & ((1 << exponent_bits) - 1);
  const int fraction = word & ((1 << fraction_bits) - 1);
  if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(1 + std::ldexp(fraction, -fraction_bits), exponent - bias);
}

/// The nearest short number, ties to the even one, found by looking at the neighbours.
std::uint16_t nearest(double value, int fraction_bits) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  const std::uint16_t infinity =
      static_cast<std::uint16_t>(((1 << (15 - fraction_bits)) - 1) << fraction_bits);
  std::uint16_t low = 0, high = infinity;
  while (high - low > 1) {
    const auto middle = static_cast<std::uint16_t>((low + high) / 2);
    (value_of(middle, fraction_bits) <= magnitude ? low : high) = middle;
  }
  // Beyond the largest number, infinity stands where the next one would be.
  const double below = value_of(low, fraction_bits);
  const double above =
      high == infinity ? 2 * below - value_of(static_cast<std::uint16_t>(low - 1), fraction_bits)
                       : value_of(high, fraction_bits);
  const bool up = magnitude - below > above - magnitude ||
                  (magnitude - below == above - magnitude && (low & 1) != 0);
  return static_cast<std::uint16_t>(sign | (std::isinf(magnitude) || up ? high : low));
}

template <class T>
T meet(T a, T b, Kind kind) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    switch (kind) {
      case Kind::sum:
        return static_cast<T>(
            static_cast<U>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b)));
      case Kind::product:
        return static_cast<T>(
            static_cast<U>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b)));
      case Kind::bit_and:
        return static_cast<T>(a & b);
      case Kind::bit_or:
        return static_cast<T>(a | b);
      case Kind::bit_xor:
        return static_cast<T>(a ^ b);
      default:
        return kind == Kind::min ? std::min(a, b) : std::max(a, b);
    }
  } else if constexpr (std::is_floating_point_v<T>) {
    if (kind == Kind::min || kind == Kind::max) {
      if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
      return kind == Kind::min ? (b < a ? b : a) : (b > a ? b : a);
    }
    return kind == Kind::product ? a * b : a + b;
  } else {
    return kind == Kind::product ? T(a.real() * b.real() - a.imag() * b.imag(),
                                     a.real() * b.imag() + a.imag() * b.real())
                                 : a + b;
  }
}

template <class T>
T fold(const std::vector<T>& values, Kind kind, const std::vector<double>& factors) {
  const auto scaled = [&](std::size_t r) {
    if constexpr (!std::is_integral_v<T>)
      if (kind == Kind::premultiplied) {
        if constexpr (std::is_floating_point_v<T>)
          return values[r] * static_cast<T>(factors[r]);
        else
          return values[r] * static_cast<typename T::value_type>(factors[r]);
      }
    return values[r];
  };
  T sum = scaled(0);
  for (std::size_t r = 1; r < values.size(); ++r) sum = meet(sum, scaled(r), kind);
  if constexpr (!std::is_integral_v<T>)
    if (kind == Kind::average) {
      if constexpr (std::is_floating_point_v<T>)
        sum = sum / static_cast<T>(values.size());
      else
        sum = sum / static_cast<typename T::value_type>(values.size());
    }
  return sum;
}

bool same_value(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}
bool same_value(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}
template <class T>
bool same_value(std::complex<T> a, std::complex<T> b) {
  return same_value(a.real(), b.real()) && same_value(a.imag(), b.imag());
}
template <class T>
  requires std::is_integral_v<T>
bool same_value(T a, T b) {
  return a == b;
}

using Bytes = std::vector<std::byte>;

/// Whether element `i` of `result` is right, worked out from the sources.
bool right(Element element, Kind kind, const std::vector<Bytes>& sources,
           const std::vector<double>& factors, const Bytes& result, std::size_t i) {
  const auto check = [&]<class T>(T) {
    std::vector<T> values;
    for (const auto& source : sources) {
      T value;
      std::memcpy(&value, source.data() + i * sizeof(T), sizeof(T));
      values.push_back(value);
    }
    T got;
    std::memcpy(&got, result.data() + i * sizeof(T), sizeof(T));
    return same_value(got, fold(values, kind, factors));
  };
  const auto check_short = [&](int fraction_bits) {
    std::vector<float> values;
    for (const auto& source : sources) {
      std::uint16_t word;
      std::memcpy(&word, source.data() + i * 2, 2);
      values.push_back(static_cast<float>(value_of(word, fraction_bits)));
    }
    std::uint16_t got;
    std::memcpy(&got, result.data() + i * 2, 2);
    const float expected = fold(values, kind, factors);
    if (std::isnan(expected)) return std::isnan(value_of(got, fraction_bits));
    return got == nearest(expected, fraction_bits);
  };
  switch (element) {
    case Element::boolean: {
      bool all = true, any = false, odd = false;
      for (const auto& source : sources) {
        const bool value = source[i] != std::byte{0};
        all = all && value;
        any = any || value;
        odd = odd != value;
      }
      const bool expected = kind == Kind::bit_xor ? odd
                            : kind == Kind::product || kind == Kind::min || kind == Kind::bit_and
                                ? all
                                : any;
      return sources.size() == 1 ? result[i] == sources[0][i]
                                 : result[i] == static_cast<std::byte>(expected);
    }
    case Element::int8:
      return check(std::int8_t{});
    case Element::uint8:
      return check(std::uint8_t{});
    case Element::int16:
      return check(std::int16_t{});
    case Element::uint16:
      return check(std::uint16_t{});
    case Element::int32:
      return check(std::int32_t{});
    case Element::uint32:
      return check(std::uint32_t{});
    case Element::int64:
      return check(std::int64_t{});
    case Element::uint64:
      return check(std::uint64_t{});
    case Element::half:
      return check_short(10);
    case Element::bfloat16:
      return check_short(7);
    case Element::float32:
      return check(float{});
    case Element::float64:
      return check(double{});
    case Element::complex64:
      return check(std::complex<float>{});
    default:
      return check(std::complex<double>{});
  }
}

TEST(Reduce, EveryTypeAndKind) {
  std::mt19937_64 draw(7);
  for (const Element element : kElements) {
    for (const Kind kind : kKinds) {
      if (!reduces(element, kind)) {
        EXPECT_THROW(Reducer(element, kind), InvalidArgument);
        continue;
      }
      for (const bool vectors : {true, false}) {
        const Reducer reducer(element, kind, vectors);
        for (const int ranks : {1, 2, 3, 5}) {
          const std::size_t count = draw() % 3 == 0 ? draw() % 9 : 200 + draw() % 700;
          // Any bits: all kinds of NaN, infinities, numbers below the normal ones.
          std::vector<Bytes> sources(static_cast<std::size_t>(ranks),
                                     Bytes(count * size_of(element)));
          std::vector<const std::byte*> addresses;
          std::vector<double> factors;
          for (auto& source : sources) {
            for (auto& byte : source) byte = static_cast<std::byte>(draw() >> 13);
            addresses.push_back(source.data());
            factors.push_back(static_cast<double>(draw() % 17) / 4 - 2);
          }
          Bytes out(count * size_of(element)), copy(out.size());
          reducer(out.data(), copy.data(), addresses.data(), ranks, count, factors.data());
          EXPECT_EQ(out, copy);
          for (std::size_t i = 0; i < count; ++i)
            ASSERT_TRUE(right(element, kind, sources, factors, out, i))
                << to_string(kind) << " of " << to_string(element) << ", " << ranks
                << " ranks, element " << i << " of " << count << (vectors ? ", vectors" : "");
          // Into one of the sources.
          const auto into = static_cast<std::size_t>(draw() % static_cast<std::uint64_t>(ranks));
          reducer(sources[into].data(), nullptr, addresses.data(), ranks, count, factors.data());
          EXPECT_EQ(sources[into], out)
              << to_string(kind) << " of " << to_string(element) << " into source " << into;
        }
      }
    }
  }
}

TEST(Reduce, EveryShortNumber) {
  // All halves and bfloat16s, added to some others: widening and rounding at every point.
  std::mt19937 draw(3);
  for (const Element element : {Element::half, Element::bfloat16}) {
    std::vector<std::uint16_t> all(65536), other(65536);
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] = static_cast<std::uint16_t>(i);
      other[i] = static_cast<std::uint16_t>(draw() % 2 == 0 ? draw() : i ^ (draw() % 64));
    }
    std::vector<Bytes> sources(2, Bytes(131072));
    std::memcpy(sources[0].data(), all.data(), 131072);
    std::memcpy(sources[1].data(), other.data(), 131072);
    const std::byte* addresses[] = {sources[0].data(), sources[1].data()};
    for (const bool vectors : {true, false}) {
      Bytes out(131072);
      Reducer(element, Kind::sum, vectors)(out.data(), nullptr, addresses, 2, 65536, nullptr);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < 65536; ++i)
        wrong += right(element, Kind::sum, sources, {}, out, i) ? 0 : 1;
      EXPECT_EQ(wrong, 0U) << to_string(element) << (vectors ? ", vectors" : "");
    }
  }
}

/// Sums of drawn floats, whose order shows: in rank order, and the same bits everywhere.
std::string bits(Group& group, Arena* shared) {
  const bool in_arena = shared != nullptr;
  const int ranks = group.size(), me = group.rank();
  for (const std::size_t count : {1U, 13U, 14U, 1000U, 4096U, 5000U, 50001U, 300007U}) {
    std::vector<std::vector<float>> values;
    for (int r = 0; r < ranks; ++r) {
      std::mt19937 draw(static_cast<unsigned>(r) + 17);
      std::vector<float> v(count);
      for (auto& x : v) x = std::ldexp(static_cast<float>(draw()), static_cast<int>(draw() % 20));
      values.push_back(v);
    }
    std::vector<float> expected = values[0];
    for (int r = 1; r < ranks; ++r)
      for (std::size_t i = 0; i < count; ++i) expected[i] += values[static_cast<std::size_t>(r)][i];
    std::vector<float> heap = values[static_cast<std::size_t>(me)];
    std::byte* arena = in_arena ? shared->allocate(count * 4 + 256) : nullptr;
    // Another place in each rank's arena.
    float* data = in_arena ? reinterpret_cast<float*>(arena + 64 * me) : heap.data();
    std::memcpy(data, values[static_cast<std::size_t>(me)].data(), count * 4);
    group.all_reduce(data, data, count, Element::float32, {});
    if (std::memcmp(data, expected.data(), count * 4) != 0)
      return concat(count, " floats on ", ranks, " ranks");
    std::memcpy(data, values[static_cast<std::size_t>(me)].data(), count * 4);
    Request started =
        group.started().all_reduce(data, data, count, Element::float32, {Kind::average});
    // One rank's data are elsewhere: all go the other way.
    std::vector<float> plain = values[static_cast<std::size_t>(me)];
    float* mixed = me == 0 ? plain.data() : data;
    started.wait();
    std::memcpy(mixed, values[static_cast<std::size_t>(me)].data(), count * 4);
    group.all_reduce(mixed, mixed, count, Element::float32, {});
    if (std::memcmp(mixed, expected.data(), count * 4) != 0)
      return concat(count, " mixed floats on ", ranks, " ranks");
    group.barrier();
    if (in_arena) shared->deallocate(arena);
  }
  return "";
}

TEST(Reduce, SameBitsOnAllRanks) {
  Options options = brief("bits");
  for (const int ranks : {2, 3, 5})
    for (const bool in_arena : {false, true}) {
      options.arena_bytes = in_arena ? 2 << 20 : 0;
      for (const auto& end : fork_ranks(ranks, [&](int rank, const Directory& directory) {
             Group group = Group::meet(rank, ranks, directory, options);
             return bits(group, in_arena ? &group.arena() : nullptr);
           }))
        EXPECT_EQ(end.report, "");
    }
  options.arena_bytes = 2 << 20;
  for (const auto& end :
       thread_ranks(2, options, [](Group& group) { return bits(group, &group.arena()); }))
    EXPECT_EQ(end.report, "");
}

/// Memory shared later: several at once, freed in another order on each rank, data in different
/// ones.
std::string in_shared_memory(Group& group, const Directory& directory) {
  const int me = group.rank(), ranks = group.size();
  std::shared_ptr<Arena> first = group.share(2 << 20, directory);
  if (auto report = bits(group, first.get()); !report.empty()) return report;
  std::shared_ptr<Arena> second = group.share(1 << 20, directory);
  constexpr std::size_t kCount = 50000;
  const auto values = [&](Arena& arena) {
    auto* data = reinterpret_cast<float*>(arena.allocate(kCount * 4));
    std::fill_n(data, kCount, static_cast<float>(me + 1));
    return data;
  };
  float* a = values(*first);
  float* b = values(*second);
  const float sum = static_cast<float>(ranks * (ranks + 1) / 2);
  const auto right = [&](const float* data, float value) {
    return std::all_of(data, data + kCount, [&](float x) { return x == value; });
  };
  // Of each rank another memory: the data go through the slots.
  float* mine = me % 2 == 0 ? a : b;
  group.all_reduce(mine, mine, kCount, Element::float32, {});
  if (!right(mine, sum)) return "two memories at once";
  std::fill_n(mine, kCount, static_cast<float>(me + 1));
  // Blocks that another rank reads: out of the memory where it holds it, else out of the process.
  if (me == 1) {
    first->deallocate(reinterpret_cast<std::byte*>(a));
    first.reset();
  }
  std::vector<float> all(kCount * static_cast<std::size_t>(ranks));
  const float* given = me == 1 ? b : a;
  group.all_gather(given, all.data(), kCount * 4);
  for (int r = 0; r < ranks; ++r)
    if (!right(all.data() + kCount * static_cast<std::size_t>(r), static_cast<float>(r + 1)))
      return "an all-gather";
  // No rank waits for one that has let the first memory go.
  std::vector<float> elsewhere(kCount, static_cast<float>(me + 1));
  float* other = me == 1 ? elsewhere.data() : a;
  group.all_reduce(other, other, kCount, Element::float32, {});
  if (!right(other, sum)) return "after one rank let go";
  group.all_reduce(b, b, kCount, Element::float32, {});
  if (!right(b, sum)) return "in the second memory";
  return "";
}

TEST(Reduce, InMemoryThatIsSharedLater) {
  for (const int ranks : {2, 3})
    for (const bool single_copy : {true, false}) {
      Options options = brief("later");
      options.single_copy = single_copy;
      for (const auto& end : fork_ranks(ranks, [&](int rank, const Directory& directory) {
             Group group = Group::meet(rank, ranks, directory, options);
             return in_shared_memory(group, directory);
           }))
        EXPECT_EQ(end.report, "");
    }
}

TEST(Reduce, SharingFailsOnAllRanksAndTheGroupGoesOn) {
  for (const auto& end : fork_ranks(3, [&](int rank, const Directory& directory) -> std::string {
         Group group = Group::meet(rank, 3, directory, brief("unequal"));
         try {
           group.share(rank == 1 ? 8192 : 4096, directory);
           return "shared";
         } catch (const SetupError& error) {
           if (error.cause() != Cause::disagreement) return error.what();
         }
         const auto memory = group.share(1 << 20, directory);
         constexpr std::size_t kCount = 100000;
         auto* data = reinterpret_cast<float*>(memory->allocate(kCount * 4));
         std::fill_n(data, kCount, 1.0f);
         group.all_reduce(data, data, kCount, Element::float32, {});
         return std::all_of(data, data + kCount, [](float x) { return x == 3; }) ? "" : "wrong";
       }))
    EXPECT_EQ(end.report, "");
}

TEST(Reduce, SharingEndsAtOnceWhereTheDirectoryFails) {
  for (const auto& end : fork_ranks(2, [&](int rank, const Directory& directory) -> std::string {
         Group group = Group::meet(rank, 2, directory, brief("broken", 60000));
         Directory broken = directory;
         if (rank == 1)
           broken.get = [](const std::string&, milliseconds) -> std::string {
             throw Error("the store is gone");
           };
         const Deadline soon = deadline_after(milliseconds(30000));
         try {
           group.share(4096, broken);
           return "shared";
         } catch (const SetupError& error) {
           if (std::string(error.what()).find("the store is gone") == std::string::npos)
             return error.what();
         }
         return time_left(soon).count() > 0 ? "" : "late";
       }))
    EXPECT_EQ(end.report, "");
}

TEST(Reduce, SharingWithARankThatIsGoneEnds) {
  const auto ends = fork_ranks(2, [&](int rank, const Directory& directory) -> std::string {
    Group group = Group::meet(rank, 2, directory, brief("gone"));
    group.barrier();
    if (rank == 1) ::_exit(0);
    try {
      group.share(4096, directory);
      return "shared";
    } catch (const PeerLostError&) {
      return "";
    }
  });
  EXPECT_EQ(ends[0].report, "");
}

}  // namespace
}  // namespace tessera::shm::testing
