#pragma once
// Samples of an image and a label, which lie differently, in the trainer: run on threads and on
// processes.

#include "cases.h"
#include "tessera/data/dataset.h"
#include "tessera/partition/partition.h"

namespace tessera::test {

inline constexpr std::int64_t kImages = 13, kSide = 7;

// Fields of two kinds: an image, of which rows lie over an axis, and a label of the whole sample.
inline Fields image_fields() {
  at::Generator own = at::detail::createCPUGenerator(31);
  const at::Tensor image = at::randn({kImages, 2, kSide, 4}, own, at::kDouble);
  const at::Tensor label = at::randn({kImages, 3}, own, at::kDouble);
  return {{"input/image", image}, {"label", label}};
}

struct PooledImpl : torch::nn::Module {
  PooledImpl()
      : conv(register_module("conv",
                             torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1)))),
        head(register_module("head", torch::nn::Linear(4, 3))) {
    to(at::kDouble);
    fill(*this, 21);
  }
  at::Tensor forward(const at::Tensor& x) { return head(torch::tanh(conv(x)).mean({2, 3})); }
  torch::nn::Conv2d conv;
  torch::nn::Linear head;
};
TORCH_MODULE(Pooled);

class Classify : public Task {
 public:
  explicit Classify(bool sharded = false) : sharded_(sharded) {}
  NamedModules modules() override { return {{"net", net.ptr()}}; }
  Optimizers optimizers() override {
    return {
        std::make_shared<torch::optim::Adam>(net->parameters(), torch::optim::AdamOptions(0.02))};
  }
  at::Tensor loss(const MicroBatch& batch) {
    const at::Tensor image = batch.field("input/image"), label = batch.field("label");
    if (sharded_) {
      const int domain = spec(image).mesh().mesh().index("domain");
      EXPECT_EQ(placements(image)[domain], Shard(2));
      EXPECT_EQ(placements(label)[domain], Replicate());
    }
    const at::Tensor off = (net->forward(image) - label).square().mean(1);
    if (!batch.mask.defined()) return off.mean();
    const at::Tensor counts = batch.mask.to(at::kDouble);
    return (off * counts).sum() / counts.sum();
  }
  at::Tensor training_step(const MicroBatch& batch, Step&) override { return loss(batch); }
  void validation_step(const MicroBatch& batch, Step& step) override {
    step.log("loss", loss(batch));
    step.log("rows", static_cast<double>(batch.real), Metrics::Kind::sum);
  }
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> all;
    for (const auto& p : net->parameters()) all.push_back(whole(p).clone());
    return all;
  }
  Pooled net;

 private:
  bool sharded_;
};

// Padded batches of 4 of 13 samples: the last one of an epoch has a row that counts.
inline std::shared_ptr<const Order> image_order() {
  return std::make_shared<FixedOrder>(
      SampleOrderOptions{.samples = kImages, .seed = 2, .last = LastBatch::pad}, BatchSchedule(4));
}

inline TrainerOptions image_options(std::shared_ptr<Strategy> strategy) {
  TrainerOptions options = with(std::move(strategy), 2);
  options.validate_every_epochs = 1;
  return options;
}

enum class Read { shards, complete, one };

struct ImageRun {
  std::vector<at::Tensor> values;
  std::map<std::string, double> metrics;
};

/// One process.
inline ImageRun images_alone(const Augmentation& by = {}) {
  Classify task;
  const auto data = std::make_shared<TensorDataset>(image_fields());
  const BatchMapping mapping({1}, {0}, {0});
  Loader loader({data}, image_order(), mapping, 0, {.augment = by});
  Loader held({data}, image_order(), mapping, 0);
  Trainer trainer(image_options(nullptr));
  ImageRun run;
  run.metrics = trainer.fit(task, batches_of(loader), batches_of(held)).metrics;
  run.values = task.values();
  return run;
}

inline BatchFields image_placements(Read read) {
  FieldSharding image{.field = "input", .dims = {{"domain", 2}}};
  if (read != Read::one) image.whole = read == Read::complete;
  return {.rows = {"data"}, .fields = {image}, .one_reads = read == Read::one};
}

/// What this rank has of the data: its rows of the images, all, or none.
inline std::shared_ptr<const Dataset> images_of_rank(const DeviceMesh& mesh, Read read) {
  const Fields all = image_fields();
  if (read == Read::complete || (read == Read::one && reads_for_others(mesh, {"data"})))
    return std::make_shared<TensorDataset>(all);
  if (read == Read::one)
    return std::make_shared<FunctionDataset>(kImages, all.names(), [](std::uint64_t) -> Fields {
      throw Error("this rank reads nothing");
    });
  const int axis = mesh.mesh().index("domain");
  const Interval rows =
      Partition::even(kSide, mesh.mesh().size(axis)).interval(mesh.coordinate()[axis]);
  return std::make_shared<TensorDataset>(
      Fields{{"input/image", all.at("input/image").slice(2, rows.begin, rows.end)},
             {"label", all.at("label")}});
}

inline std::vector<Mesh> image_meshes(int ranks) {
  std::vector<Mesh> all{mapped({{"data", 1}, {"domain", ranks}}),
                        mapped({{"data", ranks}, {"domain", 1}})};
  if (ranks == 4) all.push_back(mapped({{"data", 2}, {"domain", 2}}));
  if (ranks == 4) all.push_back(mapped({{"domain", 2}, {"data", 2}}));
  return all;
}

inline void expect_run(const ImageRun& got, const ImageRun& expected, const std::string& what) {
  expect_near(got.values, expected.values, what);
  for (const char* name : {"train/loss", "val/loss", "val/rows"})
    EXPECT_NEAR(got.metrics.at(name), expected.metrics.at(name), 1e-10) << what << ", " << name;
}

/// Sharded, complete, or read by one rank for all: the parameters and metrics of one process.
inline void batch_fields_case(DistributedManager& manager) {
  const ImageRun expected = images_alone();
  for (const Mesh& layout : image_meshes(manager.world_size())) {
    const DeviceMesh mesh = manager.mesh(layout);
    for (const Read read : {Read::shards, Read::complete, Read::one}) {
      const auto data = images_of_rank(mesh, read);
      const bool reads = read != Read::one || reads_for_others(mesh, {"data"});
      const auto mapping = batch_mapping(layout, {"data"});
      Loader loader({data}, image_order(), mapping, manager.rank(), {.reads = reads});
      Loader held({data}, image_order(), mapping, manager.rank(), {.workers = 1, .reads = reads});
      const auto strategy =
          std::make_shared<MeshStrategy>(mesh, NamedPlacements{}, image_placements(read));
      EXPECT_EQ(strategy->sharing(), layout.size("domain"));
      Classify task(true);
      ImageRun run;
      run.metrics =
          Trainer(image_options(strategy)).fit(task, batches_of(loader), batches_of(held)).metrics;
      run.values = task.values();
      expect_run(run, expected, concat(layout, ", reading ", static_cast<int>(read)));
    }
  }
}

}  // namespace tessera::test
