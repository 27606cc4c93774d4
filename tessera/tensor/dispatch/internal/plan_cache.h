#pragma once
// Plans that are ready to run, and the key under which they are found: the layouts of the tensors
// and every other argument that decides the result's shape.

#include <c10/core/DefaultDtype.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/tensor/dispatch/internal/dispatch.h"
#include "tessera/tensor/dispatch/internal/layout.h"

namespace tessera::detail {

class CallOrigin;

// What a key contains beside pointers and numbers: small values that no pointer equals.
enum Mark : std::uint64_t {
  kNone = 1,
  kUndefined,
  kWrapped,
  kList,
  kTrue,
  kFalse,
  kInt,
  kDouble,
  kComplex,
  kText,
  kOther,
  // followed by the default dtype
  kDefault
};

// Results of integers and floating-point numbers have the default dtype, which the program may
// change: it is part of their key.
inline bool needs_default_dtype(const Layout& first) {
  return !at::isFloatingType(first.dtype) && !at::isComplexType(first.dtype);
}
inline std::uint64_t default_dtype() {
  return static_cast<std::uint64_t>(c10::get_default_dtype_as_scalartype());
}

using Key = c10::SmallVector<std::uint64_t, 24>;

struct KeyHash {
  std::size_t operator()(const Key& key) const { return of(key.data(), key.size()); }
  static std::size_t of(const std::uint64_t* words, std::size_t n) {
    std::uint64_t h = n;
    for (std::size_t i = 0; i < n; ++i) {
      h = (h ^ words[i]) * 0x9e3779b97f4a7c15ull;
      h ^= h >> 29;
    }
    return h;
  }
};

struct KeyEqual {
  bool operator()(const Key& a, const Key& b) const { return same(a, b.data(), b.size()); }
  static bool same(const Key& a, const std::uint64_t* words, std::size_t n) {
    if (a.size() != n) return false;
    for (std::size_t i = 0; i < n; ++i) {
      if (a[i] != words[i]) return false;
    }
    return true;
  }
};

struct ReadyPlan {
  enum class Mode : unsigned char {
    replicated,  // the operator on the locals, outputs as it makes them
    ruled,
    // run the functional form on the sharded tensors, then give its results to the arguments that
    // are written
    by_functional,
  };
  struct Move {
    int argument, element;
    ShardSpec from, to;
    bool announced = true;  // subject to Policies::redistribution
  };
  struct Output {
    LayoutPtr layout;  // nullptr: not known before the first run
    ShardSpec spec;
    std::optional<Dims> strides;
  };

  Mode mode = Mode::replicated;
  std::vector<LayoutPtr> inputs;  // keeps the pointers in the key alive
  std::vector<Move> moves;
  bool moves_shards = false;
  std::vector<std::pair<int, c10::IValue>> arguments;
  std::optional<Dims> local_sizes;  // the only argument replaced, if it is a list of sizes
  LocalFunction local;
  std::vector<Output> outputs;
  bool view_copied = false;
  // A tensor among the arguments shows a device other than the CPU: its local may lie in host
  // memory (layout.h).
  bool on_device = false;
  bool once = false;  // not kept: the operator was refused within a RefusalScope
  // What the plan's collectives are for; null: it has none.
  std::shared_ptr<const CallOrigin> origin;
};

/// What one pass over the arguments finds.
struct Scan {
  const ShardMeta* first = nullptr;  // nullptr: no sharded tensor
  bool plain = false;                // a plain tensor that must be promoted
  bool replicated = true;            // all sharded tensors are
};

/// Builds the key of a call. `numbers`: floating-point arguments are part of it.
Scan make_key(const OpInfo& info, const c10::IValue* arguments, bool numbers, Key& key);

struct OpPlans {
  std::unordered_map<Key, ReadyPlan, KeyHash, KeyEqual> plans;
  bool numbers = false;
  // RuleOptions::composed; looked up at the first call under autocast
  std::optional<bool> composed = {};
};

/// This thread's plans. Per thread, so that finding one takes no lock; nothing but a cache.
class PlanCache {
 public:
  static PlanCache& of_thread();
  OpPlans& of(const OpInfo& info) {
    if (static_cast<std::size_t>(info.id) >= ops_.size()) ops_.resize(info.id + 64);
    return ops_[info.id];
  }
  /// Must be called before a plan is added, while no plan is in use by this thread (`depth` 1).
  void make_room();
  void added() { ++size_; }
  int depth = 0;  // of run_sharded() on this thread

  /// The plans that unboxed kernels found last, a few for each kernel: entries of `plans`, or
  /// empty.
  struct Recent {
    const Key* key = nullptr;
    ReadyPlan* plan = nullptr;
  };
  static constexpr int kKernels = 32;
  Recent& recent(int kernel, std::size_t hash) {
    return recent_[kernel][hash % recent_[kernel].size()];
  }
  /// Of calls whose plans say `on_device`.
  Recent& recent_on_device(int kernel, std::size_t hash) { return recent(kernel + kKernels, hash); }

 private:
  std::array<std::array<Recent, 8>, 2 * kKernels> recent_;
  std::vector<OpPlans> ops_;
  std::size_t size_ = 0;
};

}  // namespace tessera::detail
