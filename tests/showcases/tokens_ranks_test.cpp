// The tokens example on several ranks against the same on one: the loss curve in float64, stopped
// and resumed.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>

#include "tessera/base/text.h"
#include "tessera/comm/job/manager.h"
#include "tessera/train/strategies.h"
#include "training.h"

namespace tokens {
namespace {

std::optional<tessera::DistributedManager> manager;

using Strategy = std::shared_ptr<tessera::Strategy>;

Strategy all_ranks() { return std::make_shared<tessera::DDPStrategy>(*manager); }
Strategy one_rank() { return std::make_shared<tessera::SingleDevice>(); }

std::vector<double> curve(const Strategy& strategy, const Options& options) {
  std::vector<double> losses;
  train(strategy, options, [&](const Step& step) { losses.push_back(step.loss); });
  return losses;
}

void expect_close(const std::vector<double>& a, const std::vector<double>& b,
                  std::size_t from = 0) {
  ASSERT_EQ(a.size() + from, b.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    EXPECT_NEAR(a[i], b[i + from], 1e-10 * b[i + from]) << "step " << i + from;
}

// A batch of 7 over up to three ranks, 30 steps an epoch, the last of one sample; a batch of 2, of
// which a third rank has none.
TEST(TokensRanks, SameLossCurveOnAnyNumberOfRanksAndAfterStopping) {
  const tessera::Group world = manager->world();
  // One folder for all ranks of a run.
  const auto folder = std::filesystem::path(world.broadcast_bytes(
      world.rank() == 0 ? tessera::concat(::testing::TempDir(), "tessera_tokens_", ::getpid())
                        : std::string(),
      0));
  if (world.rank() == 0) {
    // The beginning of the text, so that an epoch is short.
    std::filesystem::create_directories(folder);
    std::string text(20401, ' ');
    std::ifstream(TOKENS_DATA).read(text.data(), 20401);
    std::ofstream(folder / "text") << text;
  }
  world.barrier();
  Options options{.text = (folder / "text").string(),
                  .checkpoint = "",
                  .row = 100,
                  .batch = 7,
                  .steps = 34,
                  .save_every = 9,
                  .hidden = 8,
                  .float64 = true};
  const auto data = samples(options);
  ASSERT_EQ(data->size(), 204u);
  const auto alone = curve(one_rank(), options), together = curve(all_ranks(), options);
  expect_close(together, alone);
  EXPECT_LT(alone.back(), 0.9 * alone.front());

  Options stopped = options;
  stopped.checkpoint = (folder / "checkpoint").string();
  stopped.steps = 11;
  expect_close(curve(all_ranks(), stopped), std::vector<double>(alone.begin(), alone.begin() + 11));
  // On by one rank for a while, with Adam's moments, and by all again.
  world.barrier();
  stopped.steps = 20;
  if (world.rank() == 0)
    expect_close(curve(one_rank(), stopped), std::vector<double>(alone.begin(), alone.begin() + 20),
                 11);
  world.barrier();
  stopped.steps = 34;
  expect_close(curve(all_ranks(), stopped), alone, 20);

  options.batch = 2;
  options.steps = 4;
  expect_close(curve(all_ranks(), options), curve(one_rank(), options));
  world.barrier();
  if (world.rank() == 0) std::filesystem::remove_all(folder);
}

TEST(TokensRanks, ATextThatIsNotAsciiIsRefused) {
  const std::string path =
      tessera::concat(::testing::TempDir(), "tessera_tokens_latin_", ::getpid());
  std::ofstream(path) << std::string(500, '\xe9');
  EXPECT_THROW(
      curve(one_rank(), {.text = path, .checkpoint = "", .row = 10, .steps = 2, .hidden = 4}),
      tessera::InvalidArgument);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace tokens

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  tokens::manager = tessera::DistributedManager::initialize();
  const int failed = RUN_ALL_TESTS();
  tokens::manager.reset();
  return failed;
}
