// The relief example on a small made-up globe: several ranks against one, and against plain
// libtorch; who reads what; memory; records and report.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <numbers>
#include <optional>
#include <sstream>

#include "memory.h"
#include "record.h"
#include "report.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/tensor/shard_tensor.h"
#include "training.h"

namespace relief {
namespace {

std::optional<tessera::DistributedManager> manager;

tessera::DeviceMesh all_ranks() { return manager->mesh({{"domain", manager->world_size()}}); }
tessera::DeviceMesh alone() {
  return manager->mesh(tessera::Mesh({{"domain", 1}}, {manager->rank()}));
}

// Hills of several sizes, in metres, as a file would give them.
class Hills : public tessera::Source {
 public:
  Hills(std::int64_t rows, std::int64_t columns) {
    info_ = {.name = "ROSE",
             .dims = {"lat", "lon"},
             .shape = {rows, columns},
             .stored = at::kDouble,
             .attributes = {}};
    const at::Tensor y = at::linspace(0, std::numbers::pi, rows, at::kDouble).unsqueeze(1);
    const at::Tensor x = at::arange(columns, at::kDouble).unsqueeze(0) *
                         (2 * std::numbers::pi / static_cast<double>(columns));
    heights_ = at::zeros({rows, columns}, at::kDouble);
    for (int k = 1; k <= 9; ++k)
      heights_ += 900.0 / k * at::sin(2 * k * y + k) * at::cos(k * x + 2 * k);
  }
  std::string name() const override { return "hills"; }
  std::vector<std::string> variables() const override { return {"ROSE"}; }
  const tessera::VariableInfo& info(const std::string&) const override { return info_; }
  const at::Tensor& heights() const { return heights_; }

 protected:
  at::Tensor read_box(const tessera::VariableInfo&, const tessera::Hyperslab& slab,
                      const tessera::ReadOptions& options) const override {
    return heights_.narrow(0, slab.start[0], slab.count[0])
        .narrow(1, slab.start[1], slab.count[1])
        .to(options.dtype)
        .clone();
  }

 private:
  tessera::VariableInfo info_;
  at::Tensor heights_;
};

constexpr TrainingOptions kTraining{
    .seed = 2, .steps = 12, .learning_rate = 1e-2, .network = {.coarse = 5, .fine = 3}};

struct Outcome {
  std::vector<double> losses;
  Score score;
  std::vector<at::Tensor> window;
};

Outcome outcome(const Field& field) {
  Outcome o;
  ReliefNet network =
      train(field, kTraining, [&](std::int64_t, double loss) { o.losses.push_back(loss); });
  o.score = score(network, field);
  o.window = look(network, field, 4, 24, 40, 48);
  return o;
}

TEST(ReliefRanks, OnAnyNumberOfRanksTheResultIsThatOfOne) {
  const Hills hills(57, 96);
  const Field mine(hills, "ROSE", all_ranks(), at::kDouble),
      whole(hills, "ROSE", alone(), at::kDouble);
  EXPECT_EQ(mine.values_read(), mine.cut().size(manager->rank()) * 96);
  EXPECT_TRUE(at::equal(tessera::full_tensor(mine.fine()), tessera::to_local(whole.fine())));

  const Outcome together = outcome(mine), single = outcome(whole);
  ASSERT_EQ(together.losses.size(), 12u);
  for (std::size_t i = 0; i < 12; ++i)
    EXPECT_NEAR(together.losses[i], single.losses[i], 1e-10 * single.losses[i]) << "step " << i;
  EXPECT_NEAR(together.score.network, single.score.network, 1e-8);
  EXPECT_NEAR(together.score.interpolation, single.score.interpolation, 1e-9);
  EXPECT_LT(single.score.network, single.score.interpolation);
  for (std::size_t i = 0; i < single.window.size(); ++i)
    EXPECT_TRUE(at::allclose(together.window[i], single.window[i], 1e-8, 1e-6)) << i;
  EXPECT_TRUE(at::equal(single.window[3],
                        (hills.heights() / 1000).narrow(0, 4, 40).narrow(1, 24, 48) * 1000));
}

// Before training the network is the interpolation, and its first loss that of plain tensors.
TEST(ReliefRanks, TheFirstLossIsThatOfPlainTensors) {
  const Hills hills(41, 72);
  const Field field(hills, "ROSE", all_ranks(), at::kDouble);
  const at::Tensor fine = (hills.heights() / 1000).view({1, 1, 41, 72});
  torch::manual_seed(kTraining.seed);
  ReliefNet plain(kTraining.network);
  plain->to(at::kDouble);
  const torch::NoGradGuard no_grad;
  const at::Tensor coarse = plain->coarsen(fine), drawn = plain->interpolate(coarse);
  EXPECT_EQ(coarse.sizes(), (std::vector<std::int64_t>{1, 1, 11, 18}));
  ASSERT_EQ(drawn.sizes(), fine.sizes());
  // On coarse points the interpolation is exact, and constants stay constants.
  EXPECT_TRUE(
      at::allclose(drawn.slice(2, 0, 41, factor).slice(3, 0, 72, factor), coarse, 0, 1e-12));
  EXPECT_TRUE(at::allclose(plain->interpolate(plain->coarsen(at::ones_like(fine))),
                           at::ones_like(fine), 0, 1e-12));
  const double expected =
      1e6 * torch::mse_loss(plain(coarse).narrow(3, 0, 48), fine.narrow(3, 0, 48)).item<double>();
  double first = 0;
  {
    const at::AutoGradMode grad(true);
    train(field, {.seed = kTraining.seed, .steps = 1, .network = kTraining.network},
          [&](std::int64_t, double loss) { first = loss; });
  }
  EXPECT_NEAR(first, expected, 1e-10 * expected);
}

TEST(ReliefRanks, MemoryOfARankFallsWithTheRanks) {
  const Hills hills(321, 384);
  const auto peak = [&](const tessera::DeviceMesh& mesh) {
    return pictures::peak_tensor_bytes([&] {
      train(Field(hills, "ROSE", mesh, at::kFloat), {.steps = 2}, [](std::int64_t, double) {});
    });
  };
  const auto whole = static_cast<double>(peak(alone())),
             mine = static_cast<double>(peak(all_ranks()));
  EXPECT_LT(mine, whole * (1.0 / manager->world_size() + 0.08)) << mine / whole;
}

TEST(ReliefRanks, FieldsThatDoNotFitAreRefused) {
  EXPECT_THROW(Field(Hills(56, 96), "ROSE", alone(), at::kFloat), tessera::InvalidArgument);
  EXPECT_THROW(Field(Hills(57, 94), "ROSE", alone(), at::kFloat), tessera::InvalidArgument);
}

TEST(ReliefRanks, RecordsComeBackAndMakeAReport) {
  const std::string folder = tessera::concat(testing::TempDir(), "/relief_", getpid());
  const Record one{.rows = {57},
                   .values_read = {5472},
                   .tensor_bytes = {1 << 20},
                   .resident_bytes = {4 << 20},
                   .losses = {9, 4},
                   .interpolation = 3,
                   .network = 2,
                   .seconds_a_step = 0.25};
  Record two = one;
  two.rows = {29, 28};
  two.values_read = {2784, 2688};
  two.tensor_bytes = {600000, 500000};
  two.resident_bytes = {3 << 20, 3 << 20};
  two.losses[1] = 4 * (1 + 1e-6);
  write_record(two, folder);
  write_record(one, folder);
  const auto records = read_records(folder);
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[0].ranks(), 1);
  EXPECT_EQ(records[1].tensor_bytes, two.tensor_bytes);
  EXPECT_EQ(records[1].losses, two.losses);
  EXPECT_NEAR(distance(records[1], records[0]), 1e-6, 1e-9);
  EXPECT_EQ(distance(Record{}, one), -1);
  const at::Tensor window = at::linspace(-6000, 6000, 40 * 48).view({40, 48});
  write_report({.records = records,
                .look = {window, window, window, window},
                .place = "nowhere",
                .rows = 57,
                .columns = 96,
                .network = "A network."},
               folder + "/deep/report.html");
  std::stringstream text;
  text << std::ifstream(folder + "/deep/report.html").rdbuf();
  const std::string html = text.str();
  for (const char* part : {"29 + 28", "1.0e-06", "data:image/bmp", "nowhere", "<polyline"})
    EXPECT_NE(html.find(part), std::string::npos) << part;
  for (const char* part : {"http:", "https:", "<script", "nan"})
    EXPECT_EQ(html.find(part), std::string::npos) << part;
  std::ofstream(folder + "/ranks-3.txt") << "rows 1 2 3\n";
  EXPECT_THROW(read_records(folder), tessera::FileError);
  std::filesystem::remove_all(folder);
  EXPECT_THROW(write_record(one, "/dev/null/records"), tessera::FileError);
}

}  // namespace
}  // namespace relief

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  relief::manager = tessera::DistributedManager::initialize();
  const int failed = RUN_ALL_TESTS();
  relief::manager.reset();
  return failed;
}
