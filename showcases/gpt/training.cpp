#include "training.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>

#include "memory.h"
#include "tessera/base/text.h"
#include "tessera/data/loader.h"
#include "tessera/tensor/policy.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/train/callbacks.h"
#include "tessera/train/strategies.h"
#include "tessera/train/trainer.h"

namespace gpt {

namespace {

using tessera::MicroBatch;
using tessera::Step;
using tessera::Trainer;

struct Text {
  std::shared_ptr<tessera::TensorDataset> training, held_out;
};

// Rows of length + 1 bytes that overlap by one, so that every byte but the first is predicted.
Text read_text(const Options& options) {
  std::ifstream file(options.text, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  if (!file.good() && bytes.empty())
    throw tessera::InvalidArgument("the text cannot be read: " + options.text);
  const std::int64_t row = options.network.length + 1;
  if (static_cast<std::int64_t>(bytes.size()) < 20 * row)
    throw tessera::InvalidArgument(tessera::concat("'", options.text, "' has ", bytes.size(),
                                                   " bytes, and needs at least 20 rows of ", row));
  for (const char c : bytes) {
    if (static_cast<unsigned char>(c) >= vocabulary)
      throw tessera::InvalidArgument(tessera::concat("'", options.text, "' is not ASCII: it holds ",
                                                     "the byte ",
                                                     int{static_cast<unsigned char>(c)}));
  }
  const at::Tensor all = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), all.mutable_data_ptr<std::uint8_t>());
  const at::Tensor rows = all.unfold(0, row, options.network.length).contiguous();
  const std::int64_t held = rows.size(0) / 10, trained = rows.size(0) - held;
  const auto dataset = [&](std::int64_t begin, std::int64_t n) {
    return std::make_shared<tessera::TensorDataset>(
        std::vector<at::Tensor>{rows.narrow(0, begin, n).clone()});
  };
  return {dataset(0, trained), dataset(trained, held)};
}

struct Training : tessera::Task {
  explicit Training(const Options& o) : options(o), network(o.network) {}
  tessera::NamedModules modules() override { return {{"network", network.ptr()}}; }
  tessera::Optimizers optimizers() override {
    return {std::make_shared<torch::optim::AdamW>(
        network->parameters(),
        torch::optim::AdamWOptions(options.learning_rate).weight_decay(0.1))};
  }
  std::vector<tessera::Schedule> schedules() override {
    return {{tessera::warmup_cosine(std::min<std::int64_t>(20, options.steps / 10 + 1),
                                    options.steps, 0.1)}};
  }
  at::Tensor loss(const MicroBatch& batch) {
    const at::Tensor bytes = batch.tensors[0].to(at::kLong);
    const std::int64_t n = options.network.length;
    const at::Tensor scores = network->forward(bytes.narrow(1, 0, n));
    return at::cross_entropy_loss(scores.flatten(0, 1), bytes.narrow(1, 1, n).flatten());
  }
  at::Tensor training_step(const MicroBatch& batch, Step&) override { return loss(batch); }
  void validation_step(const MicroBatch& batch, Step& step) override {
    step.log("loss", loss(batch));
  }
  const Options options;
  Network network;
};

class Recorder : public tessera::Callback {
 public:
  Recorder(Training& training, const std::optional<tessera::DeviceMesh>& mesh, Result& result,
           std::function<void(std::int64_t, double)> watch)
      : training_(training), mesh_(mesh), result_(result), watch_(std::move(watch)) {}
  std::string name() const override { return "recorder"; }
  void on_step_end(Trainer& trainer, const tessera::StepResult& step) override {
    result_.losses.emplace_back(trainer.step(), step.loss);
    if (watch_) watch_(trainer.step(), step.loss);
  }
  void on_validation_end(Trainer& trainer, bool complete) override {
    if (!complete) return;
    const Options& o = training_.options;
    // One text on all ranks: what is sharded over ranks that share samples moves as it has to.
    const auto policy = [&](tessera::Policy p) {
      if (mesh_) tessera::set_policies(mesh_->manager(), {.redistribution = p});
    };
    policy(tessera::Policy::allow);
    result_.samples.push_back({trainer.step(), trainer.metrics().at("val/loss"),
                               continue_text(training_.network, "And God said", o.sample, o.seed)});
    policy(tessera::Policy::error);
  }

 private:
  Training& training_;
  const std::optional<tessera::DeviceMesh>& mesh_;
  Result& result_;
  const std::function<void(std::int64_t, double)> watch_;
};

std::int64_t bytes_of(const at::Tensor& t) {
  const at::Tensor mine = tessera::is_sharded(t) ? tessera::to_local(t.detach()) : t;
  return mine.numel() * static_cast<std::int64_t>(mine.element_size());
}

std::vector<Memory> memory_of_all(const std::optional<tessera::DeviceMesh>& mesh,
                                  const Memory& mine) {
  if (!mesh) return {mine};
  std::vector<Memory> all;
  for (const std::string& text : mesh->all().all_gather_bytes(tessera::concat(
           mine.parameters, ' ', mine.moments, ' ', mine.tensors, ' ', mine.process))) {
    Memory m;
    tessera::TextReader(text) >> m.parameters >> m.moments >> m.tensors >> m.process;
    all.push_back(m);
  }
  return all;
}

}  // namespace

tessera::LayerShardings layers_of(const NetworkOptions& options) {
  using tessera::column, tessera::row, tessera::vocabulary;
  return {{"*.attention.qkv", column(options.heads)},
          {"*.attention.out", row(options.heads)},
          {"*.up", column()},
          {"*.down", row()},
          {"embedding", vocabulary()}};
}

Result train(const std::optional<tessera::DeviceMesh>& mesh, const Options& options,
             const std::function<void(std::int64_t, double)>& watch) {
  const Text text = read_text(options);
  torch::manual_seed(options.seed);
  Training task(options);
  Result result;

  tessera::TrainerOptions trainer;
  if (mesh) {
    // What the plan does not say does not move.
    tessera::set_policies(mesh->manager(), {.redistribution = tessera::Policy::error});
    tessera::manual_seed(mesh->manager(), options.seed);
    const auto parallelise = [&](const std::string&, torch::nn::Module& module,
                                 const tessera::DeviceMesh& on) {
      tessera::TensorParallelOptions how;
      if (on.layout().size("sharded") > 1) how.sharded_axis = "sharded";
      if (options.sequence) how.sequence_dim = 1;
      result.plan = tensor_parallel(module, on, layers_of(options.network), how).to_string();
    };
    trainer.strategy = std::make_shared<tessera::MeshStrategy>(
        *mesh, parallelise,
        std::vector<tessera::Placement>{tessera::Shard(0), tessera::Shard(0),
                                        tessera::Replicate()});
  }
  trainer.max_epochs = -1;
  trainer.max_steps = options.stop_at < 0 ? options.steps : options.stop_at;
  trainer.validate_every_epochs = 0;
  trainer.validate_every_steps = options.validate_every;
  trainer.session.clip.max_norm = 1;
  if (options.float64) trainer.session.precision = tessera::Precision::float64;
  trainer.callbacks = {std::make_shared<Recorder>(task, mesh, result, watch)};
  if (!options.checkpoint.empty()) {
    trainer.checkpoint.folder = options.checkpoint;
    trainer.checkpoint.resume = true;
    trainer.callbacks.push_back(std::make_shared<tessera::CheckpointCallback>(
        tessera::CheckpointCallbackOptions{.every_steps = options.save_every}));
  }

  // Ranks with one position on the axes "data" and "sharded" read the same samples.
  const tessera::Mesh layout =
      mesh ? mesh->layout() : tessera::Mesh({{"data", 1}, {"sharded", 1}, {"tensor", 1}});
  const int rank = mesh ? mesh->manager().rank() : 0;
  const auto loader = [&](const std::shared_ptr<tessera::TensorDataset>& data) {
    auto order = std::make_shared<tessera::FixedOrder>(
        tessera::SampleOrderOptions{.samples = data->size(), .seed = options.seed},
        tessera::BatchSchedule(static_cast<std::uint64_t>(options.batch)));
    return std::make_unique<tessera::Loader>(
        std::vector<std::shared_ptr<const tessera::Dataset>>{data}, order,
        tessera::batch_mapping(layout, {"data", "sharded"}), rank,
        tessera::LoaderOptions{.workers = 0});
  };
  const auto training = loader(text.training), held_out = loader(text.held_out);

  Memory mine;
  const auto begin = std::chrono::steady_clock::now();
  {
    Trainer run(trainer);
    mine.tensors = pictures::peak_tensor_bytes(
        [&] { run.fit(task, tessera::batches_of(*training), tessera::batches_of(*held_out)); });
    for (const at::Tensor& p : task.network->parameters()) mine.parameters += bytes_of(p);
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  mine.moments = 2 * mine.parameters;
  mine.process = pictures::peak_resident_bytes();
  result.memory = memory_of_all(mesh, mine);
  result.network = task.network;
  return result;
}

}  // namespace gpt
