// The protocol of tessera/shm/detail/core.h as small state machines, of which all interleavings are
// tried. What is modelled: numbered steps with slots and lines that are written again, of which
// there are more lines than slots, and slots that two ranks exchange; steps that are published
// before the ones before them have been read; marks and `done`; going to sleep, looking once more,
// being rung by the first rank that takes the announcement back. Stores wait in each rank's buffer,
// first in first out, until they reach memory at any later time (the order of x86); an exchange
// empties the buffer first. Sleeps have no limit here, so a lost wake-up is a state in which no
// rank can continue.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

namespace tessera::shm::testing {
namespace {

constexpr int kMost = 3, kMostSlots = 2, kMostLines = 4;

/// What is wrong on purpose.
enum class Fault {
  none,
  /// Marks and `done` are plain stores: they may still be in the buffer when sleepers are looked
  /// for.
  no_fence,
  /// No second look between saying "I sleep" and sleeping.
  no_second_look,
  /// The number of rings is read after the second look: one in between is missed.
  rings_read_late,
  /// A slot is written one step too soon.
  slot_too_soon,
  /// The mark is set before the data are there.
  mark_before_data,
  /// `done` rings no rank.
  done_is_silent,
  /// A line is written one step too soon.
  line_too_soon,
  /// The announcement is taken back after the ring: it may be that of the next sleep.
  claimed_late,
  /// A slot is written though its writer has not read what the other rank wrote there.
  own_reading_ignored,
};

enum Place : std::uint8_t {
  kCheckWritable,
  kWrite,
  kMark,
  kCheckReady,
  kRead,
  kDone,
  // After a write that others may wait for: then on to `after`.
  kAnySleepers,
  kLook,
  kClaim,
  kRing,
  kWake,
  // Falling asleep: then back to `after`.
  kReadRings,
  kSayForWhom,
  kCountSleeper,
  kSecondLook,
  kSleep,
  kAsleep,
  kWakeUp,
  kUnsay,
  kEnd,
};

struct Store {
  std::uint8_t where, value;
};

/// One byte a word; small enough to be kept millions of times.
struct State {
  struct Rank {
    std::uint8_t place, after, step, next, other, needed, rings_seen, full, stores;
    Store buffer[3];
  } rank[kMost];
  // Shared memory: data by rank and slot, data and marks by rank and line, done, rings, waits_for
  // by rank, sleepers.
  std::uint8_t memory[kMost * (kMostSlots + 2 * kMostLines) + kMost * 3 + 1];
};

/// Who publishes: all, and all read all; or rank 0, and the others read.
enum class Call { everyone, first };
/// What a rank does where it cannot go on: sleep, or just look again and again.
enum class Wait { sleep, spin };
/// Where the data of a step are: in a slot, in its line, or that of every third in a slot.
enum class Data { in_slots, in_lines, mixed };
/// Marks and `done` are exchanges; or plain stores, and who falls asleep empties all buffers.
enum class Order { exchange, remote_barrier };

class Model {
 public:
  /// `lines` >= `slots`. `ahead`: number of steps that are published before the first is read.
  Model(Call call, Wait wait, int ranks, int slots, int lines, int steps, Fault fault,
        Order order = Order::exchange, Data data = Data::in_slots, int ahead = 1)
      : call_(call),
        wait_(wait),
        ranks_(ranks),
        slots_(slots),
        lines_(lines),
        steps_(steps),
        ahead_(ahead),
        data_(data),
        fault_(fault),
        order_(order) {}

  /// What goes wrong in some order of events, or nothing; `states`: how many there are.
  std::string explore() {
    State first;
    std::memset(&first, 0, sizeof first);
    visit(first);
    while (!open_.empty() && wrong_.empty()) {
      const State state = open_.back();
      open_.pop_back();
      bool moved = false, ended = true;
      for (int r = 0; r < ranks_; ++r) {
        ended = ended && state.rank[r].place == kEnd;
        if (state.rank[r].stores > 0) {
          State next = state;
          flush_one(next, r);
          visit(next);
          moved = true;
        }
        State next = state;
        if (act(next, r)) {
          visit(next);
          moved = true;
        }
      }
      if (!moved && !ended) wrong_ = "no rank can continue";
    }
    return wrong_;
  }
  std::size_t states() const { return seen_.size(); }

 private:
  struct Hash {
    std::size_t operator()(const State& s) const {
      std::uint64_t words[(sizeof(State) + 7) / 8] = {};
      std::memcpy(words, &s, sizeof s);
      std::uint64_t h = 0;
      for (const std::uint64_t w : words) {
        h = (h ^ w) * 0x9e3779b97f4a7c15ULL;
        h ^= h >> 32;
      }
      return h;
    }
  };
  struct Equal {
    bool operator()(const State& a, const State& b) const {
      return std::memcmp(&a, &b, sizeof a) == 0;
    }
  };

  void visit(const State& state) {
    if (seen_.insert(state).second) open_.push_back(state);
  }

  bool in_line(int step) const {
    return data_ == Data::in_lines || (data_ == Data::mixed && step % 3 != 2);
  }
  int data(int r, int step) const {
    if (in_line(step)) return kMost * kMostSlots + r * kMostLines + step % lines_;
    // Of two ranks, each writes next where it has read.
    const int number = step / steps_per_slot(), owner = ranks_ == 2 ? (r + number / slots_) % 2 : r;
    return owner * kMostSlots + number % slots_;
  }
  int steps_per_slot() const { return data_ == Data::mixed ? 3 : 1; }
  int mark(int r, int step) const {
    return kMost * (kMostSlots + kMostLines) + r * kMostLines + step % lines_;
  }
  static constexpr int kWords = kMost * (kMostSlots + 2 * kMostLines);
  int done(int r) const { return kWords + r; }
  int rings(int r) const { return kWords + kMost + r; }
  int waits_for(int r) const { return kWords + 2 * kMost + r; }
  static constexpr int kSleepers = kWords + 3 * kMost;

  /// A rank sees its own stores before they are in memory.
  std::uint8_t load(const State& s, int r, int where) const {
    const auto& rank = s.rank[r];
    for (int i = rank.stores - 1; i >= 0; --i)
      if (rank.buffer[i].where == where) return rank.buffer[i].value;
    return s.memory[where];
  }
  void flush_one(State& s, int r) const {
    auto& rank = s.rank[r];
    s.memory[rank.buffer[0].where] = rank.buffer[0].value;
    for (int i = 1; i < rank.stores; ++i) rank.buffer[i - 1] = rank.buffer[i];
    --rank.stores;
    rank.buffer[rank.stores] = {0, 0};
  }
  bool store(State& s, int r, int where, int value) const {
    auto& rank = s.rank[r];
    if (rank.stores == 3) return false;
    rank.buffer[rank.stores++] = {static_cast<std::uint8_t>(where),
                                  static_cast<std::uint8_t>(value)};
    return true;
  }
  /// Only when the buffer is empty: before that, the next event is a flush.
  bool exchange(State& s, int r, int where, int value) const {
    if (s.rank[r].stores > 0) return false;
    s.memory[where] = static_cast<std::uint8_t>(value);
    return true;
  }

  bool set(State& s, int r, int where, int value) const {
    return fault_ == Fault::no_fence || order_ == Order::remote_barrier
               ? store(s, r, where, value)
               : exchange(s, r, where, value);
  }
  bool publishes(int r) const { return call_ == Call::everyone || r == 0; }

  /// The first rank that this one cannot go on without, or -1.
  int lacking(const State& s, int r) const {
    const auto& rank = s.rank[r];
    if (rank.after == kCheckWritable) {
      const int step = rank.next;
      // Lines that are all full are waited for until half of them are free.
      const int lines =
          rank.full != 0 ? (lines_ + 1) / 2 : lines_ + (fault_ == Fault::line_too_soon ? 1 : 0);
      // How far away the step is that had the slot before.
      const int slots = (slots_ + (fault_ == Fault::slot_too_soon ? 1 : 0)) * steps_per_slot();
      for (int o = 0; o < ranks_; ++o) {
        if (o == r && fault_ == Fault::own_reading_ignored) continue;
        if (load(s, r, done(o)) + lines <= step) return o;
        if (!in_line(step) && load(s, r, done(o)) + slots <= step) return o;
      }
      return -1;
    }
    const int step = rank.step;
    for (int o = rank.other; o < ranks_; ++o)
      if (o != r && publishes(o)) return load(s, r, mark(o, step)) == step + 1 ? -1 : o;
    return -1;
  }

  bool act(State& s, int r) {
    auto& rank = s.rank[r];
    const int step = rank.step;
    switch (rank.place) {
      case kCheckWritable:
      case kCheckReady: {
        rank.after = rank.place;
        const bool writes = rank.place == kCheckWritable;
        if (writes && (!publishes(r) || rank.next == std::min(steps_, step + ahead_))) {
          rank.place = kCheckReady;
          return true;
        }
        if (!writes) {
          while (rank.other < ranks_ && (rank.other == r || !publishes(rank.other))) ++rank.other;
          if (rank.other == ranks_ || (call_ == Call::first && r == 0)) {
            rank.place = kDone;
            return true;
          }
        }
        const int lack = lacking(s, r);
        if (lack >= 0 && writes && load(s, r, done(lack)) + lines_ <= rank.next && rank.full == 0) {
          rank.full = 1;
          return true;
        }
        // What is only ahead can wait until a step has been read.
        if (lack >= 0 && writes && rank.next > step) {
          rank.place = kCheckReady;
          return true;
        }
        if (lack >= 0 && wait_ == Wait::spin) return false;
        if (lack < 0) rank.full = 0;
        rank.needed = static_cast<std::uint8_t>(lack + 1);
        rank.place = lack >= 0                           ? kReadRings
                     : !writes                           ? kRead
                     : fault_ == Fault::mark_before_data ? kMark
                                                         : kWrite;
        return true;
      }
      case kWrite:
        if (!store(s, r, data(r, rank.next), rank.next + 1)) return false;
        if (fault_ == Fault::mark_before_data) {
          ++rank.next;
          rank.place = kCheckReady;
          rank.other = 0;
        } else {
          rank.place = kMark;
        }
        return true;
      case kMark:
        if (!set(s, r, mark(r, rank.next), rank.next + 1)) return false;
        rank.after = fault_ == Fault::mark_before_data ? kWrite : kCheckWritable;
        if (rank.after == kCheckWritable) ++rank.next;
        rank.place = wait_ == Wait::spin ? rank.after : std::uint8_t{kAnySleepers};
        rank.other = 0;
        return true;
      case kRead:
        if (load(s, r, data(rank.other, step)) != rank.step + 1)
          wrong_ = "a slot holds another step's data";
        ++rank.other;
        rank.place = kCheckReady;
        return true;
      case kDone:
        if (!set(s, r, done(r), rank.step + 1)) return false;
        ++rank.step;
        rank.other = 0;
        rank.after = rank.step == steps_ ? kEnd : kCheckWritable;
        if (fault_ == Fault::done_is_silent || wait_ == Wait::spin)
          rank.place = rank.after;
        else
          rank.place = kAnySleepers;
        return true;

      case kAnySleepers:
        rank.place = load(s, r, kSleepers) == 0 ? rank.after : std::uint8_t{kLook};
        rank.other = 0;
        return true;
      case kLook:
        if (rank.other == ranks_) {
          rank.other = 0;
          rank.place = rank.after;
        } else if (rank.other != r && load(s, r, waits_for(rank.other)) == r + 1) {
          rank.place = fault_ == Fault::claimed_late ? kRing : kClaim;
        } else {
          ++rank.other;
        }
        return true;
      case kClaim: {
        const int word = waits_for(rank.other);
        const bool mine = s.memory[word] == r + 1;
        if (!exchange(s, r, word, mine ? 0 : s.memory[word])) return false;
        rank.place = mine && fault_ != Fault::claimed_late ? kRing : kLook;
        if (rank.place == kLook) ++rank.other;
        return true;
      }
      case kRing:
        if (!exchange(s, r, rings(rank.other), s.memory[rings(rank.other)] + 1)) return false;
        rank.place = kWake;
        return true;
      case kWake:
        if (s.rank[rank.other].place == kAsleep) s.rank[rank.other].place = kWakeUp;
        if (fault_ == Fault::claimed_late) {
          rank.place = kClaim;
        } else {
          ++rank.other;
          rank.place = kLook;
        }
        return true;

      case kReadRings:
        rank.rings_seen = load(s, r, rings(r));
        rank.place = kSayForWhom;
        return true;
      case kSayForWhom:
        if (!exchange(s, r, waits_for(r), rank.needed)) return false;
        rank.place = kCountSleeper;
        return true;
      case kCountSleeper:
        if (!exchange(s, r, kSleepers, s.memory[kSleepers] + 1)) return false;
        if (order_ == Order::remote_barrier)
          for (int o = 0; o < ranks_; ++o)
            while (s.rank[o].stores > 0) flush_one(s, o);
        rank.place = fault_ == Fault::no_second_look ? kSleep : kSecondLook;
        return true;
      case kSecondLook:
        rank.place = lacking(s, r) + 1 == rank.needed ? kSleep : kWakeUp;
        return true;
      case kSleep:  // The kernel compares and falls asleep in one.
        if (fault_ == Fault::rings_read_late) rank.rings_seen = s.memory[rings(r)];
        rank.place = s.memory[rings(r)] == rank.rings_seen ? kAsleep : kWakeUp;
        return true;
      case kAsleep:
        return false;
      case kWakeUp:
        if (!exchange(s, r, waits_for(r), 0)) return false;
        rank.place = kUnsay;
        return true;
      case kUnsay:
        if (!exchange(s, r, kSleepers, s.memory[kSleepers] - 1)) return false;
        rank.place = rank.after;
        rank.needed = rank.rings_seen = 0;
        return true;
      default:
        return false;
    }
  }

  const Call call_;
  const Wait wait_;
  const int ranks_, slots_, lines_, steps_, ahead_;
  const Data data_;
  const Fault fault_;
  const Order order_;
  std::unordered_set<State, Hash, Equal> seen_;
  std::vector<State> open_;
  std::string wrong_;
};

std::string explore_lines(Call call, Wait wait, int ranks, int slots, int lines, int steps,
                          Fault fault = Fault::none, Order order = Order::exchange,
                          Data data = Data::mixed, int ahead = 1) {
  Model model(call, wait, ranks, slots, lines, steps, fault, order, data, ahead);
  const std::string wrong = model.explore();
  std::printf("%d ranks, %d slots, %d lines, %d steps, %d ahead, %s, %s: %zu states%s%s\n", ranks,
              slots, lines, steps, ahead, call == Call::everyone ? "all publish" : "one publishes",
              wait == Wait::sleep ? "sleeping" : "spinning", model.states(),
              wrong.empty() ? "" : ": ", wrong.c_str());
  return wrong;
}

/// As many lines as slots, and all data in slots.
std::string explore(Call call, Wait wait, int ranks, int slots, int steps,
                    Fault fault = Fault::none, Order order = Order::exchange) {
  return explore_lines(call, wait, ranks, slots, slots, steps, fault, order, Data::in_slots);
}

TEST(Model, TwoRanks) {
  for (const Call call : {Call::everyone, Call::first})
    for (const Wait wait : {Wait::sleep, Wait::spin})
      for (const int slots : {1, 2}) EXPECT_EQ(explore(call, wait, 2, slots, slots + 2), "");
}

TEST(Model, ThreeRanks) {
  for (const int slots : {1, 2})
    EXPECT_EQ(explore(Call::everyone, Wait::spin, 3, slots, slots + 2), "");
  EXPECT_EQ(explore(Call::first, Wait::sleep, 3, 1, 2), "");
  EXPECT_EQ(explore(Call::everyone, Wait::sleep, 3, 1, 1), "");
}

TEST(Model, BarriersMadeByTheSleeper) {
  for (const Call call : {Call::everyone, Call::first})
    for (const int slots : {1, 2})
      EXPECT_EQ(explore(call, Wait::sleep, 2, slots, slots + 1, Fault::none, Order::remote_barrier),
                "");
  EXPECT_EQ(explore(Call::first, Wait::sleep, 3, 1, 1, Fault::none, Order::remote_barrier), "");
}

TEST(Model, MoreLinesThanSlots) {
  for (const Call call : {Call::everyone, Call::first}) {
    for (const Data data : {Data::in_slots, Data::in_lines, Data::mixed}) {
      EXPECT_EQ(explore_lines(call, Wait::spin, 2, 2, 4, 8, Fault::none, Order::exchange, data),
                "");
      EXPECT_EQ(explore_lines(call, Wait::sleep, 2, 1, 2, 4, Fault::none, Order::exchange, data),
                "");
    }
    EXPECT_EQ(explore_lines(call, Wait::sleep, 2, 1, 2, 4, Fault::none, Order::remote_barrier), "");
  }
  for (const Call call : {Call::everyone, Call::first})
    EXPECT_EQ(explore_lines(call, Wait::spin, 3, 1, 3, 6), "");
}

TEST(Model, StepsPublishedAhead) {
  for (const Call call : {Call::everyone, Call::first})
    for (const Data data : {Data::in_slots, Data::mixed}) {
      EXPECT_EQ(explore_lines(call, Wait::spin, 2, 2, 4, 8, Fault::none, Order::exchange, data, 2),
                "");
      for (const Order order : {Order::exchange, Order::remote_barrier})
        EXPECT_EQ(explore_lines(call, Wait::sleep, 2, 1, 2, 4, Fault::none, order, data, 2), "");
      EXPECT_EQ(explore_lines(call, Wait::spin, 3, 1, 2, 4, Fault::none, Order::exchange, data, 2),
                "");
    }
}

TEST(Model, FindsWhatIsWrong) {
  EXPECT_EQ(explore(Call::first, Wait::sleep, 2, 1, 3, Fault::no_fence), "no rank can continue");
  EXPECT_EQ(explore(Call::everyone, Wait::sleep, 2, 1, 2, Fault::no_second_look),
            "no rank can continue");
  EXPECT_EQ(explore(Call::first, Wait::sleep, 2, 1, 2, Fault::rings_read_late),
            "no rank can continue");
  EXPECT_EQ(explore(Call::first, Wait::sleep, 2, 1, 3, Fault::done_is_silent),
            "no rank can continue");
  EXPECT_EQ(explore(Call::first, Wait::sleep, 2, 1, 3, Fault::claimed_late),
            "no rank can continue");
  EXPECT_NE(explore_lines(Call::first, Wait::spin, 3, 1, 2, 5, Fault::line_too_soon,
                          Order::exchange, Data::in_lines),
            "");
  EXPECT_NE(explore_lines(Call::everyone, Wait::spin, 2, 1, 2, 4, Fault::own_reading_ignored,
                          Order::exchange, Data::in_slots, 2),
            "");
  // Here a mark may be gone before it was seen, or the data before they were read.
  for (const int ahead : {1, 2})
    EXPECT_NE(explore_lines(Call::everyone, Wait::spin, 3, 1, 4, 3, Fault::slot_too_soon,
                            Order::exchange, Data::in_slots, ahead),
              "");
  EXPECT_NE(explore_lines(Call::everyone, Wait::spin, 3, 1, 4, 9, Fault::slot_too_soon,
                          Order::exchange, Data::mixed, 2),
            "");
  EXPECT_EQ(explore(Call::everyone, Wait::spin, 2, 1, 1, Fault::mark_before_data),
            "a slot holds another step's data");
}

}  // namespace
}  // namespace tessera::shm::testing
