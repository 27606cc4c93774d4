#include "training.h"

#include <algorithm>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/sampling/permutation.h"
#include "tessera/train/callbacks.h"
#include "tessera/train/trainer.h"

namespace tokens {
namespace {

class Language : public tessera::Task {
 public:
  Language(Model model, const Options& options) : model_(std::move(model)), options_(options) {}
  tessera::NamedModules modules() override { return {{"model", model_.ptr()}}; }
  tessera::Optimizers optimizers() override {
    return {std::make_shared<torch::optim::Adam>(
        model_->parameters(), torch::optim::AdamOptions(options_.learning_rate))};
  }
  at::Tensor training_step(const tessera::MicroBatch& batch, tessera::Step&) override {
    const at::Tensor bytes = batch.tensors[0].to(at::kLong);
    if (bytes.numel() > 0 && bytes.max().item<std::int64_t>() >= vocabulary)
      throw tessera::InvalidArgument(tessera::concat("'", options_.text,
                                                     "' is not ASCII: it holds the byte ",
                                                     bytes.max().item<std::int64_t>()));
    // A rank without samples runs one that does not count, since a GRU takes no empty batch.
    if (batch.rows == 0) return 0 * model_(at::zeros({1, options_.row}, at::kLong)).sum();
    const at::Tensor logits = model_(bytes.narrow(1, 0, options_.row));
    return at::cross_entropy_loss(logits.flatten(0, 1), bytes.narrow(1, 1, options_.row).flatten());
  }

 private:
  Model model_;
  const Options& options_;
};

class Watch : public tessera::Callback {
 public:
  explicit Watch(const std::function<void(const Step&)>& watch) : watch_(watch) {}
  std::string name() const override { return "watch"; }
  void on_step_end(tessera::Trainer& trainer, const tessera::StepResult& result) override {
    watch_({static_cast<std::uint64_t>(trainer.step() - 1),
            static_cast<std::uint64_t>(trainer.epoch()), result.loss});
  }

 private:
  const std::function<void(const Step&)>& watch_;
};

}  // namespace

ModelImpl::ModelImpl(std::int64_t hidden) {
  embedding = register_module("embedding", torch::nn::Embedding(vocabulary, hidden / 2));
  recurrent = register_module(
      "recurrent", torch::nn::GRU(torch::nn::GRUOptions(hidden / 2, hidden).batch_first(true)));
  output = register_module("output", torch::nn::Linear(hidden, vocabulary));
}

at::Tensor ModelImpl::forward(const at::Tensor& bytes) {
  return output(std::get<0>(recurrent(embedding(bytes))));
}

std::shared_ptr<const tessera::Dataset> samples(const Options& options) {
  const auto row = static_cast<std::uint64_t>(options.row);
  return std::make_shared<tessera::TokenFileDataset>(options.text, at::kByte, row + 1, row);
}

Model train(const std::shared_ptr<tessera::Strategy>& strategy, const Options& options,
            const std::function<void(const Step&)>& watch) {
  torch::manual_seed(options.seed);
  Model model(options.hidden);
  if (options.float64) model->to(at::kDouble);

  const auto data = samples(options);
  auto order = std::make_shared<tessera::FixedOrder>(
      tessera::SampleOrderOptions{.samples = data->size(), .seed = options.seed},
      tessera::BatchSchedule(static_cast<std::uint64_t>(options.batch)));
  const tessera::Mesh mesh({{"data", strategy->size()}});
  tessera::Loader loader({data}, order, tessera::batch_mapping(mesh, {"data"}), strategy->rank(),
                         {.workers = options.workers});

  tessera::TrainerOptions how;
  how.strategy = strategy;
  how.max_epochs = -1;
  how.max_steps = options.steps;
  how.callbacks = {std::make_shared<Watch>(watch)};
  how.checkpoint.folder = options.checkpoint;
  how.session.signals = !options.checkpoint.empty();  // to save; without a folder they end it
  if (!options.checkpoint.empty()) {
    how.checkpoint.resume = true;
    how.callbacks.push_back(std::make_shared<tessera::CheckpointCallback>(
        tessera::CheckpointCallbackOptions{.every_steps = options.save_every}));
  }
  Language task(model, options);
  const auto done = tessera::Trainer(how).fit(task, tessera::batches_of(loader));
  if (done.stop != tessera::Stop::none)
    throw tessera::Error(tessera::concat("stopped by ", tessera::to_string(done.stop), " after ",
                                         done.steps, " steps; start it again to go on"));
  return model;
}

std::string continue_text(Model& model, const std::string& start, int length, std::uint64_t seed) {
  const torch::NoGradGuard no_grad;
  const tessera::KeyedRandom random(seed);
  std::string text = start;
  for (int i = 0; i < length; ++i) {
    std::vector<std::int64_t> bytes;
    for (std::size_t b = text.size() < 128 ? 0 : text.size() - 128; b < text.size(); ++b)
      bytes.push_back(static_cast<unsigned char>(text[b]) % vocabulary);
    const at::Tensor logits = model->forward(at::tensor(bytes, at::kLong).unsqueeze(0))[0][-1];
    const at::Tensor sums = at::softmax(logits.to(at::kDouble), 0).cumsum(0).contiguous();
    const auto* sum = sums.const_data_ptr<double>();
    const double drawn = random.uniform(static_cast<std::uint64_t>(i)) * sum[vocabulary - 1];
    text += static_cast<char>(std::min<std::ptrdiff_t>(
        std::upper_bound(sum, sum + vocabulary, drawn) - sum, vocabulary - 1));
  }
  return text.substr(start.size());
}

}  // namespace tokens
