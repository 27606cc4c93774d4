// The winds example on several ranks against the same on one: statistics, batches and loss curve, in float64.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>
#include <optional>

#include "skill.h"
#include "tessera/comm/manager.h"
#include "tessera/data/netcdf_source.h"
#include "training.h"

namespace winds {
namespace {

std::optional<tessera::DistributedManager> manager;

struct Curve {
  std::vector<double> losses;
  std::vector<at::Tensor> weights;
};

Curve curve(const WindsData& data, const tessera::Group& group, std::int64_t epochs) {
  Curve result;
  TrainingOptions options{.seed = 3, .epochs = epochs, .network = {.hidden = 4, .layers = 2}};
  WindNet network = train(data, group, options, [&](const Step& step, WindNet&) { result.losses.push_back(step.loss); });
  for (const auto& p : network->parameters()) result.weights.push_back(p.detach());
  return result;
}

void compare(std::int64_t strata, std::int64_t epochs) {
  const tessera::NetcdfSource source(WINDS_DATA);
  const tessera::Group world = manager->world(), alone;
  const WindsData mine(source, world, 36, strata, at::kDouble), all(source, alone, 36, strata, at::kDouble);

  EXPECT_TRUE(at::allclose(mine.statistics().climatology, all.statistics().climatology, 0, 1e-12));
  EXPECT_TRUE(at::allclose(mine.statistics().point_damping, all.statistics().point_damping, 1e-9, 1e-12));
  EXPECT_TRUE(at::allclose(mine.statistics().sigma, all.statistics().sigma, 1e-12, 0));

  const at::Tensor samples = at::tensor({mine.own_samples().count()}, at::kLong);
  world.all_reduce(samples);
  EXPECT_EQ(samples.item<std::int64_t>(), 35);
  const at::Tensor in_batch = at::tensor({WindsData::samples_of(mine.loader(1)->next()).input.size(0)}, at::kLong);
  world.all_reduce(in_batch);
  EXPECT_EQ(in_batch.item<std::int64_t>(), strata);
  if (world.size() > 1) EXPECT_LT(mine.months_read(), 36);

  const Curve together = curve(mine, world, epochs), single = curve(all, alone, epochs);
  ASSERT_EQ(together.losses.size(), single.losses.size());
  for (std::size_t i = 0; i < single.losses.size(); ++i) EXPECT_NEAR(together.losses[i], single.losses[i], 1e-10 * single.losses[i]) << "step " << i;
  for (std::size_t p = 0; p < single.weights.size(); ++p)
    EXPECT_TRUE(at::allclose(together.weights[p], single.weights[p], 1e-7, 1e-9)) << "parameter " << p;
  // It did learn: an epoch has the same samples as another, in other batches.
  const auto each = static_cast<std::ptrdiff_t>(single.losses.size()) / epochs;
  const double first = std::accumulate(single.losses.begin(), single.losses.begin() + each, 0.0),
               last = std::accumulate(single.losses.end() - each, single.losses.end(), 0.0);
  if (epochs > 1) EXPECT_LT(last, 0.999 * first);
}

TEST(WindsRanks, SameLossCurveOnAnyNumberOfRanks) { compare(7, 4); }

// Fewer runs of months than ranks: the last ranks have no sample at all, and take part.
TEST(WindsRanks, RanksWithoutSamples) { compare(2, 1); }

TEST(WindsRanks, ForecastsOfAllRanksTogether) {
  const tessera::NetcdfSource source(WINDS_DATA);
  const tessera::Group world = manager->world();
  const WindsData data(source, world, 36, 7, at::kFloat);
  for (const Months whole : {Months{40, 47}, Months{40, 42}}) {
    const auto parts = baselines(data, part_of(whole, world.rank(), world.size())), all = baselines(data, whole);
    for (std::size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(at::equal(gather_months(parts[i].winds, whole, world), all[i].winds)) << all[i].name;
  }
}

}  // namespace
}  // namespace winds

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  winds::manager = tessera::DistributedManager::initialize();
  const int failed = RUN_ALL_TESTS();
  winds::manager.reset();
  return failed;
}
