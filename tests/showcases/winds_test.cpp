// The winds example on one process: the baselines' published figures, the order of samples, the
// network's edges, bar and report.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>

#include "report.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/data/sources/netcdf_source.h"
#include "tessera/nn/distribute_module.h"
#include "training.h"

namespace winds {
namespace {

std::string two_decimals(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  return text;
}

// What most tests look at; gone before the process' statics are.
struct EightYears : testing::Environment {
  void SetUp() override {
    manager = tessera::DistributedManager::initialize();
    source = std::make_unique<tessera::NetcdfSource>(WINDS_DATA);
    data = std::make_unique<WindsData>(*source, mesh(), 96, 16, at::kFloat);
  }
  void TearDown() override {
    data.reset();
    manager.reset();
  }
  tessera::DeviceMesh mesh() const { return manager->mesh({{"data", 1}, {"domain", 1}}); }

  std::optional<tessera::DistributedManager> manager;
  std::unique_ptr<tessera::NetcdfSource> source;
  std::unique_ptr<WindsData> data;
};
EightYears* const environment =
    static_cast<EightYears*>(testing::AddGlobalTestEnvironment(new EightYears));

const WindsData& eight_years() { return *environment->data; }

constexpr Months test_months{96, 132};

Samples batch_of(const WindsData& data, std::uint64_t seed, std::int64_t epoch, std::int64_t step,
                 std::int64_t* total = nullptr) {
  const auto loader = data.loader(seed);
  loader->seek(static_cast<std::uint64_t>(epoch * data.steps_per_epoch() + step));
  const auto batch = loader->next();
  EXPECT_EQ(batch.epoch, static_cast<std::uint64_t>(epoch));
  if (total) *total = batch.global_real;
  const Samples samples = data.samples_of(batch);
  return {tessera::to_local(samples.input), tessera::to_local(samples.target)};
}

TEST(Winds, TheFileHasAllMonthsAndNoValueIsMissing) {
  const tessera::NetcdfSource source(WINDS_DATA);
  for (const char* name : variable_names) {
    EXPECT_EQ(source.info(name).shape, (std::vector<std::int64_t>{132, 73, 144}));
    EXPECT_FALSE(source.read(name).isnan().any().item<bool>());
    EXPECT_EQ(source.text(name, "units"), "M/S");
  }
  EXPECT_LT(std::filesystem::file_size(WINDS_DATA), 4 << 20);
}

TEST(Winds, BaselinesToThePrintedDigits) {
  const auto forecasts = baselines(eight_years(), test_months);
  const at::Tensor truth = eight_years().read(test_months);
  // UWND all points, area; VWND all points, area.
  const std::vector<std::array<const char*, 4>> printed{{"2.46", "2.40", "1.97", "1.88"},
                                                        {"2.27", "2.13", "1.89", "1.72"},
                                                        {"2.11", "1.99", "1.72", "1.58"},
                                                        {"2.02", "1.92", "1.62", "1.51"}};
  ASSERT_EQ(forecasts.size(), printed.size());
  for (std::size_t i = 0; i < printed.size(); ++i) {
    const Skill skill = skill_of(forecasts[i], truth, eight_years().latitude());
    for (std::size_t v = 0; v < 2; ++v) {
      EXPECT_EQ(two_decimals(skill.all_points[v]), printed[i][2 * v]) << skill.name;
      EXPECT_EQ(two_decimals(skill.area[v]), printed[i][2 * v + 1]) << skill.name;
    }
  }
}

TEST(Winds, AnUntrainedNetworkIsADampedAnomaly) {
  WindNet network(NetworkOptions{.input = eight_years().channels()});
  tessera::distribute_module(*network, eight_years().mesh());
  const Skill skill = skill_of({"network", forecast(network, eight_years(), test_months)},
                               eight_years().read(test_months), eight_years().latitude());
  EXPECT_LT(skill.all_points[0], 2.03);
  EXPECT_GT(skill.all_points[0], 1.98);
}

TEST(Winds, AnEpochTakesEverySampleOnceAndEachBatchCoversThePeriod) {
  const WindsData& data = eight_years();
  for (const std::int64_t epoch : {0, 1, 7}) {
    std::int64_t seen = 0;
    at::Tensor sum = at::zeros({variables}, at::kDouble);
    for (std::int64_t step = 0; step < data.steps_per_epoch(); ++step) {
      std::int64_t total = 0;
      const Samples batch = batch_of(data, 5, epoch, step, &total);
      EXPECT_EQ(batch.input.size(0), total);
      EXPECT_GE(total, 15);
      seen += total;
      sum += batch.target.to(at::kDouble).sum({0, 2, 3});
    }
    EXPECT_EQ(seen, 95);
    static const at::Tensor first = sum;
    EXPECT_TRUE(at::allclose(sum, first, 1e-9, 1e-6)) << "another epoch, other samples";
  }
  EXPECT_FALSE(at::equal(batch_of(data, 5, 0, 0).input, batch_of(data, 5, 1, 0).input));
  EXPECT_FALSE(at::equal(batch_of(data, 5, 0, 0).input, batch_of(data, 6, 0, 0).input));
  EXPECT_TRUE(at::equal(batch_of(data, 5, 0, 0).input, batch_of(data, 5, 0, 0).input));
}

// What a sample of training sees must not hold what it is to find: a climatology made of the seven
// other years.
TEST(Winds, TheSamplesClimatologyLeavesTheirYearOut) {
  const WindsData& data = eight_years();
  const at::Tensor all = data.read({0, 96});
  // A stratum of six months begins somewhere; look through an epoch for the month.
  const std::int64_t t = 40;
  std::vector<at::Tensor> others;
  for (std::int64_t m = t % 12; m < 96; m += 12)
    if (m != t) others.push_back(all[m]);
  const at::Tensor target =
      ((all[t] - at::stack(others).mean(0)) / data.statistics().sigma).to(at::kFloat);
  int found = 0;
  for (std::int64_t step = 0; step < data.steps_per_epoch(); ++step) {
    const at::Tensor targets = batch_of(data, 1, 0, step).target;
    for (std::int64_t i = 0; i < targets.size(0); ++i)
      found += at::allclose(targets[i], target, 1e-4, 1e-5);
  }
  EXPECT_EQ(found, 1);
}

TEST(Winds, WrongPeriodsAreRefused) {
  const tessera::NetcdfSource source(WINDS_DATA);
  EXPECT_THROW(WindsData(source, environment->mesh(), 90, 16, at::kFloat),
               tessera::InvalidArgument);
  EXPECT_THROW(WindsData(source, environment->mesh(), 144, 16, at::kFloat),
               tessera::InvalidArgument);
  EXPECT_THROW(WindsData(source, environment->mesh(), 96, 96, at::kFloat),
               tessera::InvalidArgument);
}

TEST(Winds, PaddingIsRoundInLongitude) {
  const at::Tensor field = at::arange(12, at::kFloat).view({1, 1, 3, 4});
  const at::Tensor padded = pad_sphere(field);
  ASSERT_EQ(padded.sizes(), (std::vector<std::int64_t>{1, 1, 5, 6}));
  for (std::int64_t y = 0; y < 5; ++y)
    for (std::int64_t x = 0; x < 6; ++x)
      EXPECT_EQ(padded[0][0][y][x].item<float>(),
                field[0][0][std::clamp<std::int64_t>(y - 1, 0, 2)][(x + 3) % 4].item<float>());
  // So a network commutes with turning the globe.
  torch::manual_seed(1);
  WindNet network(NetworkOptions{.input = 3, .hidden = 4});
  for (auto& p : network->parameters()) p.detach().normal_();
  const torch::NoGradGuard no_grad;
  const at::Tensor input = torch::randn({2, 3, 7, 12});
  EXPECT_TRUE(at::allclose(network->forward(input.roll(5, -1)), network->forward(input).roll(5, -1),
                           1e-4, 1e-4));
}

TEST(Winds, TheReportNeedsNothingBesideIt) {
  const Months months{96, 108};
  std::vector<Forecast> forecasts = baselines(eight_years(), months);
  forecasts.push_back({"network", forecasts.back().winds});
  const at::Tensor truth = eight_years().read(months);
  std::vector<Skill> skills;
  for (const Forecast& f : forecasts)
    skills.push_back(skill_of(f, truth, eight_years().latitude()));
  const std::string folder = tessera::concat(testing::TempDir(), "/winds_report_", getpid()),
                    path = folder + "/deep/report.html";
  write_report({.facts = {{"ranks", "1"}},
                .losses = {4, 3, 2, 1},
                .steps_per_epoch = 2,
                .test = months,
                .skills = skills,
                .forecast = forecasts.back().winds,
                .truth = truth,
                .owned = {{0, {1, 49}, {0, 37}},
                          {1, {1, 49}, {37, 73}},
                          {2, {49, 96}, {0, 37}},
                          {3, {49, 96}, {37, 73}}},
                .train_months = 96,
                .latitude = eight_years().latitude(),
                .longitude = eight_years().longitude()},
               path);
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  const std::string html = text.str();
  std::filesystem::remove_all(folder);
  EXPECT_EQ(html.find("http:"), std::string::npos);
  EXPECT_EQ(html.find("https:"), std::string::npos);
  EXPECT_EQ(html.find("<script"), std::string::npos);
  std::size_t images = 0;
  for (std::size_t at = html.find("data:image"); at != std::string::npos;
       at = html.find("data:image", at + 1))
    ++images;
  // Forecast, truth and error of two winds, two maps of the gain, and the globe with its owners.
  EXPECT_EQ(images, 9u);
  for (const char* text : {">rank 2<", "47 samples × 36 latitudes", "ranks 0, 2: 37 latitudes",
                           "ranks 1, 3: 36 latitudes"})
    EXPECT_NE(html.find(text), std::string::npos) << text;
  EXPECT_NE(html.find("damped anomaly, one per point"), std::string::npos);
  EXPECT_EQ(html.find(">nan"), std::string::npos);
  EXPECT_THROW(write_report({.losses = {1},
                             .test = months,
                             .skills = skills,
                             .forecast = truth,
                             .truth = truth,
                             .latitude = eight_years().latitude(),
                             .longitude = eight_years().longitude()},
                            "/dev/null/report.html"),
               tessera::FileError);
}

}  // namespace
}  // namespace winds
