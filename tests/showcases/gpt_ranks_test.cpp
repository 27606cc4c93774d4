// The GPT on several ranks against the same on one: the loss curve in float64 on every mesh of data
// x sharded x tensor ranks and on pipelines, stopped, and gone on with on another mesh.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>

#include "report.h"
#include "tessera/base/text.h"
#include "tessera/comm/job/manager.h"
#include "training.h"

namespace gpt {
namespace {

std::optional<tessera::DistributedManager> manager;

// Five heads and 4 x 15 features divide by no number of ranks but 5; a batch of 5 gives ranks
// different numbers of samples, and the last one of an epoch, of 3, leaves a fourth without any.
Options small() {
  Options o;
  o.text = GPT_TEXT;
  o.network = {.width = 15, .heads = 5, .layers = 2, .length = 7};
  o.batch = 5;
  o.steps = 9;
  o.learning_rate = 1e-2;
  o.validate_every = 5;
  o.sample = 3;
  o.float64 = true;
  return o;
}

std::vector<double> losses(const Result& result) {
  std::vector<double> all;
  for (const auto& [step, loss] : result.losses) all.push_back(loss);
  return all;
}

void expect_close(const std::vector<double>& got, const std::vector<double>& expected,
                  std::size_t from, const std::string& where) {
  ASSERT_EQ(got.size() + from, expected.size()) << where;
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i], expected[i + from], 1e-10 * expected[i + from])
        << where << ", step " << i + from + 1;
}

struct Sizes {
  int data, sharded, tensor;
  std::string name() const {
    return tessera::concat("data ", data, " sharded ", sharded, " tensor ", tensor);
  }
};

std::vector<Sizes> meshes() {
  std::vector<Sizes> all;
  const int n = manager->world_size();
  for (int data = 1; data <= n; ++data) {
    for (int sharded = 1; data * sharded <= n; ++sharded)
      if (n % (data * sharded) == 0) all.push_back({data, sharded, n / data / sharded});
  }
  return all;
}

tessera::DeviceMesh mesh_of(const Sizes& s) {
  return manager->mesh({{"data", s.data}, {"sharded", s.sharded}, {"tensor", s.tensor}});
}

// One folder for all ranks of a run, with the beginning of the text: 43 rows to train on, so that
// nine steps end an epoch.
class GptRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    const tessera::Group world = manager->world();
    folder = world.broadcast_bytes(
        world.rank() == 0 ? tessera::concat(::testing::TempDir(), "tessera_gpt_", ::getpid())
                          : std::string(),
        0);
    if (world.rank() == 0) {
      std::filesystem::create_directories(folder);
      std::string text(7 * 47 + 1, ' ');
      std::ifstream(GPT_TEXT).read(text.data(), static_cast<std::streamsize>(text.size()));
      std::ofstream(folder / "text") << text;
    }
    world.barrier();
    options = small();
    options.text = (folder / "text").string();
  }
  void TearDown() override {
    manager->world().barrier();
    if (manager->rank() == 0) std::filesystem::remove_all(folder);
    manager->world().barrier();
  }
  std::filesystem::path folder;
  Options options;
};

TEST_F(GptRanks, SameLossCurveAndTextOnEveryMesh) {
  const Result alone = train(std::nullopt, options);
  ASSERT_EQ(alone.losses.size(), 9u);
  for (const auto& sizes : meshes()) {
    for (const bool sequence : {false, true}) {
      if (sequence && sizes.tensor == 1) continue;
      options.sequence = sequence;
      const Result result = train(mesh_of(sizes), options);
      const std::string where = sizes.name() + (sequence ? " along the sequence" : "");
      expect_close(losses(result), losses(alone), 0, where);
      ASSERT_EQ(result.samples.size(), alone.samples.size());
      EXPECT_NEAR(result.samples[0].loss, alone.samples[0].loss, 1e-10) << where;
      EXPECT_EQ(result.samples[0].text, alone.samples[0].text) << where;
      // What the ranks that share parameters hold together is little more than one process.
      std::int64_t held = 0;
      for (int r = 0; r < sizes.sharded * sizes.tensor; ++r)
        held += result.memory[static_cast<std::size_t>(r)].parameters;
      EXPECT_LT(held, 1.5 * static_cast<double>(alone.memory[0].parameters)) << where;
    }
  }
}

TEST_F(GptRanks, GoesOnOnAnotherMesh) {
  const std::vector<double> alone = losses(train(std::nullopt, options));
  const auto all = meshes();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto &from = all[i], &to = all[(i + 1) % all.size()];
    const std::string where = "from " + from.name() + " to " + to.name();
    Options stopped = options;
    stopped.checkpoint = (folder / tessera::concat("run", i)).string();
    stopped.stop_at = 4;
    train(mesh_of(from), stopped);
    stopped.stop_at = -1;
    stopped.sequence = to.tensor > 1;
    expect_close(losses(train(mesh_of(to), stopped)), alone, 4, where);
  }
  // By one process, and back.
  Options stopped = options;
  stopped.checkpoint = (folder / "alone").string();
  stopped.stop_at = 3;
  if (manager->rank() == 0) train(std::nullopt, stopped);
  manager->world().barrier();
  stopped.stop_at = -1;
  expect_close(losses(train(mesh_of(all.front()), stopped)), alone, 3, "from one process");
}

// ---- pipelines ----

struct Staged {
  int pipeline, data, sharded, tensor;
  std::string schedule;
  int micro_batches;
  bool sequence = false;
  std::string name() const {
    return tessera::concat(schedule, ", pipeline ", pipeline, " data ", data, " sharded ", sharded,
                           " tensor ", tensor, sequence ? " along the sequence" : "");
  }
  tessera::DeviceMesh mesh() const {
    return manager->mesh(
        {{"pipe", pipeline}, {"data", data}, {"sharded", sharded}, {"tensor", tensor}});
  }
  Options of(Options o) const {
    o.schedule = schedule;
    o.micro_batches = micro_batches;
    o.sequence = sequence;
    return o;
  }
};

// Two blocks in four stages: the embedding and the scores have stages of their own. Micro-batches
// in which a rank has no sample, too.
std::vector<Staged> pipelines() {
  switch (manager->world_size()) {
    case 1:
      return {{1, 1, 1, 1, "1f1b", 3}};
    case 2:
      return {{2, 1, 1, 1, "zb-h1", 3}, {2, 1, 1, 1, "zb-v", 3}};
    case 4:
      return {
          {2, 2, 1, 1, "1f1b", 2}, {2, 1, 1, 2, "zb-h1", 3, true}, {2, 1, 2, 1, "interleaved", 2}};
    default:
      return {};
  }
}

TEST_F(GptRanks, PipelinesHaveTheLossCurveAndTextOfOneProcess) {
  if (pipelines().empty()) GTEST_SKIP() << "no pipeline of three ranks";
  const Result alone = train(std::nullopt, options);
  for (const Staged& staged : pipelines()) {
    const Result result = train(staged.mesh(), staged.of(options));
    expect_close(losses(result), losses(alone), 0, staged.name());
    ASSERT_EQ(result.samples.size(), alone.samples.size()) << staged.name();
    EXPECT_NEAR(result.samples[0].loss, alone.samples[0].loss, 1e-10) << staged.name();
    EXPECT_EQ(result.samples[0].text, alone.samples[0].text) << staged.name();
    EXPECT_NE(result.timeline.find("<svg"), std::string::npos) << staged.name();
    EXPECT_EQ(result.weights, alone.weights);
  }
}

TEST_F(GptRanks, PipelinesGoOnWithoutOneAndBack) {
  if (pipelines().empty()) GTEST_SKIP() << "no pipeline of three ranks";
  const std::vector<double> alone = losses(train(std::nullopt, options));
  const Staged staged = pipelines().front(), other = pipelines().back();
  Options stopped = staged.of(options);
  stopped.checkpoint = (folder / "staged").string();
  // In the middle of an epoch: a pipeline, a mesh without one, another pipeline.
  stopped.stop_at = 3;
  expect_close(losses(train(staged.mesh(), stopped)), {alone.begin(), alone.begin() + 3}, 0,
               staged.name());
  stopped.stop_at = 6;
  expect_close(losses(train(mesh_of(meshes().back()), stopped)), {alone.begin(), alone.begin() + 6},
               3, "from " + staged.name());
  stopped = other.of(stopped);
  stopped.stop_at = -1;
  expect_close(losses(train(other.mesh(), stopped)), alone, 6, "to " + other.name());
}

TEST_F(GptRanks, RefusesPipelinesThatItCannotMake) {
  if (manager->world_size() != 2) GTEST_SKIP() << "on two ranks";
  Options wrong = options;
  wrong.schedule = "fast";
  const Staged two{2, 1, 1, 1, "1f1b", 2};
  EXPECT_THROW(train(two.mesh(), wrong), tessera::InvalidArgument);
  wrong.schedule = "zb-v";
  wrong.network.layers = 1;  // three layers in four stages
  EXPECT_THROW(train(two.mesh(), wrong), tessera::InvalidArgument);
}

// ---- the report ----

std::string text_of(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST_F(GptRanks, WritesAReport) {
  options.steps = 5;
  options.prompt = "In <the>";
  const Result result = train(mesh_of(meshes().front()), options);
  if (manager->rank() != 0) return;
  const std::string path = (folder / "report.html").string();
  write_report(result, {{"mesh", "one"}}, "the text tale<1>.txt", options.prompt, path);
  const std::string text = text_of(path);
  for (const char* part : {"In &lt;the&gt;", "on the text tale&lt;1&gt;.txt", "Memory of each rank",
                           "text held out", "column of 5"})
    EXPECT_NE(text.find(part), std::string::npos) << part;
  for (const char* part : {"Genesis", "God", "The pipeline"})
    EXPECT_EQ(text.find(part), std::string::npos) << part;
}

// SIGTERM on one rank ends the run on all, and what there is by then is reported.
TEST_F(GptRanks, AStoppedRunHasItsReport) {
  options.checkpoint = (folder / "stopped").string();
  const Result result = train(mesh_of(meshes().back()), options, [&](std::int64_t step, double) {
    if (step == 3 && manager->rank() == 0) ::raise(SIGTERM);
  });
  EXPECT_GE(result.losses.size(), 3u);
  EXPECT_LT(result.losses.size(), 5u);
  EXPECT_TRUE(result.samples.empty());
  EXPECT_EQ(result.memory.size(), static_cast<std::size_t>(manager->world_size()));
  if (manager->rank() == 0) {
    const std::string path = (folder / "stopped.html").string();
    write_report(result, {{"mesh", "one"}}, "the book of Genesis", options.prompt, path);
    EXPECT_NE(text_of(path).find("book of Genesis"), std::string::npos);
  }
}

TEST(GptText, ASampleEndsWhereItIsToldTo) {
  int asked = 0;
  const auto flat = [](const at::Tensor&) { return at::zeros({vocabulary}); };
  EXPECT_EQ(continue_text(flat, 4, "a", 9, 1, [&] { return ++asked > 3; }).size(), 3u);
  EXPECT_EQ(continue_text(flat, 4, "a", 9, 1).size(), 9u);
}

TEST_F(GptRanks, RefusesWhatItCannotTrainOn) {
  Options latin = options;
  latin.text = (folder / tessera::concat("latin", manager->rank())).string();
  std::ofstream(latin.text) << std::string(500, '\xe9');
  EXPECT_THROW(train(std::nullopt, latin), tessera::InvalidArgument);
  std::ofstream(latin.text) << "short";
  EXPECT_THROW(train(std::nullopt, latin), tessera::InvalidArgument);
  latin.text = (folder / "absent").string();
  EXPECT_THROW(train(std::nullopt, latin), tessera::InvalidArgument);
  options.network.heads = 4;
  EXPECT_THROW(train(std::nullopt, options), tessera::InvalidArgument);
}

}  // namespace
}  // namespace gpt

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  gpt::manager = tessera::DistributedManager::initialize();
  const int failed = RUN_ALL_TESTS();
  gpt::manager.reset();
  return failed;
}
