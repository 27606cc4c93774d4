// ParallelGroups, on ranks as threads.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <random>
#include <stdexcept>

#include "tessera/base/text.h"
#include "tessera/comm/job/parallel_groups.h"
#include "tessera/comm/job/threads.h"

namespace tessera::parallel_groups_test {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error(what);
}

/// Runs `body` on threads with the groups of these sizes.
void run_parallel(int ranks, int model, int pipeline,
                  const std::function<void(DistributedManager&, const ParallelGroups&)>& body) {
  run_threads(ranks, [&](DistributedManager& manager) {
    const ParallelGroups groups(manager, {.model = model, .pipeline = pipeline});
    body(manager, groups);
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
        const auto at = std::ranges::find(ranks, me);
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
      info->all_reduce(sum);
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
                     Request request = info->start_all_reduce(count);
                     request.wait();
                     require(count.item<std::int64_t>() == info->world_size, "a started reduce");
                   }
                 });
  }
}

TEST(ParallelGroups, WrongSizesAreErrors) {
  run_threads(4, [](DistributedManager& manager) {
    for (const auto& [model, pipeline] :
         std::vector<std::pair<int, int>>{{3, 1}, {2, 4}, {0, 1}, {1, -1}, {8, 1}}) {
      bool refused = false;
      try {
        ParallelGroups(manager, {.model = model, .pipeline = pipeline});
      } catch (const ParallelismError& error) {
        refused = std::string(error.what()).find(std::to_string(model)) != std::string::npos;
      }
      require(refused, concat("sizes ", model, " and ", pipeline, " were taken"));
    }
    // Different numbers on one rank, or different options.
    for (const bool limit : {false, true}) {
      ParallelOptions options{.model = !limit && manager.rank() == 2 ? 4 : 2};
      if (limit && manager.rank() == 1) options.data_group.timeout = std::chrono::seconds(7);
      std::string what;
      try {
        const ParallelGroups groups(manager, options);
      } catch (const MismatchError& error) {
        what = error.what();
      }
      require(what.find(limit ? "data groups" : "model") != std::string::npos,
              concat("differing options were taken: ", what));
    }
  });
}

TEST(ParallelGroups, AreTheManagersGroupsAndItsMesh) {
  run_threads(8, [](DistributedManager& manager) {
    const ParallelGroups groups(manager, {.model = 2, .pipeline = 2});
    require(groups.mesh.mesh().names() == std::vector<std::string>{"dp", "pp", "mp"}, "axes");
    require(groups.mesh.group("mp").state() == groups.mp.group.state(), "made twice");
    require(manager.group(groups.pp.global_ranks).state() == groups.pp.group.state(), "made twice");
    require(groups.mesh.all().state() == groups.world.group.state(), "the world was made twice");
    // Two values at a time, of other sizes; what they share is shared.
    const ParallelGroups wider(manager, {.model = 4});
    require(wider.mp.world_size == 4 && groups.mp.world_size == 2, "two values");
    require(wider.world.group.state() == groups.world.group.state(), "the world was made twice");
    if (manager.rank() == 5) {
      const std::string line = groups.summary();
      require(line ==
                  "8 ranks: data 2 x pipeline 2 x model 2; rank 5: data 1 of [1, 5], pipeline 0 "
                  "of [5, 7], model 1 of [4, 5]",
              line);
    }
    groups.world.group.barrier();  // no rank shuts down while others compare
    manager.shutdown();
    bool dead = false;
    try {
      groups.mp.group.barrier();
    } catch (const CommError&) {
      dead = true;
    }
    require(dead, "shutdown left the group alive");
    const ParallelGroups again(manager, {.model = 1, .pipeline = 4});
    require(again.pp.world_size == 4, "after shutdown");
  });
}

TEST(ParallelGroups, EachKindHasItsOptions) {
  run_threads(4, [](DistributedManager& manager) {
    ParallelOptions options{.model = 2};
    options.model_group.timeout = std::chrono::milliseconds(54321);
    const ParallelGroups groups(manager, options);
    require(groups.mp.group.timeout() == std::chrono::milliseconds(54321), "the model's limit");
    require(groups.dp.group.timeout() != std::chrono::milliseconds(54321), "the data's limit");
    require(groups.mesh.group("mp").state() == groups.mp.group.state(), "made twice");
  });
}

TEST(ParallelGroups, ReduceRefusesATensorOfAGraph) {
  run_parallel(2, 2, 1, [](DistributedManager&, const ParallelGroups& groups) {
    const at::Tensor weight = at::ones({3}).requires_grad_();
    for (const at::Tensor& tensor : {weight, weight * 2}) {
      std::string what;
      try {
        groups.mp.all_reduce(tensor);
      } catch (const InvalidArgument& error) {
        what = error.what();
      }
      require(what.find("functional::all_reduce") != std::string::npos, what);
    }
    const at::Tensor detached = weight.detach().clone();
    groups.mp.all_reduce(detached);
    require(detached.equal(at::full({3}, 2.)), "a detached tensor");
    const at::NoGradGuard no_grad;
    groups.mp.all_reduce(weight);
  });
}

TEST(ParallelGroups, GatherToOneRank) {
  run_parallel(3, 3, 1, [](DistributedManager&, const ParallelGroups& groups) {
    const std::vector<std::int64_t> sizes{0, 5, 2};
    for (int root = 0; root < 3; ++root) {
      const at::Tensor mine = at::full({2, sizes[groups.mp.rank]}, groups.mp.rank, at::kFloat);
      const at::Tensor all = root == 1 ? groups.mp.start_gather_to(root, mine, 1).wait()
                                       : groups.mp.gather_to(root, mine, 1);
      require(all.defined() == (groups.mp.rank == root), "defined on the root alone");
      if (all.defined())
        require(all.equal(at::tensor({1., 1., 1., 1., 1., 2., 2.}).to(at::kFloat).expand({2, 7})),
                "values");
    }
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
        require(groups.mp.all_gather(mine, dim).equal(whole),
                concat("gather of ", list(shape), " along ", dim));
        Pending<at::Tensor> pending =
            groups.mp.start_all_gather(mine, dim - static_cast<std::int64_t>(shape.size()));
        require(pending.wait().equal(whole), "a started gather");
        require(pending.done() && pending.wait().equal(whole), "waited for again");
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
        groups.mp.all_gather(at::full({2, sizes[groups.mp.rank]}, groups.mp.rank, at::kFloat), 1);
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
        at::Tensor y = parallel ? groups.mp.all_gather(groups.mp.split(x).pow(3)) : x.pow(3);
        at::Tensor loss = (y * weights).sum();
        loss.backward();
        return std::pair(loss.detach(), x.grad());
      };
      const auto [loss, gradient] = run(true);
      const auto [expected_loss, expected_gradient] = run(false);
      require(loss.equal(expected_loss), "loss");
      require(gradient.defined() && at::allclose(gradient, expected_gradient, 1e-14, 1e-14),
              "gradient");
      // Along the other dim, and started.
      at::Tensor x = values.clone().requires_grad_();
      Pending<at::Tensor> pending = groups.mp.start_all_gather(groups.mp.split(x, 1).exp(), 1);
      (pending.wait() * weights).sum().backward();
      require(at::allclose(x.grad(), values.exp() * weights, 1e-14, 1e-14), "gradient along dim 1");
    });
  }
}

}  // namespace
}  // namespace tessera::parallel_groups_test
