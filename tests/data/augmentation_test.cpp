// Augmentation: what a user's function makes of complete samples is, bit by bit, what one process
// has, whoever reads them and wherever they are sharded.

#include "tessera/data/dataset.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "../support/folder.h"
#include "../support/ranks.h"
#include "tessera/data/shard_batch.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::augmentation_test {
namespace {

constexpr std::int64_t kSamples = 11;

// Images [2, 6, 6] and labels: all different numbers.
const at::Tensor& images() {
  static const at::Tensor all =
      torch::arange(kSamples * 2 * 6 * 6, torch::kDouble).reshape({kSamples, 2, 6, 6});
  return all;
}
const at::Tensor& labels() {
  static const at::Tensor all = torch::arange(100, 100 + kSamples, torch::kLong);
  return all;
}

// Flips, a quarter turn, an erased square, noise and a label that follows; writes to what it is
// given.
Sample altered(Sample sample, const at::Generator& draws) {
  at::Tensor image = sample[0];
  const at::Tensor drawn = at::rand({5}, draws, at::kDouble);
  const auto at = [&](int i) { return drawn[i].item<double>(); };
  if (at(0) < 0.5) image = image.flip(-1);
  if (at(1) < 0.5) image = at::rot90(image, 1, {1, 2}).contiguous();
  const auto row = static_cast<std::int64_t>(at(2) * 4),
             column = static_cast<std::int64_t>(at(3) * 4);
  image.narrow(1, row, 2).narrow(2, column, 3).zero_();
  image.add_(at::randn(image.sizes(), draws, at::kDouble));
  sample[1].add_(static_cast<std::int64_t>(at(4) * 1000));
  return {image, sample[1]};
}

// Five columns from anywhere of the six, in single precision: another shape and dtype.
Sample cropped(Sample sample, const at::Generator& draws) {
  const auto first = at::randint(2, {1}, draws).item<double>();
  return {sample[0].narrow(2, static_cast<std::int64_t>(first), 5).to(at::kFloat), sample[1]};
}

std::shared_ptr<const Order> shuffled(std::uint64_t batch) {
  return std::make_shared<FixedOrder>(
      SampleOrderOptions{.samples = kSamples, .seed = 5, .last = LastBatch::pad},
      BatchSchedule(batch));
}

std::shared_ptr<Dataset> dataset(const at::Tensor& image = images()) {
  return std::make_shared<TensorDataset>(std::vector<at::Tensor>{image, labels()});
}

std::vector<LoadedBatch> alone(std::uint64_t batch, int steps, const Augmentation& by) {
  Loader loader({dataset()}, shuffled(batch), BatchMapping({1}, {0}, {0}), 0, {.augment = by});
  std::vector<LoadedBatch> all;
  for (int step = 0; step < steps; ++step) all.push_back(loader.next());
  return all;
}

struct AugmentCase {
  Mesh mesh;
  std::vector<std::string> batch_axes;
};

std::vector<AugmentCase> augment_cases() {
  return {{Mesh({{"data", 1}, {"domain", 1}}), {"data"}},
          {Mesh({{"data", 2}, {"domain", 2}}), {"data"}},
          {Mesh({{"domain", 2}, {"data", 2}}), {"data"}},
          {Mesh({{"data", 2}, {"domain", 2}}, {2, 0, 3, 1}), {"data"}},
          {Mesh({{"domain", 3}}), {}},
          {Mesh({{"domain", 3}}, {1, 2, 0}), {}},
          {Mesh({{"data", 3}, {"domain", 1}}), {"data"}}};
}

void expect_batch(const ShardedBatch& got, const LoadedBatch& expected) {
  ASSERT_EQ(got.tensors.size(), expected.tensors.size());
  for (std::size_t i = 0; i < got.tensors.size(); ++i) {
    EXPECT_EQ(got.tensors[i].scalar_type(), expected.tensors[i].scalar_type());
    EXPECT_TRUE(full_tensor(got.tensors[i]).equal(expected.tensors[i])) << "tensor " << i;
  }
}

TEST(Augment, SamplesThatAreShardedAreThoseOfOneProcess) {
  for (const AugmentCase& c : augment_cases()) {
    for (const std::uint64_t batch : {1u, 4u, 5u}) {
      for (const auto& function : {altered, cropped}) {
        const Augmentation by{.function = function, .seed = 3};
        const auto expected = alone(batch, 5, by);
        test::on_ranks(c.mesh.size(), [&](DistributedManager& manager) {
          const DeviceMesh mesh = manager.mesh(c.mesh);
          const auto mapping = batch_mapping(mesh.mesh(), c.batch_axes);
          const int axis = mesh.mesh().index("domain"), parts = mesh.mesh().size(axis);
          // Rows of the images, sharded unevenly; one rank may have none.
          Sizes sizes(static_cast<std::size_t>(parts), 0);
          sizes.back() = 6;
          if (parts > 1) sizes[0] = 2, sizes.back() = 4;
          const auto rows = Partition(sizes).interval(mesh.coordinate()[axis]);
          // Each rank has read its rows of every image alone.
          Loader loader({dataset(images().slice(2, rows.begin, rows.end))}, shuffled(batch),
                        mapping, manager.rank());
          // And one that reads complete images, and augments them.
          Loader whole({dataset()}, shuffled(batch), mapping, manager.rank(),
                       {.workers = 1, .augment = by});
          for (const LoadedBatch& one : expected) {
            const LoadedBatch loaded = loader.next();
            const ShardedBatch before = shard_batch(
                loaded, mesh, c.batch_axes, {{.dims = {{"domain", 2}}, .whole = false}, {}});
            const ShardedBatch got = augment_batch(before, loaded.samples, by);
            expect_batch(got, one);
            EXPECT_EQ(placements(got.tensors[0]), placements(before.tensors[0]));
            EXPECT_EQ(spec(got.tensors[0]).sizes(), spec(before.tensors[0]).sizes());
            EXPECT_EQ(got.mask.defined(), before.mask.defined());
            expect_batch(shard_batch(whole.next(), mesh, c.batch_axes,
                                     {{.dims = {{"domain", 2}}, .whole = true}, {}}),
                         one);
          }
        });
      }
    }
  }
}

// The cropped dim is the sharded one: its shards are even then.
TEST(Augment, ADimThatTheFunctionChangesIsShardedEvenly) {
  const Augmentation by{.function = cropped, .seed = 8};
  const auto expected = alone(4, 2, by);
  test::on_ranks(3, [&](DistributedManager& manager) {
    const DeviceMesh mesh = manager.mesh({{"domain", 3}});
    Loader loader({dataset()}, shuffled(4), batch_mapping(mesh.mesh(), {}), manager.rank());
    for (const LoadedBatch& one : expected) {
      const LoadedBatch loaded = loader.next();
      const ShardedBatch got = augment_batch(
          shard_batch(loaded, mesh, {}, {{.dims = {{"domain", 3}}, .whole = true}, {}}),
          loaded.samples, by);
      expect_batch(got, one);
      EXPECT_EQ(spec(got.tensors[0]).sizes(), (ShardSizes{{3, {2, 2, 1}}}));
    }
  });
}

// Draws follow from seed, epoch, step and sample: not from workers, nor from where a run began.
TEST(Augment, DrawsAreThoseOfAnyOtherRun) {
  const Augmentation by{.function = altered, .seed = 12};
  const auto expected = alone(4, 9, by);
  EXPECT_FALSE(expected[0].tensors[0].equal(alone(4, 1, {altered, 13})[0].tensors[0]));
  const at::Tensor before = images().clone(), numbers = labels().clone();
  for (const int workers : {0, 1, 3}) {
    const LoaderOptions options{.workers = workers, .augment = by};
    const BatchMapping mapping({1}, {0}, {0});
    Loader loader({dataset()}, shuffled(4), mapping, 0, options);
    std::vector<at::Tensor> epochs;
    std::string state;
    for (std::size_t step = 0; step < expected.size(); ++step) {
      if (step == 4) state = loader.state();
      EXPECT_TRUE(loader.next().tensors[0].equal(expected[step].tensors[0])) << "step " << step;
    }
    Loader resumed({dataset()}, shuffled(4), mapping, 0, options);
    resumed.restore(state);
    for (std::size_t step = 4; step < expected.size(); ++step)
      EXPECT_TRUE(resumed.next().tensors[1].equal(expected[step].tensors[1])) << "step " << step;
  }
  EXPECT_TRUE(images().equal(before) && labels().equal(numbers)) << "the dataset was written to";
}

TEST(Augment, SamplesOfOtherLengthsAreCollatedOrPackedBehindIt) {
  const auto text = std::make_shared<FunctionDataset>(
      6, [](std::uint64_t i) { return Sample{torch::full({static_cast<int>(i % 3) + 1}, 1.0)}; });
  const auto order =
      std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 6}, BatchSchedule(6));
  const Augmentation longer{.function = [](Sample sample, const at::Generator&) {
    return Sample{at::cat({sample[0], at::full({1}, 2.0)})};
  }};
  const BatchMapping mapping({1}, {0}, {0});
  Loader collated({text}, order, mapping, 0,
                  {.augment = longer, .collate = [](const auto& all) { return pad_collate(all); }});
  const LoadedBatch batch = collated.next();
  EXPECT_EQ(batch.tensors[0].size(1), 4);
  EXPECT_EQ(batch.tensors[1].sum().item<std::int64_t>(), 12 + 6);
  const Augmentation doubled{
      .function = [](Sample sample, const at::Generator&) { return Sample{sample[0] * 2}; }};
  const auto packing =
      std::make_shared<PackedOrder>(std::vector<std::uint64_t>{1, 2, 3, 1, 2, 3}, 4, 3, 1, false);
  Loader packed({text}, packing, mapping, 0, {.augment = doubled});
  EXPECT_EQ(packed.next().tensors[0].sum().item<double>(), 24);
  Loader refused({text}, packing, mapping, 0, {.augment = longer});
  EXPECT_THROW(refused.next(), SampleError);
}

TEST(Augment, WhatTheFunctionThrowsOnOneRankAllAreTold) {
  const Augmentation by{.function = [](Sample sample, const at::Generator&) {
    if (sample[1].item<std::int64_t>() == 103) throw InvalidArgument("no such image");
    return sample;
  }};
  const auto refusal = [](const auto& call) { return testing::thrown<Error>(call); };
  Loader one({dataset()}, shuffled(11), BatchMapping({1}, {0}, {0}), 0, {.augment = by});
  EXPECT_NE(refusal([&] { one.next(); }).find("sample 3: no such image"), std::string::npos);
  test::on_ranks(4, [&](DistributedManager& manager) {
    const DeviceMesh mesh = manager.mesh({{"data", 2}, {"domain", 2}});
    Loader loader({dataset()}, shuffled(11), batch_mapping(mesh.mesh(), {"data"}), manager.rank());
    const LoadedBatch loaded = loader.next();
    const ShardedBatch batch =
        shard_batch(loaded, mesh, {"data"}, {{.dims = {{"domain", 3}}, .whole = true}, {}});
    const auto said = refusal([&] { augment_batch(batch, loaded.samples, by); });
    EXPECT_NE(said.find("sample 3: no such image"), std::string::npos) << said;
    EXPECT_NE(said.find("rank "), std::string::npos) << said;
    // Nothing is left behind: the next call is right.
    const auto kept = augment_batch(batch, loaded.samples,
                                    {.function = [](Sample s, const at::Generator&) { return s; }});
    EXPECT_TRUE(full_tensor(kept.tensors[1]).equal(full_tensor(batch.tensors[1])));
    // On one rank alone: a sample too few.
    std::vector<SampleRef> fewer = loaded.samples;
    if (manager.rank() == 1) fewer.pop_back();
    EXPECT_NE(refusal([&] { augment_batch(batch, fewer, by); }).find("LoadedBatch::samples"),
              std::string::npos);
    // Another sample than the rank that shares the row, and another step.
    std::vector<SampleRef> other = loaded.samples;
    if (manager.rank() == 1) other[0].index += 1;
    EXPECT_NE(refusal([&] { augment_batch(batch, other, by); }).find("share row 0"),
              std::string::npos);
    ShardedBatch late = batch;
    if (manager.rank() == 2) late.step += 1;
    EXPECT_NE(refusal([&] { augment_batch(late, loaded.samples, by); }).find("different steps"),
              std::string::npos);
  });
}

TEST(Augment, RefusesWhatDoesNotFit) {
  test::on_ranks(2, [&](DistributedManager& manager) {
    const DeviceMesh mesh = manager.mesh({{"domain", 2}});
    Loader loader({dataset()}, shuffled(5), batch_mapping(mesh.mesh(), {}), manager.rank());
    const LoadedBatch loaded = loader.next();
    const ShardedBatch batch =
        shard_batch(loaded, mesh, {}, {{.dims = {{"domain", 3}}, .whole = true}, {}});
    const auto refusal = [&](const std::function<Sample(Sample)>& function) {
      const Augmentation by{.function = [&](Sample sample, const at::Generator&) {
        return function(std::move(sample));
      }};
      return testing::thrown<Error>([&] { augment_batch(batch, loaded.samples, by); });
    };
    EXPECT_THROW(augment_batch(batch, loaded.samples, {}), InvalidArgument);
    EXPECT_THROW(augment_batch({}, {}, {.function = altered}), InvalidArgument);
    ShardedBatch plain = batch;
    plain.tensors[1] = labels();
    EXPECT_THROW(augment_batch(plain, loaded.samples, {.function = altered}), InvalidArgument);
    EXPECT_NE(
        refusal([](Sample s) { return Sample{s[0]}; }).find("made 1 tensors of a sample of 2"),
        std::string::npos);
    EXPECT_NE(
        refusal([](Sample s) { return Sample{s[0], at::Tensor()}; }).find("all of them defined"),
        std::string::npos);
    // Ranks' samples differ from each other, and those of one rank do.
    const std::int64_t first = loaded.tensors[1][0].item<std::int64_t>();
    EXPECT_NE(refusal([&](Sample s) {
                if (s[1].item<std::int64_t>() == first) s[0] = s[0].to(at::kFloat);
                return s;
              }).find("augmented sample"),
              std::string::npos);
    EXPECT_NE(refusal([&](Sample s) {
                if (manager.rank() == 0) s[0] = s[0].narrow(1, 0, 3);
                return s;
              }).find("of different shapes or dtypes"),
              std::string::npos);
    EXPECT_NE(refusal([](Sample s) { return Sample{s[0].sum(), s[1]}; }).find("dim 3 of a field"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace tessera::augmentation_test
