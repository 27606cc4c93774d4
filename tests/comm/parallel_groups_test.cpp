// init_parallelism and its groups, on ranks as threads.

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <random>
#include <stdexcept>

#include "tessera/base/text.h"
#include "tessera/comm/job/parallel_groups.h"
#include "tessera/comm/job/threads.h"

namespace tessera {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error(what);
}

/// Runs `body` on threads with parallelism initialized, and ends it.
void run_parallel(int ranks, int model, int pipeline,
                  const std::function<void(DistributedManager&, const ParallelGroups&)>& body) {
  run_threads(ranks, [&](DistributedManager& manager) {
    set_current_manager(manager);
    body(manager, init_parallelism(model, pipeline));
    reset_parallelism();
    clear_current_manager();
  });
}

TEST(ParallelGroups, EightRanksByTwoAndTwo) {
  const std::vector<std::vector<int>> model{{0, 1}, {2, 3}, {4, 5}, {6, 7}},
      pipeline{{0, 2}, {1, 3}, {4, 6}, {5, 7}}, data{{0, 4}, {1, 5}, {2, 6}, {3, 7}};
  run_parallel(8, 2, 2, [&](DistributedManager& manager, const ParallelGroups& groups) {
    const int me = manager.rank();
    for (const auto& [info, lists] :
         {std::pair(&groups.mp, &model), std::pair(&groups.pp, &pipeline),
          std::pair(&groups.dp, &data)}) {
      int found = 0;
      for (const auto& ranks : *lists) {
        const auto at = std::find(ranks.begin(), ranks.end(), me);
        if (at == ranks.end()) continue;
        ++found;
        require(info->global_ranks == ranks && info->group.ranks() == ranks,
                concat("rank ", me, " is in ", list(info->global_ranks)));
        require(info->rank == at - ranks.begin() && info->group.rank() == info->rank,
                "rank in the group");
        require(info->world_size == 2, "size");
      }
      require(found == 1, "each rank is in one group of each kind");
      const at::Tensor sum = at::full({1}, me, at::kLong);
      info->reduce(sum);
      require(sum.item<std::int64_t>() == info->global_ranks[0] + info->global_ranks[1], "sum");
    }
    require(groups.world.world_size == 8 && groups.world.rank == me, "default group");
  });
}

TEST(ParallelGroups, AnySizesThatDivideTheWorld) {
  for (const auto& [world, model, pipeline] : std::vector<std::array<int, 3>>{
           {1, 1, 1}, {2, 2, 1}, {3, 1, 3}, {4, 2, 2}, {4, 1, 2}, {6, 3, 1}, {6, 2, 3}}) {
    run_parallel(world, model, pipeline,
                 [&, world = world, model = model, pipeline = pipeline](
                     DistributedManager&, const ParallelGroups& groups) {
                   require(groups.mp.world_size == model && groups.pp.world_size == pipeline &&
                               groups.dp.world_size == world / model / pipeline,
                           "sizes");
                   for (const GroupInfo* info : {&groups.mp, &groups.pp, &groups.dp}) {
                     const at::Tensor count = at::ones({1}, at::kLong);
                     Request request = info->reduce(count, ReduceOp::sum, true);
                     request.wait();
                     require(count.item<std::int64_t>() == info->world_size, "asynchronous reduce");
                   }
                 });
  }
}

TEST(ParallelGroups, WrongSizesAndWrongOrderAreErrors) {
  run_threads(4, [](DistributedManager& manager) {
    auto fails = [](const std::function<void()>& call) {
      try {
        call();
      } catch (const ParallelismError&) {
        return true;
      }
      return false;
    };
    require(!parallelism_is_initialized(), "nothing yet");
    require(fails([] { parallelism(); }), "parallelism() before init");
    set_current_manager(manager);
    for (const auto& [model, pipeline] :
         std::vector<std::pair<int, int>>{{3, 1}, {2, 4}, {0, 1}, {1, -1}, {8, 1}})
      require(fails([&, m = model, p = pipeline] { init_parallelism(m, p); }),
              concat("sizes ", model, " and ", pipeline, " were taken"));
    init_parallelism(2, 1);
    require(parallelism_is_initialized() && parallelism().mp.world_size == 2, "initialized");
    require(fails([] { init_parallelism(2, 1); }), "a second init");
    require(fails([] { clear_current_manager(); }), "the manager was given up");
    const Group model = parallelism().mp.group, mine = manager.group(model.ranks());
    reset_parallelism();
    reset_parallelism();
    require(!parallelism_is_initialized(), "after reset");
    bool dead = false;
    try {
      model.barrier();
    } catch (const CommError&) {
      dead = true;
    }
    require(dead, "reset left the group alive");
    mine.barrier();  // the manager's own group of the same ranks is not touched
    // Different numbers on one rank.
    bool differs = false;
    try {
      init_parallelism(manager.rank() == 2 ? 4 : 2, 1);
    } catch (const MismatchError& error) {
      differs = std::string(error.what()).find("model") != std::string::npos;
    }
    require(differs, "different numbers were taken");
    manager.shutdown();
    init_parallelism(1, 4);
    require(parallelism().pp.world_size == 4, "after shutdown");
    reset_parallelism();
    clear_current_manager();
  });
}

TEST(ParallelGroups, GatherIsTheInverseOfSplitForAnySize) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_parallel(ranks, ranks, 1, [&](DistributedManager&, const ParallelGroups& groups) {
      std::mt19937 random(5);
      for (int round = 0; round < 30; ++round) {
        std::vector<std::int64_t> shape;
        for (int dims = 1 + static_cast<int>(random() % 3); dims > 0; --dims)
          shape.push_back(random() % 8);
        const auto dim = static_cast<std::int64_t>(random() % shape.size());
        std::int64_t n = 1;
        for (const auto size : shape) n *= size;
        at::Tensor whole = at::arange(n, at::kDouble).view(shape);
        if (shape.size() > 1 && random() % 2)
          whole = whole.transpose(0, 1).contiguous().transpose(0, 1);
        const at::Tensor mine = groups.mp.split(whole, dim);
        require(mine.equal(whole.tensor_split(ranks, dim)[groups.mp.rank]), "split");
        require(groups.mp.gather(mine, dim).wait().equal(whole),
                concat("gather of ", list(shape), " along ", dim));
        PendingTensor pending =
            groups.mp.gather(mine, dim - static_cast<std::int64_t>(shape.size()), true);
        require(pending.tensor.sizes() == whole.sizes(), "the shape of a pending tensor");
        require(pending.wait().equal(whole), "asynchronous gather");
      }
      bool refused = false;
      try {
        groups.mp.split(at::ones({2}), 1);
      } catch (const InvalidArgument&) {
        refused = true;
      }
      require(refused, "a dim out of range");
    });
  }
}

TEST(ParallelGroups, GatherTakesAnySizes) {
  run_parallel(3, 3, 1, [](DistributedManager&, const ParallelGroups& groups) {
    const std::vector<std::int64_t> sizes{0, 5, 2};
    const at::Tensor all =
        groups.mp.gather(at::full({2, sizes[groups.mp.rank]}, groups.mp.rank, at::kFloat), 1)
            .wait();
    require(all.equal(at::tensor({1., 1., 1., 1., 1., 2., 2.}).to(at::kFloat).expand({2, 7})),
            "uneven gather");
  });
}

TEST(ParallelGroups, SplitAndGatherAreDifferentiable) {
  for (const int ranks : {2, 3}) {
    run_parallel(ranks, ranks, 1, [&](DistributedManager&, const ParallelGroups& groups) {
      // A network that splits its input, works on the slice, and gathers: values and gradients as
      // without any split.
      const at::Tensor values = at::arange(14, at::kDouble).view({7, 2}) / 7;
      const at::Tensor weights = at::arange(14, at::kDouble).view({7, 2}).sin();
      auto run = [&](bool parallel) {
        at::Tensor x = values.clone().requires_grad_();
        at::Tensor y = parallel ? groups.mp.gather(groups.mp.split(x).pow(3)).wait() : x.pow(3);
        at::Tensor loss = (y * weights).sum();
        loss.backward();
        return std::pair(loss.detach(), x.grad());
      };
      const auto [loss, gradient] = run(true);
      const auto [expected_loss, expected_gradient] = run(false);
      require(loss.equal(expected_loss), "loss");
      require(gradient.defined() && at::allclose(gradient, expected_gradient, 1e-14, 1e-14),
              "gradient");
      // Along the other dim, and asynchronously.
      at::Tensor x = values.clone().requires_grad_();
      PendingTensor pending = groups.mp.gather(groups.mp.split(x, 1).exp(), 1, true);
      (pending.wait() * weights).sum().backward();
      require(at::allclose(x.grad(), values.exp() * weights, 1e-14, 1e-14), "gradient along dim 1");
    });
  }
}

}  // namespace
}  // namespace tessera
