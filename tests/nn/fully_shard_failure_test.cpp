// fully_shard: after an error that one rank alone saw and all caught, steps equal one process.

#include <torch/csrc/autograd/engine.h>

#include "fully_shard_case.h"

namespace tessera::test::fully_shard_failure_test {

namespace {

using Between = std::function<at::Tensor(int, const at::Tensor&)>;

// NetImpl::forward(), with a call before each block.
at::Tensor run(Net& net, const at::Tensor& x, bool recompute, const Between& between) {
  at::Tensor h = net->first->forward(x);
  for (std::size_t i = 0; i < net->blocks->size(); ++i) {
    h = between(static_cast<int>(i), h);
    auto block = net->blocks->ptr<torch::nn::SequentialImpl>(i);
    const Recomputed::Body body = [block](const at::Tensor& y) { return block->forward(y); };
    h = h + (recompute ? Recomputed::apply(h, body) : body(h));
  }
  return h.matmul(net->last) * net->scale + net->bias;
}

at::Tensor run(Net& net, const at::Tensor& x, bool recompute) {
  return run(net, x, recompute, [](int, const at::Tensor& h) { return h; });
}

// Fails on one rank alone; the others go on without a word.
void look_up(const DeviceMesh& mesh, int bad) {
  const int ranks = mesh.mesh().size();
  at::Tensor index = at::zeros({ranks, 1}, at::kLong);
  index[bad][0] = 7;
  const std::vector<Placement> rows(mesh.mesh().dims(), Shard(0));
  at::gather(distribute_tensor(at::ones({ranks, 3}, at::kDouble), mesh, rows), 1,
             distribute_tensor(index, mesh, rows));
}

// Where in a step the rank fails.
// `reduction`: when backward has computed all, before gradients have come together.
enum class At : char { begin, forward, loss, backward, reduction, evaluation };

void fail_at(At at, Net& net, const at::Tensor& x, bool recompute,
             const std::function<void()>& fail) {
  if (at == At::begin) fail();
  if (at == At::evaluation) {
    const at::NoGradGuard no_grad;
    run(net, x, false, [&](int i, const at::Tensor& h) {
      if (i == 1) fail();
      return h;
    });
  }
  const at::Tensor loss = loss_of(run(net, x, recompute, [&](int i, const at::Tensor& h) {
    if (i != 1) return h;
    if (at == At::forward) fail();
    if (at == At::backward)
      h.register_hook([&](const at::Tensor& g) {
        fail();
        return g;
      });
    return h;
  }));
  if (at == At::loss) fail();
  if (at == At::reduction)
    loss.register_hook([&](const at::Tensor& g) {
      torch::autograd::Engine::get_default_engine().queue_callback(fail);
      return g;
    });
  loss.backward();
}

struct Case {
  const char* name;
  std::vector<Axis> axes;
  FullyShardOptions options = {};
  bool recompute = false;
  const char* backend = "threads";
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class FullyShardFailure : public ::testing::TestWithParam<Case> {};

TEST_P(FullyShardFailure, OfOneRankLeavesStepsAsInOneProcess) {
  const Case& c = GetParam();
  const auto body = [&](DistributedManager& manager) {
    at::set_num_threads(1);
    seed(0);
    set_policies(manager, {.redistribution = Policy::error});
    const auto mesh = manager.mesh(c.axes);
    const std::vector<Placement> rows(mesh.mesh().dims(), Shard(0));
    const int ranks = mesh.mesh().size();
    for (const int learnt : {0, 1}) {
      Net net = net_of({}), expected = net_of({});
      fully_shard(*net, mesh, c.options);
      const auto step = [&](const std::string& where) {
        for (Net* n : {&net, &expected})
          for (auto& p : (*n)->parameters()) p.mutable_grad().reset();
        const at::Tensor x = randn({6, 5}, at::kDouble);
        const at::Tensor wanted = loss_of(run(expected, x, c.recompute));
        const at::Tensor loss = loss_of(run(net, distribute_tensor(x, mesh, rows), c.recompute));
        EXPECT_LT(difference(loss, wanted), 1e-10) << where;
        wanted.backward();
        loss.backward();
        expect_same(*net, *expected, where);
        const at::NoGradGuard no_grad;
        for (Net* n : {&net, &expected})
          for (auto& p : once(**n)) p.sub_(p.grad(), 0.05);
        const at::Tensor y = run(net, distribute_tensor(x, mesh, rows), false);
        EXPECT_LT(difference(y, run(expected, x, false)), 1e-10) << where;
      };
      for (int i = 0; i < learnt; ++i) step("before");
      int bad = ranks - 1;
      const std::vector<At> all[] = {
          {At::reduction, At::begin},
          {At::begin, At::loss, At::backward, At::forward, At::evaluation}};
      for (const At at : all[learnt]) {
        const std::string where =
            concat(c.name, " failed at ", static_cast<int>(at), " after ", learnt, " on ", bad);
        const at::Tensor x = randn({6, 5}, at::kDouble);
        bool own = false, peer = false;
        try {
          fail_at(at, net, distribute_tensor(x, mesh, rows), c.recompute,
                  [&] { look_up(mesh, bad); });
          mesh.all().barrier();
        } catch (const PeerFailedError&) {
          peer = true;
        } catch (const std::exception&) {
          own = true;
        }
        mesh.all().barrier();
        EXPECT_EQ(own, manager.rank() == bad) << where;
        EXPECT_EQ(peer, manager.rank() != bad) << where;
        // Two failures without a step between them, too.
        for (int i = 0; i < (at == At::backward ? 0 : 2); ++i) step(where);
        bad = (bad + 1) % ranks;
      }
      Recomputed::bodies().clear();
    }
  };
  run_threads(Mesh(c.axes).size(), body,
              {.backend = c.backend, .timeout = std::chrono::seconds(20)});
}

INSTANTIATE_TEST_SUITE_P(
    With, FullyShardFailure,
    ::testing::Values(
        Case{"defaults", {{"x", 2}}}, Case{"recomputation", {{"x", 2}}, {}, true},
        Case{"gathered", {{"x", 2}}, {.reshard_after_forward = false}},
        Case{"alone", {{"x", 3}}, {.prefetch = 2, .coalesce_bytes = 0}},
        Case{"without_prefetch", {{"x", 3}}, {.prefetch = 0}, true},
        Case{"smaller_group", {{"a", 2}, {"b", 2}}, {.reshard_axes = {"b"}}},
        Case{"replicated",
             {{"a", 2}, {"b", 2}},
             {.axes = {"b"}, .reducer = {.first_bucket_bytes = 64, .bucket_bytes = 64}}},
        // The first rank sends the order that it has learnt.
        Case{"order_of_buckets",
             {{"x", 2}},
             {.coalesce_bytes = 0,
              .reducer = {.first_bucket_bytes = 64, .bucket_bytes = 64, .learn_order = true}},
             false,
             "gloo"}),
    [](const auto& info) { return info.param.name; });

// What is held by hand is held again.
TEST(FullyShardHeld, IsGatheredAgainAfterAFailure) {
  on_threads(2, [](DistributedManager& manager) {
    const auto mesh = manager.mesh({{"x", 2}});
    Net net = net_of({}), expected = net_of({});
    fully_shard(*net, mesh);
    const at::Tensor x = randn({6, 5}, at::kDouble);
    const auto same = [&] {
      const at::Tensor y = run(net, distribute_tensor(x, mesh, {Shard(0)}), false);
      EXPECT_LT(difference(y, run(expected, x, false)), 1e-10);
    };
    for (int bad : {0, 1}) {
      gather_parameters(*net);
      try {
        fail_at(At::begin, net, distribute_tensor(x, mesh, {Shard(0)}), false,
                [&] { look_up(mesh, bad); });
        mesh.all().barrier();
        ADD_FAILURE();
      } catch (const std::exception&) {
      }
      mesh.all().barrier();
      same();
      release_parameters(*net);
      same();
    }
  });
}

}  // namespace

}  // namespace tessera::test::fully_shard_failure_test
