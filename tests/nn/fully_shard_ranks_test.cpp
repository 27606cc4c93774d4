// fully_shard on ranks that are processes, over the default back end, or Gloo or MPI
// (`--backend=gloo`): drawn modules and options, equal to one process.

#include "fully_shard_case.h"
#include "tessera/comm/job/manager.h"

namespace tessera::test {

namespace {

std::optional<std::string> backend;

DistributedManager start() {
  ManagerOptions options;
  if (backend) options.backend = *backend;
  options.timeout = std::chrono::seconds(40);
  return DistributedManager::initialize(options);
}

std::vector<Axis> draw_axes(Draw& draw, int ranks) {
  if (ranks == 4 && draw.chance(70)) return {{"a", 2}, {"b", 2}};
  return draw.chance(50) ? std::vector<Axis>{{"a", 1}, {"b", ranks}}
                         : std::vector<Axis>{{"a", ranks}, {"b", 1}};
}

FullyShardOptions draw_options(Draw& draw) {
  const std::int64_t coalesced[] = {0, 600, 1500, 64 << 10};
  FullyShardOptions options{.prefetch = draw.below(3), .coalesce_bytes = coalesced[draw.below(4)]};
  if (draw.chance(40)) options.units = {"blocks.*", "first"};
  if (draw.chance(25)) options.axes = {"b"};
  switch (draw.below(3)) {
    case 0:
      options.reshard_axes = {"b"};
      break;
    case 1:
      options.reshard_after_forward = false;
      break;
    default:
      break;
  }
  if (draw.chance(30)) options.reducer.bucket_bytes = options.reducer.first_bucket_bytes = 64;
  return options;
}

// The forward of Net, with blocks that are computed again in backward.
at::Tensor forward_of(Net& net, const at::Tensor& x, bool recompute) {
  if (!recompute) return net->forward(x);
  at::Tensor h = net->first->forward(x);
  for (std::size_t i = 0; i < net->blocks->size(); ++i) {
    if (static_cast<int>(i) == net->skip) continue;
    auto block = net->blocks->ptr<torch::nn::SequentialImpl>(i);
    h = h + Recomputed::apply(
                h, Recomputed::Body([block](const at::Tensor& y) { return block->forward(y); }));
  }
  return h.matmul(net->last) * net->scale + net->bias;
}

}  // namespace

TEST(FullyShardProcesses, TrainsLikeOneProcess) {
  auto manager = start();
  const int ranks = manager.world_size();
  Draw draw(41);
  seed(7);
  for (int round = 0; round < 6; ++round) {
    const auto mesh = manager.mesh(draw.mapped(draw_axes(draw, ranks)));
    const NetImpl::Shape shape{draw.between(1, 6), draw.between(4, 9), draw.between(1, 5),
                               draw.between(1, 4), draw.chance(50)};
    Net net = net_of(shape), expected = net_of(shape);
    const int frozen = draw.chance(30) ? draw.below(shape.blocks) : -1;
    if (frozen >= 0) {
      for (Net* n : {&net, &expected})
        for (auto& p : (*n)->blocks->ptr(frozen)->parameters()) p.set_requires_grad(false);
    }
    fully_shard(*net, mesh, draw_options(draw));
    const auto adam = torch::optim::AdamWOptions(0.01).eps(1e-3);
    torch::optim::AdamW opt(once(*net), adam), expected_opt(once(*expected), adam);
    for (int step = 0; step < 4; ++step) {
      const std::string where =
          concat("round ", round, " on ", mesh.mesh().to_string(), " step ", step);
      net->twice = expected->twice = draw.chance(25) ? 0 : -1;
      net->skip = expected->skip = draw.chance(20) ? draw.below(shape.blocks) : -1;
      const bool recompute = draw.chance(30);
      opt.zero_grad();
      expected_opt.zero_grad();
      const int parts = draw.between(1, 3);
      for (int part = 0; part < parts; ++part) {
        const at::Tensor x = randn({draw.between(1, 6), shape.in}, at::kDouble);
        const at::Tensor wanted = loss_of(forward_of(expected, x, recompute));
        wanted.backward();
        const std::optional<NoSync> scope =
            part + 1 < parts && step % 2 == 1 ? std::optional(no_sync(*net)) : std::nullopt;
        const at::Tensor loss = loss_of(forward_of(net, sharded(draw, x, mesh), recompute));
        EXPECT_LT(difference(loss, wanted), 1e-10) << where;
        loss.backward();
        Recomputed::bodies().clear();
      }
      expect_same(*net, *expected, where);
      expected_opt.step();
      opt.step();
      if (draw.chance(50)) {
        const at::NoGradGuard no_grad;
        const at::Tensor x = randn({3, shape.in}, at::kDouble);
        EXPECT_LT(difference(net->forward(sharded(draw, x, mesh)), expected->forward(x)), 1e-10)
            << where;
      }
    }
    expect_same(*net, *expected, concat("round ", round), false);
  }
  manager.shutdown();
}

}  // namespace tessera::test

int main(int argc, char** argv) {
  at::set_num_threads(1);
  ::testing::InitGoogleTest(&argc, argv);
  const std::string name = "--backend=";
  for (int i = 1; i < argc; ++i) {
    if (const std::string argument = argv[i]; argument.starts_with(name))
      tessera::test::backend = argument.substr(name.size());
  }
  return RUN_ALL_TESTS();
}
