#include "training.h"

#include <algorithm>
#include <filesystem>

#include "tessera/base/text.h"
#include "tessera/nn/distributed_data_parallel.h"
#include "tessera/sampling/permutation.h"

namespace tokens {
namespace {

void save(const std::string& path, Model& model, torch::optim::Optimizer& optimizer,
          const tessera::Loader& loader) {
  torch::serialize::OutputArchive archive, weights, moments;
  model->save(weights);
  optimizer.save(moments);
  archive.write("model", weights);
  archive.write("optimizer", moments);
  archive.write("loader", c10::IValue(loader.state()));
  archive.save_to(path + ".new");
  // whole or not at all, also when this process is killed
  std::filesystem::rename(path + ".new", path);
}

void restore(const std::string& path, Model& model, torch::optim::Optimizer& optimizer,
             tessera::Loader& loader) {
  torch::serialize::InputArchive archive, weights, moments;
  archive.load_from(path);
  archive.read("model", weights);
  archive.read("optimizer", moments);
  model->load(weights);
  optimizer.load(moments);
  c10::IValue state;
  archive.read("loader", state);
  loader.restore(state.toStringRef());
}

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

Model train(const tessera::Group& group, const Options& options,
            const std::function<void(const Step&)>& watch) {
  torch::manual_seed(options.seed);
  Model model(options.hidden);
  if (options.float64) model->to(at::kDouble);
  torch::optim::Adam optimizer(model->parameters(),
                               torch::optim::AdamOptions(options.learning_rate));

  const auto data = samples(options);
  auto order = std::make_shared<tessera::FixedOrder>(
      tessera::SampleOrderOptions{.samples = data->size(), .seed = options.seed},
      tessera::BatchSchedule(static_cast<std::uint64_t>(options.batch)));
  const tessera::Mesh mesh({{"data", group.size()}});
  tessera::Loader loader({data}, order, tessera::batch_mapping(mesh, {"data"}), group.rank(),
                         {.workers = options.workers});
  if (!options.checkpoint.empty() && std::filesystem::exists(options.checkpoint))
    restore(options.checkpoint, model, optimizer, loader);
  loader.require_agreement(group);

  tessera::DistributedDataParallel parallel(model, group);
  for (;;) {
    const tessera::LoadedBatch batch = loader.next();
    if (batch.step >= static_cast<std::uint64_t>(options.steps)) break;
    const at::Tensor bytes = batch.tensors[0].to(at::kLong);
    if (bytes.numel() > 0 && bytes.max().item<std::int64_t>() >= vocabulary)
      throw tessera::InvalidArgument(tessera::concat("'", options.text,
                                                     "' is not ASCII: it holds the byte ",
                                                     bytes.max().item<std::int64_t>()));
    const at::Tensor input = bytes.narrow(1, 0, options.row),
                     target = bytes.narrow(1, 1, options.row);
    optimizer.zero_grad();
    // A rank without samples runs one that does not count, since a GRU takes no empty batch.
    const at::Tensor logits =
        parallel(batch.rows > 0 ? input : at::zeros({1, options.row}, at::kLong));
    const at::Tensor own = batch.rows > 0
                               ? at::cross_entropy_loss(logits.flatten(0, 1), target.flatten())
                               : 0 * logits.sum();
    const at::Tensor loss = parallel.mean_loss(own, static_cast<double>(batch.real));
    loss.backward();
    optimizer.step();
    watch({batch.step, batch.epoch, loss.item<double>()});
    const auto done = static_cast<std::int64_t>(batch.step) + 1;
    if (!options.checkpoint.empty() && group.rank() == 0 &&
        (done % options.save_every == 0 || done == options.steps))
      save(options.checkpoint, model, optimizer, loader);
  }
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
