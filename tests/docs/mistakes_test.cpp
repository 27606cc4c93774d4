// What beginners do wrong from C++, and what they are told: the rows of mistakes.txt that name C++.
// Ranks are threads.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "../support/folder.h"
#include "tessera/comm/job/threads.h"
#include "tessera/pipeline/pipeline.h"
#include "tessera/schedule/generators.h"
#include "tessera/tessera.h"
#include "tessera/train/callbacks.h"
#include "tessera/train/strategies.h"
#include "tessera/train/trainer.h"

namespace tessera::test {
namespace {

using ::tessera::testing::Folder;

/// A row of the table: who is told, by which class, and pieces of the text.
struct Row {
  std::string id, by;
  std::vector<std::string> pieces;
};

std::vector<Row> rows_of_cpp() {
  std::ifstream file(TESSERA_MISTAKES);
  std::vector<Row> rows;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    if (line[0] != ' ') {
      rows.push_back({line.substr(0, line.find(' ')), "", {}});
      continue;
    }
    const auto colon = line.find(": ");
    const std::string key = line.substr(2, colon - 2), value = line.substr(colon + 2);
    if (key == "by") rows.back().by = value;
    if (key == "asked" || key == "limit" || key == "do") rows.back().pieces.push_back(value);
    if (key != "page") continue;
    for (std::size_t at = 0; at < value.size();) {  // what stands between the page's "..."
      const auto end = std::min(value.find("...", at), value.size());
      if (end > at) rows.back().pieces.push_back(value.substr(at, end - at));
      at = end + 3;
    }
  }
  std::erase_if(rows, [](const Row& row) { return !row.by.starts_with("c++ "); });
  return rows;
}

class Told : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { text += warning.msg() + '\n'; }
  std::string type = "nothing", text;
};

/// What a rank is told by `mistake`: the class of what it throws, or "warning".
Told told(const std::function<void()>& mistake) {
  Told said;
  const c10::WarningUtils::WarningHandlerGuard guard(&said);
  try {
    mistake();
    if (!said.text.empty()) said.type = "warning";
  } catch (const std::exception& e) {
    said.type = c10::demangle(typeid(e).name());
    if (said.type.starts_with("tessera::")) said.type.erase(0, 9);
    said.text = e.what();
  }
  return said;
}

class Regression : public Task {
 public:
  explicit Regression(int outputs = 2) : net(torch::nn::Linear(3, outputs)) {}
  NamedModules modules() override { return {{"net", net.ptr()}}; }
  Optimizers optimizers() override {
    return {std::make_shared<torch::optim::SGD>(net->parameters(), 0.1)};
  }
  at::Tensor training_step(const MicroBatch& batch, Step&) override {
    return net->forward(batch.tensors[0]).square().mean();
  }
  void validation_step(const MicroBatch& batch, Step& step) override {
    step.log("loss", net->forward(batch.tensors[0]).square().mean());
  }
  torch::nn::Sequential net;
};

std::shared_ptr<BatchSource> batches(std::uint64_t many, double value = 1) {
  return batches_of([=](std::uint64_t, std::uint64_t index) -> std::optional<MicroBatch> {
    if (index >= many) return std::nullopt;
    return make_batch({at::full({2, 3}, value)});
  });
}

TrainerOptions options_for(DistributedManager& manager) {
  TrainerOptions options;
  options.strategy = std::make_shared<DDPStrategy>(manager);
  options.session.signals = false;
  options.progress.show = false;
  return options;
}

at::Tensor rows(DistributedManager& manager) {
  return distribute_tensor(at::ones({4, 3}), manager.mesh({{"data", manager.world_size()}}),
                           {Shard(0)});
}

void train(DistributedManager& manager, std::shared_ptr<Callback> callback) {
  auto options = options_for(manager);
  options.callbacks = {std::move(callback)};
  Regression task;
  Trainer(options).fit(task, batches(2), batches(1));
}

void resume_other_model(DistributedManager& manager, const std::string& folder) {
  auto options = options_for(manager);
  options.checkpoint.folder = folder;
  options.callbacks = {std::make_shared<CheckpointCallback>(CheckpointCallbackOptions{})};
  Regression task;
  task.net->push_back("extra", torch::nn::Linear(2, 2));
  Trainer(options).fit(task, batches(2));
  options.checkpoint.resume = true;
  Regression other;
  Trainer(options).fit(other, batches(2));
}

using Mistake = std::function<void(DistributedManager&)>;

std::map<std::string, Mistake> mistakes(const std::string& folder, std::ostream& out) {
  return {
      {"5",
       [](DistributedManager& manager) {
         Regression task;
         const double value = manager.rank() == 1 ? std::numeric_limits<double>::quiet_NaN() : 1.0;
         Trainer(options_for(manager)).fit(task, batches(2, value));
       }},
      {"8",
       [&out](DistributedManager& manager) {
         auto options = options_for(manager);
         options.progress.show = true;
         options.progress.out = &out;
         options.progress.metrics = {"samples_per_second"};
         Regression task;
         Trainer(options).fit(task, batches(2));
       }},
      {"12",
       [](DistributedManager&) {
         detect_launch({.variables = {{"RANK", "1"}, {"WORLD_SIZE", "2"}}, .hostname = "here"});
       }},
      {"14a", [](DistributedManager& manager) { rows(manager).data_ptr(); }},
      {"14b", [](DistributedManager& manager) { std::ostringstream() << rows(manager); }},
      {"14c",
       [](DistributedManager& manager) {
         const at::Tensor x = rows(manager);
         x.accessor<float, 2>();
       }},
      {"14d",
       [](DistributedManager& manager) {
         std::ostringstream file;
         torch::save(rows(manager), file);
       }},
      {"22", [folder](DistributedManager& manager) { resume_other_model(manager, folder); }},
      {"23",
       [](DistributedManager& manager) {
         train(manager, std::make_shared<EarlyStopping>("val_loss"));
       }},
      {"24",
       [](DistributedManager& manager) {
         Regression task;
         Trainer(options_for(manager)).fit(task, batches(2 + manager.rank()));
       }},
      {"25",
       [](DistributedManager& manager) {
         const auto mesh = manager.mesh({{"pipe", manager.world_size()}});
         Pipeline(mesh, "pipe", schedule_1f1b(3, 4), {make_stage(torch::nn::Linear(2, 2))},
                  [](const auto& outputs, const auto&) { return outputs[0].sum(); });
       }},
  };
}

}  // namespace

TEST(Mistakes, AreToldAsTheTableSays) {
  const Folder folder;
  std::ostringstream shown;
  auto all = mistakes(folder.path(), shown);
  for (const Row& row : rows_of_cpp()) {
    ASSERT_TRUE(all.contains(row.id)) << "mistake " << row.id << " has no case here";
    std::mutex mutex;
    int ranks = 0;
    run_threads(2, [&](DistributedManager& manager) {
      const Told said = told([&] { all.at(row.id)(manager); });
      const std::lock_guard lock(mutex);
      if (said.type == "nothing" && row.by == "c++ warning") return;  // the first rank speaks
      ++ranks;
      EXPECT_EQ("c++ " + said.type, row.by) << row.id << ": " << said.text;
      for (const std::string& piece : row.pieces)
        EXPECT_NE(said.text.find(piece), std::string::npos)
            << row.id << " lacks '" << piece << "': " << said.text;
    });
    EXPECT_EQ(ranks, row.by == "c++ warning" ? 1 : 2) << row.id;
    all.erase(row.id);
  }
  for (const auto& [id, mistake] : all) ADD_FAILURE() << "mistake " << id << " is not in the table";
}

}  // namespace tessera::test
