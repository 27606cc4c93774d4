#pragma once
// Sums and other reductions of several ranks' values, in rank order, with the vector unit of this
// CPU. Elements are independent of each other, so vectors of any width give the same bits.

#include <cstddef>

#include "tessera/shm/types.h"

namespace tessera::shm {

/// A reduction, looked up once per call.
class Reducer {
 public:
  /// `vectors`: use the best vector unit of this CPU, otherwise the code that runs on any. Throws
  /// InvalidArgument where reduces(element, kind) is false.
  Reducer(Element element, Reduction::Kind kind, bool vectors = true);

  /// Computes out[i] = the reduction of sources[0][i], ..., sources[ranks - 1][i] for `count`
  /// elements; the same bytes are written to `copy` too unless it is null. `out` and `copy` may be
  /// one of the sources (the same address), and are disjoint from them otherwise. `factors` holds
  /// one number per rank for premultiplied reductions and is ignored by others. `past_cache`: the
  /// copy is written past the cache.
  void operator()(std::byte* out, std::byte* copy, const std::byte* const* sources, int ranks,
                  std::size_t count, const double* factors, bool past_cache = false) const;

  Element element() const { return element_; }
  /// The code that was chosen for this CPU: "avx2" or "baseline".
  static const char* unit();

  /// Reduces `count` items that begin `at` bytes into each source.
  using Block = void (*)(std::byte* out, const std::byte* const* sources, std::size_t at, int ranks,
                         std::size_t count, const double* factors);

 private:
  Element element_;
  Block block_;
  bool factored_;
  /// The block counts items: a complex sum is a sum of twice as many numbers.
  std::size_t element_bytes_, item_bytes_;
};

}  // namespace tessera::shm
