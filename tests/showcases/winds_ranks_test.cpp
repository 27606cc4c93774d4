// The winds example on several ranks, samples and latitudes cut over every mesh that they can form,
// against the same on one: statistics, batches, loss curve and skill, in float64; and what each
// rank reads.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>
#include <optional>

#include "skill.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/data/sources/netcdf_source.h"
#include "tessera/tensor/shard_tensor.h"
#include "training.h"

namespace winds {
namespace {

std::optional<tessera::DistributedManager> manager;

std::vector<tessera::DeviceMesh> meshes() {
  const int ranks = manager->world_size();
  std::vector<tessera::DeviceMesh> all;
  for (int data = 1; data <= ranks; ++data)
    if (ranks % data == 0) all.push_back(manager->mesh({{"data", data}, {"domain", ranks / data}}));
  return all;
}

tessera::DeviceMesh alone() {
  return manager->mesh(tessera::Mesh({{"data", 1}, {"domain", 1}}, {manager->rank()}));
}

// Passes reads on, and refuses winds of latitudes that are not this rank's.
class Watched : public tessera::Source {
 public:
  explicit Watched(const tessera::Source& source) : source_(source) {}
  std::string name() const override { return source_.name(); }
  std::vector<std::string> variables() const override { return source_.variables(); }
  const tessera::VariableInfo& info(const std::string& variable) const override {
    return source_.info(variable);
  }
  mutable std::int64_t winds = 0, south = 1000, north = 0;

 protected:
  at::Tensor read_box(const tessera::VariableInfo& variable, const tessera::Hyperslab& slab,
                      const tessera::ReadOptions& options) const override {
    if (variable.shape.size() == 3) {
      winds += slab.count[0] * slab.count[1] * slab.count[2];
      south = std::min(south, slab.start[1]);
      north = std::max(north, slab.start[1] + slab.count[1]);
    }
    return source_.read(variable.name, slab, options);
  }

 private:
  const tessera::Source& source_;
};

const TrainingOptions kTraining{.seed = 3, .epochs = 1, .network = {.hidden = 4, .layers = 2}};

struct Curve {
  std::vector<double> losses;
  std::vector<at::Tensor> weights;
  std::vector<Skill> skills;
};

Curve curve(const WindsData& data, std::int64_t epochs) {
  Curve result;
  TrainingOptions options = kTraining;
  options.epochs = epochs;
  WindNet network =
      train(data, options, [&](const Step& step) { result.losses.push_back(step.loss); });
  for (const auto& p : network->parameters())
    result.weights.push_back(tessera::full_tensor(p.detach()));
  const Months test{36, 41};
  const at::Tensor truth = data.whole(data.read(data.own(test)), test);
  std::vector<Forecast> forecasts = baselines(data, data.own(test));
  forecasts.push_back({"network", forecast(network, data, test)});
  for (Forecast& f : forecasts) f.winds = data.whole(f.winds, test);
  for (const Forecast& f : forecasts) result.skills.push_back(skill_of(f, truth, data.latitude()));
  return result;
}

std::int64_t over_ranks(std::int64_t mine) {
  const at::Tensor sum = at::tensor({mine}, at::kLong);
  manager->world().all_reduce(sum);
  return sum.item<std::int64_t>();
}

void compare(const tessera::DeviceMesh& mesh, std::int64_t strata, std::int64_t epochs) {
  SCOPED_TRACE(mesh.mesh().to_string());
  const tessera::NetcdfSource file(WINDS_DATA);
  const Watched watched(file);
  const WindsData mine(watched, mesh, 36, strata, at::kDouble),
      all(file, alone(), 36, strata, at::kDouble);
  const Owned owned = mine.owned();
  const auto rows = [&](const at::Tensor& t) {
    return t.slice(-2, owned.rows.begin, owned.rows.end);
  };

  EXPECT_TRUE(
      at::allclose(mine.statistics().climatology, rows(all.statistics().climatology), 0, 1e-12));
  EXPECT_TRUE(at::allclose(mine.statistics().point_damping, rows(all.statistics().point_damping),
                           1e-9, 1e-12));
  EXPECT_TRUE(at::allclose(mine.statistics().sigma, all.statistics().sigma, 1e-12, 0));

  // Every sample of every latitude is somebody's, and nobody reads another's latitudes.
  EXPECT_EQ(over_ranks(owned.samples.count() * owned.rows.size()), 35 * 73);
  EXPECT_EQ(owned.rows.size(), 73 / mesh.mesh().size("domain") +
                                   (mesh.coordinate()[1] < 73 % mesh.mesh().size("domain")));
  if (watched.winds > 0) {
    EXPECT_EQ(watched.south, owned.rows.begin);
    EXPECT_EQ(watched.north, owned.rows.end);
  }
  EXPECT_EQ(watched.winds, mine.values_read());
  EXPECT_LE(watched.winds, 2 * 36 * 144 * owned.rows.size());
  if (mesh.mesh().size("data") > 1) {
    EXPECT_LT(watched.winds, 2 * 36 * 144 * owned.rows.size());
  }

  // The first batch, put together, is that of one process, and its loss that of plain tensors and a
  // plain network.
  const Samples batch = mine.samples_of(mine.loader(kTraining.seed)->next()),
                whole = all.samples_of(all.loader(kTraining.seed)->next());
  EXPECT_EQ(batch.input.size(0), strata);
  const at::Tensor input = tessera::full_tensor(batch.input),
                   target = tessera::full_tensor(batch.target);
  EXPECT_TRUE(at::allclose(input, tessera::to_local(whole.input), 1e-9, 1e-11));
  EXPECT_TRUE(at::allclose(target, tessera::to_local(whole.target), 1e-9, 1e-11));
  torch::manual_seed(kTraining.seed);
  NetworkOptions shape = kTraining.network;
  shape.input = mine.channels();
  WindNet plain(shape);
  plain->to(at::kDouble);
  const double first = squared_error(plain(input), target, mine.statistics().sigma).item<double>();

  const Curve together = curve(mine, epochs), single = curve(all, epochs);
  ASSERT_EQ(together.losses.size(), single.losses.size());
  EXPECT_NEAR(together.losses[0], first, 1e-10 * first);
  for (std::size_t i = 0; i < single.losses.size(); ++i)
    EXPECT_NEAR(together.losses[i], single.losses[i], 1e-10 * single.losses[i]) << "step " << i;
  for (std::size_t p = 0; p < single.weights.size(); ++p)
    EXPECT_TRUE(at::allclose(together.weights[p], single.weights[p], 1e-7, 1e-9))
        << "parameter " << p;
  EXPECT_EQ(skill_table(together.skills), skill_table(single.skills));
  for (std::size_t i = 0; i < single.skills.size(); ++i)
    EXPECT_NEAR(together.skills[i].area[1], single.skills[i].area[1], 1e-8)
        << single.skills[i].name;
  // It did learn: an epoch has the same samples as another, in other batches.
  const auto each = static_cast<std::ptrdiff_t>(single.losses.size()) / epochs;
  const double begin = std::accumulate(single.losses.begin(), single.losses.begin() + each, 0.0),
               end = std::accumulate(single.losses.end() - each, single.losses.end(), 0.0);
  if (epochs > 1) {
    EXPECT_LT(end, 0.999 * begin);
  }
}

TEST(WindsRanks, SameLossesAndSkillOnAnyMesh) {
  for (const auto& mesh : meshes()) compare(mesh, 7, 3);
}

// Fewer runs of months than data coordinates: the last ranks have no sample at all, and take part.
TEST(WindsRanks, RanksWithoutSamples) {
  for (const auto& mesh : meshes()) compare(mesh, 2, 1);
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
