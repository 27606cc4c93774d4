// Every call against what it should give, over drawn sizes, on processes and on threads. Ranks that
// share a core: cores_test.cpp.

#include <gtest/gtest.h>

#include <random>

#include "drawn.h"
#include "tessera/base/text.h"

namespace tessera::shm::testing {
namespace {

/// Sizes around the limits at which another way is taken, and between.
std::size_t drawn_size(std::mt19937& draw) {
  static constexpr std::size_t kEdges[] = {0,     1,     8,      48,     56,     57,
                                           64,    2040,  2048,   4096,   16384,  16392,
                                           65536, 65544, 131072, 131080, 200000, 600000};
  const std::size_t edge = kEdges[draw() % std::size(kEdges)];
  return draw() % 2 == 0 ? edge : edge + draw() % 100;
}

/// One of each call, with these sizes. Empty if all is right.
std::string all_calls(Group& group, int number) {
  const int ranks = group.size(), me = group.rank();
  std::mt19937 draw(static_cast<unsigned>(number));
  std::string wrong;
  const auto expect = [&](bool right, const char* what) {
    if (!right && wrong.size() < 500)
      wrong += concat("case ", number, " rank ", me, ": ", what, "; ");
  };
  const int root = static_cast<int>(draw() % static_cast<unsigned>(ranks));
  const std::size_t size = drawn_size(draw);
  std::vector<std::size_t> sizes;
  for (int r = 0; r < ranks; ++r)
    sizes.push_back(draw() % 3 == 0 ? 0 : drawn_size(draw) / (draw() % 2 == 0 ? 1 : 7));
  std::vector<Bytes> data;
  Bytes joined;
  std::vector<std::size_t> starts;
  for (int r = 0; r < ranks; ++r) {
    data.push_back(drawn_bytes(number, r, sizes[static_cast<std::size_t>(r)]));
    starts.push_back(joined.size());
    joined.insert(joined.end(), data.back().begin(), data.back().end());
  }
  const auto own = static_cast<std::size_t>(me);

  group.barrier();

  Bytes cast = drawn_bytes(number, me, size);
  group.broadcast(cast.data(), size, root);
  expect(cast == drawn_bytes(number, root, size), "broadcast");

  Bytes all(joined.size());
  group.all_gather(data[own].data(), all.data(), sizes);
  expect(all == joined, "all_gather");
  Bytes in_place(joined.size());
  std::ranges::copy(data[own], in_place.begin() + static_cast<std::ptrdiff_t>(starts[own]));
  group.all_gather(in_place.data() + starts[own], in_place.data(), sizes);
  expect(in_place == joined, "all_gather in place");

  Bytes gathered(me == root ? joined.size() : 0);
  group.gather(data[own].data(), gathered.data(), sizes, root);
  expect(me != root || gathered == joined, "gather");

  Bytes dealt(sizes[own]);
  group.scatter(me == root ? joined.data() : nullptr, dealt.data(), sizes, root);
  expect(dealt == data[own], "scatter");

  // Rank r sends (number + r + to) % 5 blocks of `unit` bytes to rank `to`.
  const std::size_t unit = 1 + drawn_size(draw) / 4;
  const auto blocks = [&](int from, int to) {
    return static_cast<std::size_t>((number + from + 2 * to) % 3) * unit;
  };
  std::vector<std::size_t> to_sizes, from_sizes;
  Bytes out, expected;
  for (int r = 0; r < ranks; ++r) {
    to_sizes.push_back(blocks(me, r));
    from_sizes.push_back(blocks(r, me));
    const Bytes mine = drawn_bytes(number + 7 * r, me, blocks(me, r)),
                theirs = drawn_bytes(number + 7 * me, r, blocks(r, me));
    out.insert(out.end(), mine.begin(), mine.end());
    expected.insert(expected.end(), theirs.begin(), theirs.end());
  }
  Bytes in(expected.size());
  group.all_to_all(out.data(), to_sizes, in.data(), from_sizes);
  expect(in == expected, "all_to_all");

  // All ways of reducing doubles that are exact: the order does not show.
  const std::size_t count = size / 8;
  std::vector<double> sum(count, 0.0), weighted(count, 0.0);
  for (int r = 0; r < ranks; ++r) {
    const auto values = drawn_values(number, r, count);
    for (std::size_t i = 0; i < count; ++i) {
      sum[i] += values[i];
      weighted[i] += values[i] * (r + 1);
    }
  }
  std::vector<double> values = drawn_values(number, me, count), result(count);
  group.all_reduce(values.data(), result.data(), count, Element::float64, {});
  expect(result == sum, "all_reduce");
  expect(values == drawn_values(number, me, count), "all_reduce's input");
  group.all_reduce(values.data(), values.data(), count, Element::float64,
                   {Reduction::Kind::premultiplied, me + 1.0});
  expect(values == weighted, "all_reduce in place, premultiplied");
  values = drawn_values(number, me, count);
  group.reduce(values.data(), values.data(), count, Element::float64, {}, root);
  expect(values == (me == root ? sum : drawn_values(number, me, count)), "reduce");

  std::vector<std::size_t> counts;
  std::size_t total = 0, before = 0;
  for (int r = 0; r < ranks; ++r) {
    counts.push_back(sizes[static_cast<std::size_t>(r)] / 8);
    if (r < me) before += counts.back();
    total += counts.back();
  }
  std::vector<double> share(counts[own]), expected_share(counts[own], 0.0);
  for (int r = 0; r < ranks; ++r) {
    const auto theirs = drawn_values(number, r, total);
    for (std::size_t i = 0; i < share.size(); ++i)
      expected_share[i] += theirs[before + i] * (r + 2);
  }
  values = drawn_values(number, me, total);
  group.reduce_scatter(values.data(), share.data(), counts, Element::float64,
                       {Reduction::Kind::premultiplied, me + 2.0});
  expect(share == expected_share, "reduce_scatter");
  return wrong;
}

std::string messages(Group& group, int number) {
  const int ranks = group.size(), me = group.rank();
  std::mt19937 draw(static_cast<unsigned>(number));
  // Every rank sends every rank, itself included, three messages of drawn sizes; received in
  // another order, by tag.
  std::vector<std::vector<Bytes>> in(static_cast<std::size_t>(ranks)),
      out(static_cast<std::size_t>(ranks));
  std::vector<Message> batch;
  const auto size_of_message = [&](int from, int to, int k) {
    std::mt19937 d(static_cast<unsigned>(number * 1000 + from * 100 + to * 10 + k));
    return drawn_size(d);
  };
  const auto tag_of = [](int k) { return static_cast<std::uint32_t>(k == 2 ? 0 : k); };
  for (int r = 0; r < ranks; ++r) {
    const auto i = static_cast<std::size_t>(r);
    for (int k = 0; k < 3; ++k) {
      out[i].push_back(drawn_bytes(number + k, me * 10 + r, size_of_message(me, r, k)));
      in[i].emplace_back(size_of_message(r, me, k));
    }
    for (int k = 0; k < 3; ++k)
      batch.push_back({Message::Kind::send, out[i][static_cast<std::size_t>(k)].data(),
                       out[i][static_cast<std::size_t>(k)].size(), r, tag_of(k)});
    for (const int k : {1, 0, 2})
      batch.push_back({Message::Kind::receive, in[i][static_cast<std::size_t>(k)].data(),
                       in[i][static_cast<std::size_t>(k)].size(), r, tag_of(k)});
  }
  group.exchange(batch);
  for (int r = 0; r < ranks; ++r)
    for (int k = 0; k < 3; ++k)
      if (in[static_cast<std::size_t>(r)][static_cast<std::size_t>(k)] !=
          drawn_bytes(number + k, r * 10 + me, size_of_message(r, me, k)))
        return concat("message ", k, " from ", r, " to ", me, " of case ", number);
  return "";
}

/// Many started calls of all kinds, waited for in another order, between blocking ones.
std::string started(Group& group, int number) {
  const int ranks = group.size(), me = group.rank();
  std::mt19937 draw(static_cast<unsigned>(number));
  std::vector<std::vector<double>> buffers, sums;
  std::vector<Request> requests;
  for (int k = 0; k < 12; ++k) {
    const std::size_t count = drawn_size(draw) / 8;
    buffers.push_back(drawn_values(number + k, me, count));
    sums.emplace_back(count, 0.0);
    for (int r = 0; r < ranks; ++r) {
      const auto values = drawn_values(number + k, r, count);
      for (std::size_t i = 0; i < count; ++i) sums.back()[i] += values[i];
    }
    auto& buffer = buffers.back();
    requests.push_back(group.started().all_reduce(buffer.data(), buffer.data(), buffer.size(),
                                                  Element::float64, {}));
    if (k == 5) {
      int token = me, got = -1;
      Request send = group.started().send(&token, sizeof token, (me + 1) % ranks, 9);
      group.receive(&got, sizeof got, Message::kAnySource, 9);
      if (got != (me + ranks - 1) % ranks) return "a message between started calls";
      send.wait();
    }
  }
  for (std::size_t k = 0; k < requests.size(); ++k) requests[(k * 5) % 12].wait();
  for (std::size_t k = 0; k < buffers.size(); ++k)
    if (buffers[k] != sums[k]) return concat("started call ", k);
  return "";
}

std::string everything(Group& group, int cases) {
  std::string wrong;
  for (int number = 1; number <= cases && wrong.empty(); ++number) {
    wrong = all_calls(group, number * 1000 + group.size());
    if (wrong.empty()) wrong = messages(group, number);
    if (wrong.empty()) wrong = started(group, number);
  }
  return wrong;
}

TEST(Collectives, ProcessesOfEveryNumber) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    SCOPED_TRACE(ranks);
    expect_good(fork_ranks(ranks, [&](int rank, const Directory& directory) {
      Group group = Group::meet(rank, ranks, directory, brief("processes"));
      return everything(group, ranks > 4 ? 2 : 6);
    }));
  }
}

TEST(Collectives, SmallPiecesAndNoSingleCopy) {
  Options options = brief("pieces");
  options.slot_bytes = 1024;
  options.frame_bytes = 192;
  options.single_copy = false;
  expect_good(fork_ranks(3, [&](int rank, const Directory& directory) {
    Group group = Group::meet(rank, 3, directory, options);
    return everything(group, 2);
  }));
}

// So large that each rank takes its share out of the others' processes.
TEST(Collectives, LargeReduceScatter) {
  for (const int ranks : {2, 3}) {
    std::vector<std::size_t> counts{(1 << 20) + 3, 5};
    if (ranks == 3) counts.push_back(0);
    expect_good(fork_ranks(ranks, [&](int rank, const Directory& directory) -> std::string {
      Group group = Group::meet(rank, ranks, directory, brief("large"));
      const std::size_t total = counts[0] + counts[1];
      const std::vector<double> mine = drawn_values(1, rank, total);
      std::vector<double> sum(total), share(counts[static_cast<std::size_t>(rank)]);
      for (int r = 0; r < ranks; ++r) {
        const std::vector<double> theirs = drawn_values(1, r, total);
        for (std::size_t i = 0; i < total; ++i) sum[i] += theirs[i];
      }
      group.reduce_scatter(mine.data(), share.data(), counts, Element::float64, {});
      const std::size_t before = rank == 0 ? 0 : counts[0];
      for (std::size_t i = 0; i < share.size(); ++i)
        if (share[i] != sum[before + i]) return concat("element ", i);
      std::vector<double> cast = mine;
      group.broadcast(cast.data(), total * sizeof(double), 1);
      return cast == drawn_values(1, 1, total) ? "" : "broadcast";
    }));
  }
}

// What fits into a line is sent ahead, and waits for its readers.
TEST(Collectives, ASenderIsAhead) {
  auto groups = Group::threads(2, brief("ahead"));
  constexpr int kCalls = 64;
  for (int i = 0; i < kCalls; ++i) groups[0].broadcast(&i, sizeof i, 0);
  int late = -1;
  EXPECT_THROW(groups[0].broadcast(&late, sizeof late, 0, {std::chrono::milliseconds(20)}),
               TimeoutError);
  groups = Group::threads(2, brief("ahead"));
  std::thread reader([&group = groups[1]] {
    for (int i = 0; i < 3 * kCalls; ++i) {
      int got = -1;
      group.broadcast(&got, sizeof got, 0);
      EXPECT_EQ(got, i);
    }
  });
  for (int i = 0; i < 3 * kCalls; ++i) {
    int value = i;
    groups[0].broadcast(&value, sizeof value, 0);
  }
  reader.join();
}

// Also where all ranks give memory that they share, and the others' output as well.
TEST(Collectives, AReductionWritesToItsRootAlone) {
  Options options = brief("root");
  options.arena_bytes = 1 << 20;
  auto groups = Group::threads(2, options);
  const auto reduce = [&groups](int rank) {
    constexpr std::size_t kCount = 50000;
    Group& group = groups[static_cast<std::size_t>(rank)];
    std::byte* memory = group.arena().allocate(kCount * sizeof(float));
    auto* values = reinterpret_cast<float*>(memory);
    std::fill_n(values, kCount, 1.0F + static_cast<float>(rank));
    group.reduce(values, values, kCount, Element::float32, {}, 0);
    EXPECT_EQ(values[kCount - 1], rank == 0 ? 3 : 2);
    group.barrier();
    group.arena().deallocate(memory);
  };
  std::thread other([&reduce] { reduce(1); });
  reduce(0);
  other.join();
}

TEST(Collectives, ARequestThatIsDoneStaysDone) {
  auto groups = Group::threads(2, brief("done"));
  std::thread other([&group = groups[1]] { group.barrier(); });
  Request request = groups[0].started().barrier();
  request.wait();
  EXPECT_TRUE(request.test());
  EXPECT_TRUE(request.test());
  request.wait();
  other.join();
}

// A rank that sends and receives does not wait until its message has been taken, but until there is
// room for it.
TEST(Collectives, ExchangesRunAhead) {
  constexpr int kAhead = 4;
  auto groups = Group::threads(3, brief("exchange"));
  // Rank 0 passes on, rank 2 sends, rank 1 comes last.
  std::thread second([&] {
    for (int i = 0; i < kAhead; ++i) {
      const double out = i * 10 + 2;
      groups[2].send(&out, sizeof out, 0);
    }
  });
  for (int i = 0; i < kAhead; ++i) {
    double out = i * 10, in = -1;
    groups[0].exchange({{Message::Kind::send, &out, sizeof out, 1, 0},
                        {Message::Kind::receive, &in, sizeof in, 2, 0}});
    EXPECT_EQ(in, i * 10 + 2);
  }
  second.join();
  for (int i = 0; i < kAhead; ++i) {
    double in = -1;
    groups[1].receive(&in, sizeof in, 0);
    EXPECT_EQ(in, i * 10);
  }
  // Nobody takes them, and the fifth finds no room: it says whom it waits for.
  const Message nothing{Message::Kind::receive, nullptr, 0, 2, 7};
  std::thread third([&] {
    try {
      for (int i = 0; i < kAhead + 1; ++i) groups[2].send(nullptr, 0, 0, 7);
    } catch (const Error&) {  // The group has ended meanwhile.
    }
  });
  double out = 1;
  const Message mine{Message::Kind::send, &out, sizeof out, 1, 0};
  for (int i = 0; i < kAhead; ++i) groups[0].exchange({mine, nothing});
  try {
    groups[0].exchange({mine, nothing}, {milliseconds(200)});
    ADD_FAILURE() << "a fifth message found room";
  } catch (const TimeoutError& error) {
    EXPECT_EQ(error.missing().front(), 1);
  }
  third.join();
}

// However data are written, the bytes are the same, also where ranks differ.
TEST(Collectives, AllKindsOfStores) {
  constexpr Stores kKinds[] = {Stores::cached, Stores::handed_over, Stores::past_cache};
  for (const int ranks : {2, 3}) {
    for (int kind = 0; kind < 4; ++kind)
      expect_good(fork_ranks(ranks, [&](int rank, const Directory& directory) -> std::string {
        Options options = brief("stores");
        options.stores = kKinds[(kind < 3 ? kind : rank) % 3];
        Group group = Group::meet(rank, ranks, directory, options);
        if (group.describe().stores != options.stores) return "not as it was told";
        return everything(group, 5);
      }));
  }
}

// Short calls one after the other, some of which only some ranks write in: slots are written again
// by either rank, as soon as the other is done with them.
TEST(Collectives, SlotsChangeHands) {
  Options options = brief("hands");
  options.slot_bytes = 1024;
  for (const Stores stores : {Stores::cached, Stores::handed_over, Stores::past_cache}) {
    options.stores = stores;
    for (const int ranks : {2, 3})
      expect_good(thread_ranks(ranks, options, [&](Group& group) -> std::string {
        std::mt19937 draw(5);
        for (int call = 0; call < 3000; ++call) {
          const auto root = static_cast<int>(draw() % static_cast<unsigned>(ranks));
          const std::size_t n = 8 * (1 + draw() % (call % 10 == 0 ? 1000 : 120));
          const unsigned kind = draw() % 4;
          const auto value = [&](int r) { return static_cast<double>(call * 8 + r); };
          std::vector<double> mine(n / 8, value(group.rank())), all(n / 8 * group.size());
          double sum = 0;
          for (int r = 0; r < ranks; ++r) sum += value(r);
          std::vector<double> expected(n / 8, kind == 0 ? value(root) : sum);
          if (kind == 0) {
            group.broadcast(mine.data(), n, root);
          } else if (kind == 1) {
            group.all_reduce(mine.data(), mine.data(), n / 8, Element::float64, {});
          } else if (kind == 2) {
            group.reduce(mine.data(), mine.data(), n / 8, Element::float64, {}, root);
            if (group.rank() != root) continue;
          } else {
            group.all_gather(mine.data(), all.data(), n);
            expected = all;
            for (std::size_t i = 0; i < all.size(); ++i)
              expected[i] = value(static_cast<int>(i / (n / 8)));
            mine = all;
          }
          if (mine != expected) return concat("call ", call, " of kind ", kind);
        }
        return "";
      }));
  }
}

TEST(Collectives, Threads) {
  for (const int ranks : {2, 3})
    expect_good(
        thread_ranks(ranks, brief("threads"), [](Group& group) { return everything(group, 3); }));
}

}  // namespace
}  // namespace tessera::shm::testing
