// What moves data over the MPI backend, against values computed on one rank, in all ways of
// mpi_ways.h. Reductions: mpi_reductions_test.cpp. Run under mpirun; the argument is the thread
// level.

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "mpi_ways.h"

namespace tessera::test {

// Made and ended by main(): MPI has one life in a process.
std::unique_ptr<MpiWorld> world;

namespace {

TEST(Mpi, Broadcast) {
  for (const auto& way : ways())
    for (const auto dtype : kDtypes)
      for (int root = 0; root < way.size(); ++root) {
        const auto inputs = inputs_of(way, 3, {2, 4}, dtype);
        std::vector<at::Tensor> t{way.place(inputs[static_cast<std::size_t>(way.rank())])};
        auto options = way.options<c10d::BroadcastOptions>();
        options.rootRank = root;
        way.backend->broadcast(t, options)->wait();
        expect_same(t[0], inputs[static_cast<std::size_t>(root)], label(way, dtype, "broadcast"));
      }
}

TEST(Mpi, AllGatherUneven) {
  for (const auto& way : ways())
    for (const auto dtype : kDtypes)
      for (const auto& sizes : size_lists(way.size())) {
        std::vector<at::Tensor> parts;
        for (int r = 0; r < way.size(); ++r)
          parts.push_back(values(4, way.ranks[static_cast<std::size_t>(r)],
                                 {sizes[static_cast<std::size_t>(r)], 3}, dtype));
        const at::Tensor output = at::empty({sum(sizes), 3}, dtype);
        way.hand(&detail::Transport::all_gather, output,
                 parts[static_cast<std::size_t>(way.rank())], sizes, 3);
        expect_same(output, at::cat(parts), label(way, dtype, "all_gather_v"));
      }
}

TEST(Mpi, AllGatherIntoItsOwnMemory) {
  for (const auto& way : ways()) {
    const auto sizes = size_lists(way.size())[1];
    std::vector<at::Tensor> parts;
    for (int r = 0; r < way.size(); ++r)
      parts.push_back(values(5, r, {sizes[static_cast<std::size_t>(r)], 2}, at::kFloat));
    const at::Tensor output = at::zeros({sum(sizes), 2});
    const auto mine = output.split_with_sizes(sizes)[static_cast<std::size_t>(way.rank())];
    mine.copy_(parts[static_cast<std::size_t>(way.rank())]);
    way.hand(&detail::Transport::all_gather, output, mine, sizes, 2);
    expect_same(output, at::cat(parts), label(way, at::kFloat, "all_gather_v in place"));
  }
}

TEST(Mpi, GatherAndScatterUneven) {
  for (const auto& way : ways())
    for (const auto dtype : kDtypes)
      for (const auto& sizes : size_lists(way.size()))
        for (int root = 0; root < way.size(); ++root) {
          std::vector<at::Tensor> parts;
          for (int r = 0; r < way.size(); ++r)
            parts.push_back(values(7, r, {sizes[static_cast<std::size_t>(r)], 2}, dtype));
          const auto me = static_cast<std::size_t>(way.rank());
          at::Tensor whole = way.rank() == root ? at::empty({sum(sizes), 2}, dtype) : at::Tensor();
          way.hand(&detail::Transport::gather, whole, parts[me], sizes, 2, root);
          if (way.rank() == root) expect_same(whole, at::cat(parts), label(way, dtype, "gather_v"));
          const at::Tensor back = at::empty({sizes[me], 2}, dtype);
          way.hand(&detail::Transport::scatter, back, whole, sizes, 2, root);
          expect_same(back, parts[me], label(way, dtype, "scatter_v"));
        }
}

TEST(Mpi, AllToAllUneven) {
  for (const auto& way : ways())
    for (const auto dtype : kDtypes)
      for (int kind = 0; kind < 4; ++kind) {
        const int n = way.size();
        const auto rows = [&](int from, int to) -> std::int64_t {
          return kind == 0    ? 2
                 : kind == 1  ? (from * 2 + to) % 3
                 : kind == 2  ? 0
                 : from == to ? 1
                              : 4;
        };
        const auto block = [&](int from, int to) {
          return values(8,
                        way.ranks[static_cast<std::size_t>(from)] * 10 +
                            way.ranks[static_cast<std::size_t>(to)],
                        {rows(from, to), 2}, dtype);
        };
        std::vector<at::Tensor> send, receive;
        std::vector<std::int64_t> send_rows, receive_rows;
        for (int r = 0; r < n; ++r) {
          send.push_back(block(way.rank(), r));
          receive.push_back(block(r, way.rank()));
          send_rows.push_back(rows(way.rank(), r));
          receive_rows.push_back(rows(r, way.rank()));
        }
        at::Tensor input = way.place(at::cat(send)),
                   output = way.place(at::zeros({sum(receive_rows), 2}, dtype));
        // Equal sizes may be left out by one side.
        if (kind == 0 && way.blocking) send_rows.clear();
        way.backend
            ->alltoall_base(output, input, receive_rows, send_rows,
                            way.options<c10d::AllToAllOptions>())
            ->wait();
        expect_same(output, at::cat(receive), label(way, dtype, "all_to_all"));
      }
}

// The forms of c10d that take lists of tensors.
TEST(Mpi, Lists) {
  for (const auto& way : ways())
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong, at::kBool}) {
      const int n = way.size();
      const auto me = static_cast<std::size_t>(way.rank());
      const auto shape = [](int r) { return std::vector<std::int64_t>{r % 3, 2}; };
      std::vector<at::Tensor> parts, empty;
      for (int r = 0; r < n; ++r) {
        parts.push_back(values(9, r, shape(r), dtype));
        empty.push_back(way.place(at::zeros(shape(r), dtype)));
      }
      std::vector<at::Tensor> mine{way.place(parts[me])};
      std::vector<std::vector<at::Tensor>> lists{empty};
      way.backend->allgather(lists, mine, way.options<c10d::AllgatherOptions>())->wait();
      for (int r = 0; r < n; ++r)
        expect_same(lists[0][static_cast<std::size_t>(r)], parts[static_cast<std::size_t>(r)],
                    label(way, dtype, "allgather list"));

      const int root = n / 2;
      std::vector<std::vector<at::Tensor>> gathered, given;
      if (way.rank() == root) {
        gathered.emplace_back();
        for (int r = 0; r < n; ++r) gathered[0].push_back(at::zeros(shape(r), dtype));
        given.push_back(parts);
      }
      auto to_root = way.options<c10d::GatherOptions>();
      to_root.rootRank = root;
      way.backend->gather(gathered, mine, to_root)->wait();
      if (way.rank() == root)
        for (int r = 0; r < n; ++r)
          expect_same(gathered[0][static_cast<std::size_t>(r)], parts[static_cast<std::size_t>(r)],
                      label(way, dtype, "gather list"));
      std::vector<at::Tensor> back{at::zeros(shape(way.rank()), dtype)};
      auto from_root = way.options<c10d::ScatterOptions>();
      from_root.rootRank = root;
      way.backend->scatter(back, given, from_root)->wait();
      expect_same(back[0], parts[me], label(way, dtype, "scatter list"));

      std::vector<std::vector<at::Tensor>> all(static_cast<std::size_t>(n));
      for (int from = 0; from < n; ++from)
        for (int r = 0; r < n; ++r)
          all[static_cast<std::size_t>(from)].push_back(
              values(20 + static_cast<std::uint64_t>(from), r, shape(r), dtype));
      std::vector<std::vector<at::Tensor>> to_reduce{all[me]};
      std::vector<at::Tensor> own{way.place(at::zeros(shape(way.rank()), dtype))};
      way.backend->reduce_scatter(own, to_reduce, way.options<c10d::ReduceScatterOptions>())
          ->wait();
      std::vector<at::Tensor> column;
      for (int from = 0; from < n; ++from)
        column.push_back(all[static_cast<std::size_t>(from)][me]);
      expect_same(own[0], reduced(column, ReduceOp::SUM, dtype),
                  label(way, dtype, "reduce_scatter list"));

      std::vector<at::Tensor> out, in = all[me];
      for (int from = 0; from < n; ++from)
        out.push_back(way.place(at::zeros(shape(way.rank()), dtype)));
      way.backend->alltoall(out, in, way.options<c10d::AllToAllOptions>())->wait();
      for (int from = 0; from < n; ++from)
        expect_same(out[static_cast<std::size_t>(from)], all[static_cast<std::size_t>(from)][me],
                    label(way, dtype, "alltoall list"));
    }
}

TEST(Mpi, SingleTensorForms) {
  for (const auto& way : ways()) {
    const int n = way.size();
    const auto inputs = inputs_of(way, 11, {2, 3}, at::kDouble);
    const auto me = static_cast<std::size_t>(way.rank());
    at::Tensor mine = way.place(inputs[me]), all = at::empty({2 * n, 3}, at::kDouble);
    way.backend->_allgather_base(all, mine, way.options<c10d::AllgatherOptions>())->wait();
    expect_same(all, at::cat(inputs), label(way, at::kDouble, "all_gather_single"));

    const auto wide = inputs_of(way, 12, {2 * n, 3}, at::kDouble);
    at::Tensor in = way.place(wide[me]), out = way.place(at::zeros({2, 3}, at::kDouble));
    way.backend->_reduce_scatter_base(out, in, way.options<c10d::ReduceScatterOptions>())->wait();
    expect_same(out, reduced(wide, ReduceOp::SUM, at::kDouble).narrow(0, 2 * way.rank(), 2),
                label(way, at::kDouble, "reduce_scatter_single"));
    at::Tensor slice = wide[me].clone();
    at::Tensor aliased = slice.narrow(0, 2 * way.rank(), 2);
    way.backend->_reduce_scatter_base(aliased, slice, way.options<c10d::ReduceScatterOptions>())
        ->wait();
    expect_same(aliased, out, label(way, at::kDouble, "reduce_scatter_single into its own input"));

    std::vector<at::Tensor> several{inputs[me].clone(), inputs[me].to(at::kLong)};
    way.backend->allreduce_coalesced(several, way.options<c10d::AllreduceCoalescedOptions>())
        ->wait();
    expect_same(several[0], reduced(inputs, ReduceOp::SUM, at::kDouble),
                label(way, at::kDouble, "several"));
    expect_same(several[1], reduced(inputs, ReduceOp::SUM, at::kLong),
                label(way, at::kLong, "several"));
  }
}

TEST(Mpi, SendAndReceive) {
  for (const auto& way : ways())
    for (const auto dtype : kDtypes) {
      const int n = way.size(), next = (way.rank() + 1) % n, before = (way.rank() + n - 1) % n;
      std::vector<at::Tensor> a{way.place(values(13, way.rank(), {5}, dtype))},
          b{way.place(values(14, way.rank(), {2, 2}, dtype))};
      std::vector<at::Tensor> x{way.place(at::zeros({5}, dtype))},
          y{way.place(at::zeros({2, 2}, dtype))};
      // Tags, not order, tell the messages apart.
      const auto second = way.backend->recv(y, before, 9);
      const auto first = way.backend->recv(x, before, 4);
      const auto s = way.backend->send(a, next, 4), t = way.backend->send(b, next, 9);
      for (const auto& work : {first, second, s, t}) work->wait();
      expect_same(x[0], values(13, before, {5}, dtype), label(way, dtype, "receive"));
      expect_same(y[0], values(14, before, {2, 2}, dtype), label(way, dtype, "receive"));
    }
}

TEST(Mpi, AGroupMayGoWithAMessageThatNobodyReceived) {
  if (world->size() < 2) GTEST_SKIP() << "needs 2 ranks";
  {
    const auto group = backend(*world, all_ranks(*world), "unread");
    std::vector<at::Tensor> mine{at::ones({3})};
    if (world->rank() == 0) group->send(mine, 1, 7)->wait();
    group->barrier(c10d::BarrierOptions())->wait();
  }
  backend(*world, all_ranks(*world), "after")->barrier(c10d::BarrierOptions())->wait();
}

TEST(Mpi, ReceiveFromAnyRankNamesTheSender) {
  const auto group = backend(*world, all_ranks(*world));
  std::vector<at::Tensor> mine{at::full({3}, world->rank(), at::kLong)};
  if (world->rank() > 0) {
    group->send(mine, 0, 7)->wait();
    return;
  }
  std::vector<bool> seen(static_cast<std::size_t>(world->size()), false);
  for (int i = 1; i < world->size(); ++i) {
    std::vector<at::Tensor> t{at::zeros({3}, at::kLong)};
    const auto work = group->recvAnysource(t, 7);
    work->wait();
    EXPECT_EQ(t[0][2].item<std::int64_t>(), work->sourceRank());
    seen[static_cast<std::size_t>(work->sourceRank())] = true;
  }
  EXPECT_EQ(std::ranges::count(seen, true), world->size() - 1);
}

TEST(Mpi, ExchangeInAnyOrder) {
  for (const auto& way : ways()) {
    const int n = way.size();
    std::vector<Message> messages;
    std::vector<at::Tensor> expected, received;
    for (int r = n - 1; r >= 0; --r)
      for (int k = 0; k < 2; ++k) {
        const auto shape = [&](int from, int to) {
          return std::vector<std::int64_t>{(from + 2 * to + k) % 3};
        };
        messages.push_back({Message::Kind::send,
                            values(30 + static_cast<std::uint64_t>(k), way.rank() * 8 + r,
                                   shape(way.rank(), r), at::kFloat),
                            r});
        received.push_back(at::zeros(shape(r, way.rank()), at::kFloat));
        expected.push_back(values(30 + static_cast<std::uint64_t>(k), r * 8 + way.rank(),
                                  shape(r, way.rank()), at::kFloat));
        messages.push_back({Message::Kind::receive, received.back(), r});
      }
    detail::TransportCall call;
    call.messages = messages;
    call.timeout = kLimit;
    call.blocking = way.blocking;
    dynamic_cast<detail::AsC10d&>(*way.backend).hand(call, &detail::Transport::exchange)->wait();
    for (std::size_t i = 0; i < received.size(); ++i)
      expect_same(received[i], expected[i], label(way, at::kFloat, "exchange"));
  }
}

TEST(Mpi, BarrierAndManyUnderWay) {
  for (const auto& way : ways()) {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<std::vector<at::Tensor>> tensors;
    for (int i = 0; i < 8; ++i) tensors.push_back({at::full({4 + i}, way.rank() + i, at::kDouble)});
    auto options = way.options<c10d::AllreduceOptions>();
    for (auto& t : tensors) works.push_back(way.backend->allreduce(t, options));
    // Not in the order they were started.
    for (std::size_t i = works.size(); i-- > 0;) works[i]->wait();
    for (int i = 0; i < 8; ++i) {
      const double expected = way.size() * i + way.size() * (way.size() - 1) / 2.0;
      EXPECT_TRUE(tensors[static_cast<std::size_t>(i)][0].eq(expected).all().item<bool>());
    }
    way.backend->barrier(way.options<c10d::BarrierOptions>())->wait();
  }
}

TEST(Mpi, WorkThatNobodyWaitsForStillCompletes) {
  const auto group = backend(*world, all_ranks(*world));
  at::Tensor t = at::ones({1000});
  {
    std::vector<at::Tensor> list{t};
    group->allreduce(list, c10d::AllreduceOptions());
  }
  std::vector<at::Tensor> other{at::ones({1})};
  for (int i = 0; i < 3; ++i) group->allreduce(other, c10d::AllreduceOptions())->wait();
  const auto work = group->barrier(c10d::BarrierOptions());
  while (!work->isCompleted()) std::this_thread::yield();
  EXPECT_TRUE(work->isSuccess());
}

TEST(Mpi, FutureAndResult) {
  const auto group = backend(*world, all_ranks(*world));
  std::vector<at::Tensor> t{at::ones({2})};
  const auto work = group->allreduce(t, c10d::AllreduceOptions());
  const auto future = work->getFuture();
  ASSERT_TRUE(future->completed());
  EXPECT_TRUE(future->value().toTensorVector().at(0).eq(world->size()).all().item<bool>());
  EXPECT_TRUE(work->result().at(0).is_same(t[0]));
  // The result is there though nobody has waited and another rank is late.
  std::vector<at::Tensor> large{at::ones({300000})};
  if (world->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto results = group->allreduce(large, c10d::AllreduceOptions())->result();
  EXPECT_EQ(results.at(0)[299999].item<double>(), world->size());
}

TEST(Mpi, GroupsOfSomeRanks) {
  if (world->size() < 3) GTEST_SKIP() << "needs 3 ranks";
  // Every rank is in two groups, whose orders are not the world's.
  const int n = world->size();
  for (int pass = 0; pass < 3; ++pass)
    for (int first = 0; first < n; ++first) {
      const std::vector<int> ranks{(first + 2) % n, first};
      if (std::ranges::find(ranks, world->rank()) == ranks.end()) continue;
      const auto pair = backend(*world, ranks, "pair");
      EXPECT_EQ(ranks[static_cast<std::size_t>(pair->getRank())], world->rank());
      std::vector<at::Tensor> t{at::full({3}, 1 << world->rank(), at::kInt)};
      pair->allreduce(t, c10d::AllreduceOptions())->wait();
      EXPECT_EQ(t[0][0].item<int>(), (1 << ranks[0]) + (1 << ranks[1]));
    }
}

TEST(Mpi, WrongArgumentsAreRefusedBeforeAnythingMoves) {
  const auto group = backend(*world, all_ranks(*world));
  EXPECT_THROW(backend(*world, {}), InvalidArgument);
  EXPECT_THROW(backend(*world, {world->rank(), world->size()}), InvalidArgument);
  EXPECT_THROW(backend(*world, {world->rank(), world->rank()}), InvalidArgument);
  std::vector<at::Tensor> t{at::ones({2}, at::kLong)}, none, two{at::ones({1}), at::ones({1})};
  c10d::AllreduceOptions average;
  average.reduceOp = ReduceOp::AVG;
  EXPECT_THROW(group->allreduce(t, average), InvalidArgument);
  EXPECT_THROW(group->allreduce(none, c10d::AllreduceOptions()), InvalidArgument);
  EXPECT_THROW(group->allreduce(two, c10d::AllreduceOptions()), InvalidArgument);
  std::vector<at::Tensor> complex{at::ones({2}, at::kComplexFloat)};
  c10d::AllreduceOptions largest;
  largest.reduceOp = ReduceOp::MAX;
  EXPECT_THROW(group->allreduce(complex, largest), InvalidArgument);
  EXPECT_THROW(group->send(t, world->size(), 0), InvalidArgument);
  EXPECT_THROW(group->send(t, 0, -1), InvalidArgument);
  c10d::BroadcastOptions root;
  root.rootRank = world->size();
  EXPECT_THROW(group->broadcast(t, root), InvalidArgument);
  at::Tensor out = at::ones({3}), in = at::ones({2});
  EXPECT_THROW(group->_allgather_base(out, in, c10d::AllgatherOptions()), InvalidArgument);
  std::vector<at::Tensor> meta{at::ones({2}, at::TensorOptions().device(at::kMeta))};
  EXPECT_THROW(group->allreduce(meta, c10d::AllreduceOptions()), InvalidArgument);
  group->barrier(c10d::BarrierOptions())->wait();  // The group is as good as before.
}

TEST(Mpi, OtherThreadsFollowTheLevel) {
  const auto group = backend(*world, all_ranks(*world));
  std::string error;
  std::vector<at::Tensor> t{at::ones({2})};
  std::thread([&] {
    try {
      group->allreduce(t, c10d::AllreduceOptions())->wait();
    } catch (const Error& e) {
      error = e.what();
    }
  }).join();
  if (world->thread_level() >= MpiThreadLevel::serialized) {
    EXPECT_EQ(error, "");
    EXPECT_TRUE(t[0].eq(world->size()).all().item<bool>());
  } else {
    EXPECT_NE(error.find("thread level is " + std::string(to_string(world->thread_level()))),
              std::string::npos)
        << error;
  }
}

TEST(Mpi, ThreadsAtOnceOnGroupsOfTheirOwn) {
  if (world->thread_level() < MpiThreadLevel::multiple) GTEST_SKIP() << "needs MPI_THREAD_MULTIPLE";
  const auto one = backend(*world, all_ranks(*world)), two = backend(*world, all_ranks(*world));
  const auto work = [&](const BackendPtr& group, double value) {
    for (int i = 0; i < 50; ++i) {
      std::vector<at::Tensor> t{at::full({100}, value)};
      c10d::AllreduceOptions options;
      options.asyncOp = i % 2 == 0;
      group->allreduce(t, options)->wait();
      EXPECT_TRUE(t[0].eq(value * world->size()).all().item<bool>());
    }
  };
  std::thread other([&] { work(two, 3.0); });
  work(one, 5.0);
  other.join();
}

}  // namespace

}  // namespace tessera::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  using tessera::MpiThreadLevel;
  const std::string level = argc > 1 ? argv[1] : "funneled";
  auto wanted = MpiThreadLevel::funneled;
  for (const auto candidate :
       {MpiThreadLevel::single, MpiThreadLevel::serialized, MpiThreadLevel::multiple})
    if (level == to_string(candidate)) wanted = candidate;
  tessera::test::world = std::make_unique<tessera::MpiWorld>(tessera::MpiWorld::initialize(wanted));
  const int failed = RUN_ALL_TESTS();
  tessera::test::world.reset();
  return failed;
}
