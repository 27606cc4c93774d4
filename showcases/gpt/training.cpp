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
#include "tessera/nn/fully_shard.h"
#include "tessera/schedule/generators.h"
#include "tessera/schedule/list_schedule.h"
#include "tessera/schedule/simulate.h"
#include "tessera/tensor/policy.h"
#include "tessera/tensor/shard_tensor.h"
#include "tessera/train/callbacks.h"
#include "tessera/train/pipeline_strategy.h"
#include "tessera/train/stop.h"
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
  std::ranges::copy(bytes, all.mutable_data_ptr<std::uint8_t>());
  const at::Tensor rows = all.unfold(0, row, options.network.length).contiguous();
  const std::int64_t held = rows.size(0) / 10, trained = rows.size(0) - held;
  const auto dataset = [&](std::int64_t begin, std::int64_t n) {
    return std::make_shared<tessera::TensorDataset>(
        std::vector<at::Tensor>{rows.narrow(0, begin, n).clone()});
  };
  return {dataset(0, trained), dataset(trained, held)};
}

at::Tensor loss_of(const at::Tensor& scores, const at::Tensor& following) {
  return at::cross_entropy_loss(scores.flatten(0, 1), following.flatten());
}

struct Training : tessera::Task {
  explicit Training(const Options& o) : options(o), network(o.network) {}
  Training(const Options& o, const std::vector<Part>& parts)
      : options(o), network(o.network, parts) {}
  tessera::NamedModules modules() override { return {{"network", network.ptr()}}; }
  tessera::Optimizers optimizers() override {
    return {std::make_shared<torch::optim::AdamW>(
        network->parameters(),
        torch::optim::AdamWOptions(options.learning_rate).weight_decay(0.1))};
  }
  std::vector<tessera::LearningRateSchedule> schedules() override {
    return {{tessera::warmup_cosine(std::min<std::int64_t>(20, options.steps / 10 + 1),
                                    options.steps, 0.1)}};
  }
  // Bytes, and those that follow them.
  std::vector<at::Tensor> pairs(const MicroBatch& batch) const {
    const at::Tensor bytes = batch.tensors[0].to(at::kLong);
    const std::int64_t n = options.network.length;
    return {bytes.narrow(1, 0, n), bytes.narrow(1, 1, n)};
  }
  at::Tensor loss(const MicroBatch& batch) {
    const auto given = pairs(batch);
    moves(given[0].size(0) == 1);
    return loss_of(network->forward(given[0]), given[1]);
  }
  at::Tensor training_step(const MicroBatch& batch, Step&) override { return loss(batch); }
  void validation_step(const MicroBatch& batch, Step& step) override {
    step.log("loss", loss(batch));
  }
  // What the plan does not say does not move: but for one sample alone, whose rows are views that
  // no rank has a shard of.
  void moves(bool allowed) const {
    if (manager)
      tessera::set_policies(
          *manager, {.redistribution = allowed ? tessera::Policy::allow : tessera::Policy::error});
  }
  // Scores of the next byte; the same on every rank.
  virtual at::Tensor scores(const at::Tensor& tokens) { return next_scores(network, tokens); }
  const Options options;
  Network network;
  std::optional<tessera::DistributedManager> manager;
};

// The parts of the network that are this rank's stages.
struct StagedTraining : Training {
  StagedTraining(const Options& o, std::shared_ptr<tessera::PipelineStrategy> s,
                 tessera::PipelineSchedule how, const std::vector<Part>& all,
                 const std::vector<Part>& mine)
      : Training(o, mine), strategy(std::move(s)), schedule(std::move(how)), parts(all) {}

  tessera::Optimizers optimizers() override {
    std::vector<std::shared_ptr<tessera::PipelineStage>> stages;
    for (const int s : schedule.stages_of(strategy->mesh().group(strategy->axis()).rank())) {
      const Part part = parts[static_cast<std::size_t>(s)];
      stages.push_back(tessera::make_stage(
          network->layers_of(part),
          [this, net = network, part](const std::vector<at::Tensor>& x) mutable {
            if (x[0].size(0) == 1) moves(true);
            return std::vector<at::Tensor>{net->forward(part, x[0])};
          }));
    }
    tessera::PipelineOptions how;
    if (!network->embedding.is_empty()) how.tied["embedding"] = {network->embedding->weight};
    if (options.network.dropout > 0) how.seed = options.seed;
    pipeline = strategy->make_pipeline(
        schedule, std::move(stages),
        [](const auto& scores, const auto& following) { return loss_of(scores[0], following[0]); },
        how);
    return Training::optimizers();
  }
  tessera::PipelineBatch split(const MicroBatch& batch) const {
    MicroBatch two = batch;
    two.tensors = pairs(batch);
    return strategy->split(two, 1, options.micro_batches);
  }
  at::Tensor training_step(const MicroBatch& batch, Step& step) override {
    moves(false);
    return tessera::run_pipeline(*pipeline, split(batch), step);
  }
  void validation_step(const MicroBatch& batch, Step& step) override {
    moves(false);
    tessera::evaluate_pipeline(*pipeline, split(batch), step);
  }
  // The last stage's ranks have the scores, and tell the others.
  at::Tensor scores(const at::Tensor& tokens) override {
    const tessera::Group along = strategy->mesh().group(strategy->axis());
    const int first = schedule.placement.front(), last = schedule.placement.back();
    tessera::PipelineBatch one;
    one.inputs = {{tokens}};
    const std::vector<tessera::Placement> everywhere(
        static_cast<std::size_t>(strategy->stages()->mesh().dims()), tessera::Replicate());
    one = tessera::shard_batch(std::move(one), *strategy->stages(), everywhere,
                               along.rank() == first, false);
    const auto seen = pipeline->evaluate(one);
    const at::Tensor next = at::zeros({vocabulary}, at::kDouble);
    if (along.rank() == last)
      next.copy_(tessera::full_tensor(seen.micro_batches[0][0])[0][-1].to(at::kDouble));
    along.broadcast(next, last, {.name = "scores"});
    return next;
  }
  // What dropout draws depends on it.
  void save(tessera::CheckpointState& state) override {
    state.set_integer("pipeline.steps", static_cast<std::int64_t>(pipeline->steps()));
  }
  void loaded(const tessera::CheckpointState& state) override {
    if (state.has("pipeline.steps"))
      pipeline->set_steps(static_cast<std::uint64_t>(state.get_integer("pipeline.steps")));
  }

  std::shared_ptr<tessera::PipelineStrategy> strategy;
  const tessera::PipelineSchedule schedule;
  const std::vector<Part> parts;
  std::shared_ptr<tessera::Pipeline> pipeline;
};

class Recorder : public tessera::Callback {
 public:
  Recorder(Training& training, Result& result, std::function<void(std::int64_t, double)> watch)
      : training_(training), result_(result), watch_(std::move(watch)) {}
  std::string name() const override { return "recorder"; }
  void on_step_end(Trainer& trainer, const tessera::StepResult& step) override {
    result_.losses.emplace_back(trainer.step(), step.loss);
    if (watch_) watch_(trainer.step(), step.loss);
  }
  void on_validation_end(Trainer& trainer, bool complete) override {
    if (!complete) return;
    const Options& o = training_.options;
    // Not longer than it takes to be told to stop.
    tessera::PeriodicVote vote(trainer.session().strategy());
    const auto stop = [&] { return vote.poll(trainer.session().wanted() >= tessera::Stop::usr1); };
    const bool was_training = training_.network->is_training();
    training_.network->eval();
    // One text on all ranks: what is sharded over ranks that share samples moves as it has to.
    training_.moves(true);
    const auto scores = [&](const at::Tensor& tokens) { return training_.scores(tokens); };
    result_.samples.push_back(
        {trainer.step(), trainer.metrics().at("val/loss"),
         continue_text(scores, o.network.length, o.prompt, o.sample, o.seed, stop)});
    training_.moves(false);
    training_.network->train(was_training);
  }

 private:
  Training& training_;
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

tessera::LayerShardings layers_of(const Network& network) {
  using tessera::column, tessera::row;
  const std::int64_t heads = network->options.heads;
  tessera::LayerShardings layers;
  if (!network->blocks.empty())
    layers = {{"*.attention.qkv", column(heads)},
              {"*.attention.out", row(heads)},
              {"*.up", column()},
              {"*.down", row()}};
  if (!network->embedding.is_empty()) layers.emplace_back("embedding", tessera::vocabulary());
  return layers;
}

tessera::PipelineSchedule schedule_named(const std::string& name, int ranks, int micro_batches) {
  if (name == "gpipe") return tessera::schedule_gpipe(ranks, micro_batches);
  if (name == "1f1b") return tessera::schedule_1f1b(ranks, micro_batches);
  if (name == "interleaved") return tessera::schedule_interleaved(ranks, 2, micro_batches);
  if (name == "zb-h1") return tessera::schedule_zero_bubble_h1(ranks, micro_batches);
  if (name == "zb-v") return tessera::schedule_zero_bubble_v(ranks, micro_batches);
  if (name == "list")
    return tessera::list_schedule(tessera::v_placement(ranks), micro_batches,
                                  tessera::PipelineCosts::uniform(2 * ranks));
  throw tessera::InvalidArgument(tessera::concat(
      "no schedule is named '", name, "'; there are gpipe, 1f1b, interleaved, zb-h1, zb-v, list"));
}

Result train(const std::optional<tessera::DeviceMesh>& mesh, const Options& options,
             const std::function<void(std::int64_t, double)>& watch) {
  const Text text = read_text(options);
  Result result;
  {
    const Network complete(options.network);
    for (const at::Tensor& p : complete->parameters()) result.weights += p.numel();
  }
  torch::manual_seed(options.seed);
  std::unique_ptr<Training> owned;
  const bool staged = mesh && mesh->mesh().has_axis("pipe");

  tessera::TrainerOptions trainer;
  if (mesh) {
    tessera::manual_seed(mesh->manager(), options.seed);
    const auto parallelise = [&](const std::string&, torch::nn::Module& module,
                                 const tessera::DeviceMesh& on) {
      tessera::TensorParallelOptions how;
      // Gathered block by block, ahead of use. Stages share the embedding, whose shards must be the
      // same in both: there each operator gathers what it takes.
      const bool shards = on.mesh().size("sharded") > 1;
      if (shards && staged) how.sharded_axis = "sharded";
      if (options.sequence) how.sequence_dim = 1;
      result.plan = tensor_parallel(module, on, layers_of(owned->network), how).to_string();
      if (shards && !staged) fully_shard(module, on, {.axes = {"sharded"}});
    };
    const std::vector<tessera::Placement> rows{tessera::Shard(0), tessera::Shard(0),
                                               tessera::Replicate()};
    if (staged) {
      const auto strategy =
          std::make_shared<tessera::PipelineStrategy>(*mesh, "pipe", parallelise, rows);
      const tessera::Group along = mesh->group("pipe");
      const auto schedule = schedule_named(options.schedule, along.size(), options.micro_batches);
      const std::vector<Part> parts = cut_network(options.network, schedule.stages());
      std::vector<Part> mine;
      for (const int s : schedule.stages_of(along.rank()))
        mine.push_back(parts[static_cast<std::size_t>(s)]);
      owned = std::make_unique<StagedTraining>(options, strategy, schedule, parts, mine);
      trainer.strategy = strategy;
    } else {
      trainer.strategy = std::make_shared<tessera::MeshStrategy>(*mesh, parallelise, rows);
    }
  }
  if (!owned) owned = std::make_unique<Training>(options);
  Training& task = *owned;
  if (mesh) task.manager = mesh->manager();
  trainer.max_epochs = -1;
  trainer.max_steps = options.stop_at < 0 ? options.steps : options.stop_at;
  trainer.validate_every_epochs = 0;
  trainer.validate_every_steps = options.validate_every;
  trainer.session.clip.max_norm = 1;
  if (options.float64) trainer.session.precision = tessera::Precision::float64;
  trainer.callbacks = {std::make_shared<Recorder>(task, result, watch)};
  if (!options.checkpoint.empty()) {
    trainer.checkpoint.folder = options.checkpoint;
    trainer.checkpoint.resume = true;
    trainer.callbacks.push_back(std::make_shared<tessera::CheckpointCallback>(
        tessera::CheckpointCallbackOptions{.every_steps = options.save_every}));
  }

  // Ranks with one position on the axes "data" and "sharded" read the same samples.
  const tessera::Mesh layout =
      mesh ? mesh->mesh() : tessera::Mesh({{"data", 1}, {"sharded", 1}, {"tensor", 1}});
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
    if (staged && !result.losses.empty()) {
      const auto& pipeline = *static_cast<StagedTraining&>(task).pipeline;
      const tessera::Timeline ran = pipeline.timeline();
      result.timeline = tessera::visualize_schedule(pipeline.schedule(), ran);
      result.waited = ran.bubble();
    }
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  mine.moments = 2 * mine.parameters;
  mine.process = pictures::peak_resident_bytes();
  result.memory = memory_of_all(mesh, mine);
  result.network = task.network;
  return result;
}

}  // namespace gpt
