// Calls and messages whose ranks give other sizes, beyond what an MPI library keeps for a message:
// an error on every rank, no byte outside the given memory, and a group that goes on. And the order
// in which the data of started calls moves.

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "mpi_support.h"
#include "tessera/comm/backends/mpi/mpi_tags.h"

namespace tessera::test {

extern std::unique_ptr<MpiWorld> world;

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Memory in front of elements that nobody may write.
class Guarded {
 public:
  /// `tail`: elements behind each tensor, more than any rank may send.
  explicit Guarded(std::int64_t tail) : tail_(tail) {}
  at::Tensor take(std::int64_t n) {
    const auto all = at::full({n + tail_}, kUntouched);
    tails_.push_back(all.narrow(0, n, tail_));
    return all.narrow(0, 0, n);
  }
  bool kept() const {
    for (const auto& tail : tails_)
      if (!tail.eq(kUntouched).all().item<bool>()) return false;
    return true;
  }

 private:
  static constexpr double kUntouched = -77;
  std::int64_t tail_;
  std::vector<at::Tensor> tails_;
};

template <class Options>
Options options(bool blocking) {
  Options o;
  o.asyncOp = !blocking;
  o.timeout = kLimit;
  return o;
}

struct Call {
  const char* name;
  /// Makes the call with `n` elements a rank.
  std::function<WorkPtr(Guarded&, std::int64_t n, bool blocking)> make;
};

/// Every collective whose ranks must give one size.
std::vector<Call> calls_of(const BackendPtr& group) {
  const int ranks = group->getSize(), rank = group->getRank();
  const auto counts = [ranks](std::int64_t n) {
    return std::vector<std::int64_t>(static_cast<std::size_t>(ranks), n);
  };
  // Rank 0 has a row more.
  const auto uneven_counts = [ranks](std::int64_t n) {
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(ranks), n);
    ++sizes[0];
    return sizes;
  };
  const auto mine = [rank](std::int64_t n) { return rank == 0 ? n + 1 : n; };
  std::vector<Call> calls;
  calls.push_back({"all_reduce", [group](Guarded& memory, std::int64_t n, bool blocking) {
                     std::vector<at::Tensor> t{memory.take(n)};
                     return group->allreduce(t, options<c10d::AllreduceOptions>(blocking));
                   }});
  calls.push_back({"several", [group](Guarded& memory, std::int64_t n, bool blocking) {
                     std::vector<at::Tensor> t{memory.take(7), memory.take(n)};
                     return group->allreduce_coalesced(
                         t, options<c10d::AllreduceCoalescedOptions>(blocking));
                   }});
  calls.push_back({"broadcast", [group](Guarded& memory, std::int64_t n, bool blocking) {
                     std::vector<at::Tensor> t{memory.take(n)};
                     return group->broadcast(t, options<c10d::BroadcastOptions>(blocking));
                   }});
  calls.push_back({"reduce", [group](Guarded& memory, std::int64_t n, bool blocking) {
                     std::vector<at::Tensor> t{memory.take(n)};
                     return group->reduce(t, options<c10d::ReduceOptions>(blocking));
                   }});
  calls.push_back({"all_gather", [group, ranks](Guarded& memory, std::int64_t n, bool blocking) {
                     at::Tensor out = memory.take(n * ranks), in = memory.take(n);
                     return group->_allgather_base(out, in,
                                                   options<c10d::AllgatherOptions>(blocking));
                   }});
  calls.push_back(
      {"reduce_scatter", [group, ranks](Guarded& memory, std::int64_t n, bool blocking) {
         at::Tensor out = memory.take(n), in = memory.take(n * ranks);
         return group->_reduce_scatter_base(out, in, options<c10d::ReduceScatterOptions>(blocking));
       }});
  for (const bool even : {true, false}) {
    const auto sizes = [even, counts, uneven_counts](std::int64_t n) {
      return even ? counts(n) : uneven_counts(n);
    };
    const auto own = [even, mine](std::int64_t n) { return even ? n : mine(n); };
    const auto total = [even, ranks](std::int64_t n) { return n * ranks + (even ? 0 : 1); };
    using detail::Transport;
    calls.push_back(
        {"uneven all_gather", [group, sizes, own, total](Guarded& memory, std::int64_t n, bool b) {
           return hand(group, &Transport::all_gather, b, memory.take(total(n)), memory.take(own(n)),
                       sizes(n));
         }});
    calls.push_back({"uneven reduce_scatter",
                     [group, sizes, own, total](Guarded& memory, std::int64_t n, bool b) {
                       return hand(group, &Transport::reduce_scatter, b, memory.take(own(n)),
                                   memory.take(total(n)), sizes(n));
                     }});
    calls.push_back({"uneven gather",
                     [group, sizes, own, total, rank](Guarded& memory, std::int64_t n, bool b) {
                       const auto whole = rank == 0 ? memory.take(total(n)) : at::Tensor();
                       return hand(group, &Transport::gather, b, whole, memory.take(own(n)),
                                   sizes(n), 0);
                     }});
    calls.push_back({"uneven scatter",
                     [group, sizes, own, total, rank](Guarded& memory, std::int64_t n, bool b) {
                       const auto whole = rank == 0 ? memory.take(total(n)) : at::Tensor();
                       return hand(group, &Transport::scatter, b, memory.take(own(n)), whole,
                                   sizes(n), 0);
                     }});
  }
  return calls;
}

double sum_of_ones(const BackendPtr& group, bool blocking) {
  std::vector<at::Tensor> t{at::ones({3})};
  group->allreduce(t, options<c10d::AllreduceOptions>(blocking))->wait();
  return t[0][2].item<double>();
}

TEST(MpiSizes, OtherSizesAreAnErrorOnEveryRankAndWriteNothing) {
  if (world->size() < 2) GTEST_SKIP() << "needs 2 ranks";
  const auto group = backend(*world, all_ranks(*world));
  const bool odd = world->rank() == world->size() - 1;
  for (const auto& call : calls_of(group))
    for (const bool blocking : {false, true})
      for (const std::int64_t n : {1000, 100000, 1000000})
        for (const bool odd_has_less : {false, true}) {
          // Large tensors of four ranks take long to fill; the first call has them all.
          if (n == 1000000 && std::string(call.name) != "all_reduce") continue;
          Guarded memory(n * world->size() + 1);
          const auto size = odd == odd_has_less ? 10 : n;
          EXPECT_THROW(call.make(memory, size, blocking)->wait(), MismatchError)
              << call.name << " of " << size << (blocking ? " blocking" : " started");
          EXPECT_TRUE(memory.kept()) << call.name << " of " << size;
          ASSERT_EQ(sum_of_ones(group, blocking), world->size()) << call.name;
        }
}

TEST(MpiSizes, CallsBeforeAndAfterOneThatDiffersGoOn) {
  if (world->size() < 2) GTEST_SKIP() << "needs 2 ranks";
  const auto group = backend(*world, all_ranks(*world));
  const bool odd = world->rank() == world->size() - 1;
  for (int first = 0; first < 3; ++first) {
    std::vector<std::vector<at::Tensor>> tensors;
    for (int i = 0; i < 3; ++i)
      tensors.push_back({at::full({i == 1 && odd ? 10 : 100000}, i + 1.0)});
    std::vector<WorkPtr> works;
    for (auto& t : tensors)
      works.push_back(group->allreduce(t, options<c10d::AllreduceOptions>(false)));
    // In any order of waits.
    for (int k = 0; k < 3; ++k) {
      const int i = (first + k) % 3;
      auto& work = works[static_cast<std::size_t>(i)];
      if (i == 1) {
        EXPECT_THROW(work->wait(), MismatchError);
      } else {
        work->wait();
        const auto& t = tensors[static_cast<std::size_t>(i)][0];
        EXPECT_TRUE(t.eq((i + 1.0) * world->size()).all().item<bool>());
      }
    }
    EXPECT_EQ(sum_of_ones(group, first == 1), world->size());
  }
}

// A rank that is in another wait still moves the data of what it has started.
TEST(MpiSizes, StartedCallsMoveInWaitsOnOtherGroups) {
  if (world->size() < 2) GTEST_SKIP() << "needs 2 ranks";
  const auto one = backend(*world, all_ranks(*world)), two = backend(*world, all_ranks(*world));
  for (int round = 0; round < 20; ++round) {
    std::vector<at::Tensor> t{at::ones({50000})};
    const auto work = one->allreduce(t, options<c10d::AllreduceOptions>(false));
    const bool waits_first = world->rank() % 2 == round % 2;
    if (waits_first) work->wait();
    two->barrier(options<c10d::BarrierOptions>(round % 3 == 0))->wait();
    if (!waits_first) work->wait();
    EXPECT_TRUE(t[0].eq(world->size()).all().item<bool>());
  }
}

// Any mixture of started and blocking calls, waited for in another order on each rank, or not at
// all.
TEST(MpiSizes, MixedCallsKeepTheirOrder) {
  const auto group = backend(*world, all_ranks(*world));
  const double ranks = world->size();
  std::mt19937 same(7), own(static_cast<unsigned>(world->rank()) + 100);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::vector<at::Tensor>> tensors;
    std::vector<std::pair<WorkPtr, double>> works;
    for (int i = 0; i < 12; ++i) {
      const std::int64_t n = same() % 3 == 0 ? 20000 : 5;
      const bool reduces = same() % 2 == 0;
      // A rank of its own may wait at once: the others need not.
      const bool blocking = own() % 4 == 0;
      tensors.push_back({at::full({n}, reduces ? i : world->rank() == 0 ? i : -1.0)});
      works.emplace_back(
          reduces ? group->allreduce(tensors.back(), options<c10d::AllreduceOptions>(blocking))
                  : group->broadcast(tensors.back(), options<c10d::BroadcastOptions>(blocking)),
          reduces ? i * ranks : i);
      if (own() % 8 == 0) works.back().first.reset();
    }
    std::vector<std::size_t> order(works.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), own);
    for (const auto i : order) {
      if (!works[i].first) continue;
      works[i].first->wait();
      EXPECT_TRUE(tensors[i][0].eq(works[i].second).all().item<bool>()) << "call " << i;
    }
    group->barrier(options<c10d::BarrierOptions>(true))->wait();
  }
}

// What is queued is moved when the group goes, though nobody waits for it.
TEST(MpiSizes, AGroupMayGoWithCallsQueued) {
  std::vector<std::vector<at::Tensor>> tensors;
  // Sums of half precision are an operation of the backend's own.
  for (int i = 0; i < 5; ++i)
    tensors.push_back({at::full({30000}, i + 1.0, i % 2 == 0 ? at::kFloat : at::kHalf)});
  {
    const auto group = backend(*world, all_ranks(*world));
    for (auto& t : tensors) group->allreduce(t, options<c10d::AllreduceOptions>(false));
  }
  for (int i = 0; i < 5; ++i)
    EXPECT_TRUE(
        tensors[static_cast<std::size_t>(i)][0].eq((i + 1.0) * world->size()).all().item<bool>());
  EXPECT_EQ(sum_of_ones(backend(*world, all_ranks(*world)), true), world->size());
}

TEST(MpiSizes, AWorkMayBeWaitedForWhenItsGroupHasGone) {
  std::vector<std::vector<at::Tensor>> tensors;
  std::vector<WorkPtr> works;
  {
    const auto group = backend(*world, all_ranks(*world));
    for (const auto dtype : {at::kFloat, at::kHalf, at::kFloat}) {
      tensors.push_back({at::full({30000}, 2.0, dtype)});
      works.push_back(group->allreduce(tensors.back(), options<c10d::AllreduceOptions>(false)));
    }
  }
  works.back().reset();
  for (std::size_t i = 0; i + 1 < works.size(); ++i) {
    works[i]->wait();
    EXPECT_TRUE(tensors[i][0].eq(2.0 * world->size()).all().item<bool>()) << i;
  }
  works.clear();
  EXPECT_TRUE(tensors.back()[0].eq(2.0 * world->size()).all().item<bool>());
}

// Lists in which some tensors travel in pieces, as messages, and others in one call.
TEST(MpiSizes, ListsOfWhichSomeTravelInPieces) {
  const int n = world->size();
  const auto group = backend(*world, all_ranks(*world), "pieces", /*max_count=*/n);
  for (const bool blocking : {false, true})
    for (const bool pieces_first : {false, true}) {
      std::vector<at::Tensor> in, out;
      for (const bool large : {pieces_first, !pieces_first}) {
        const std::int64_t size = large ? 3 * n + 1 : 1;
        in.push_back(at::full({size}, world->rank() + (large ? 0.5 : 0.25)));
        out.push_back(at::zeros({size * n}));
      }
      group->allgather_into_tensor_coalesced(out, in, options<c10d::AllgatherOptions>(blocking))
          ->wait();
      for (std::size_t i = 0; i < 2; ++i)
        for (int r = 0; r < n; ++r) {
          const auto size = in[i].numel();
          const double more = (i == 0) == pieces_first ? 0.5 : 0.25;
          EXPECT_TRUE(out[i].narrow(0, r * size, size).eq(r + more).all().item<bool>()) << r;
        }
    }
}

TEST(MpiSizes, AMessageOfAnotherSizeIsAnErrorAndWritesNothing) {
  if (world->size() < 2) GTEST_SKIP() << "needs 2 ranks";
  const auto group = backend(*world, all_ranks(*world));
  const int last = world->size() - 1;
  for (const std::int64_t sent : {20, 1000000})
    for (const std::int64_t expected : {10, 100000}) {
      std::vector<at::Tensor> mine{at::ones({sent})};
      Guarded memory(sent);
      if (world->rank() == 0) {
        std::vector<at::Tensor> t{memory.take(expected)};
        EXPECT_THROW(group->recv(t, last, 3)->wait(), MismatchError);
        EXPECT_TRUE(memory.kept());
      }
      // What nobody expects is taken from the sender all the same.
      WorkPtr work;
      if (world->rank() == last) work = group->send(mine, 0, 3);
      group->barrier(options<c10d::BarrierOptions>(false))->wait();
      EXPECT_EQ(sum_of_ones(group, true), world->size());
      if (work) work->wait();
    }
  std::vector<at::Tensor> t{at::full({5}, world->rank())};
  if (world->rank() == last) group->send(t, 0, 3)->wait();
  if (world->rank() == 0) {
    group->recv(t, last, 3)->wait();
    EXPECT_EQ(t[0][4].item<double>(), last);
  }
}

TEST(MpiTags, TellMessagesApart) {
  for (const int largest : {32767, (1 << 23) - 1, (1 << 28) - 1, 0x7fffffff}) {
    const detail::MpiTags tags(largest);
    int alike = 0, other_users = 0;
    for (std::int64_t n = 0; n < 2000; ++n) {
      const int tag = tags.numbered(n % 2 == 0, static_cast<std::uint64_t>(n), at::kDouble, n);
      ASSERT_TRUE(tag >= 0 && tag <= largest);
      EXPECT_EQ(tags.dtype_of(tag), at::kDouble);
      EXPECT_FALSE(tags.numbered_differ(tag, tag));
      const auto number = static_cast<std::uint64_t>(n);
      EXPECT_TRUE(tags.numbered_differ(tag, tags.numbered(n % 2 == 0, number, at::kFloat, n)));
      EXPECT_FALSE(
          tags.numbered_differ(tag, tags.numbered(n % 2 == 0, number + 1, at::kDouble, n)));
      EXPECT_FALSE(tags.numbered_differ(tag, tags.numbered(n % 2 == 1, number, at::kDouble, n)));
      alike += tag == tags.numbered(n % 2 == 0, number, at::kDouble, n + 1);
      const int given = static_cast<int>(n % tags.users());
      const int user = tags.users(given, n), other = tags.users(given, n + 8);
      ASSERT_TRUE(user >= 0 && user <= largest);
      EXPECT_EQ(tags.users_differ(user, other), user != other);
      other_users += user != other;
    }
    // 6 bits of the size at least, 18 with Open MPI.
    EXPECT_LT(alike, largest == 32767 ? 100 : 20);
    if (largest == 0x7fffffff) {
      EXPECT_GT(other_users, 1990);
    }
    const int top = tags.users(tags.users() - 1, 12345);
    EXPECT_TRUE(top >= 0 && top <= largest);
  }
}

}  // namespace

}  // namespace tessera::test
