#include "tessera/data/shard_batch.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "../support/ranks.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera {
namespace {

// 7 samples of a field [5, 3] and a label, all different numbers.
const at::Tensor& fields_of_samples() {
  static const at::Tensor all = torch::arange(7 * 5 * 3, torch::kDouble).reshape({7, 5, 3});
  return all;
}
const at::Tensor& labels_of_samples() {
  static const at::Tensor all = torch::arange(100, 107, torch::kLong);
  return all;
}

std::shared_ptr<const Order> shuffled(std::uint64_t batch) {
  return std::make_shared<FixedOrder>(
      SampleOrderOptions{.samples = 7, .seed = 3, .last = LastBatch::pad}, BatchSchedule(batch));
}

/// What one process reads of each step.
std::vector<LoadedBatch> alone(std::uint64_t batch, int steps) {
  Loader loader({std::make_shared<TensorDataset>(
                    std::vector<at::Tensor>{fields_of_samples(), labels_of_samples()})},
                shuffled(batch), BatchMapping({1}, {0}, {0}), 0);
  std::vector<LoadedBatch> all;
  for (int step = 0; step < steps; ++step) all.push_back(loader.next());
  return all;
}

void expect_whole(const ShardedBatch& got, const LoadedBatch& expected) {
  EXPECT_EQ(got.rows, expected.global_rows);
  EXPECT_EQ(got.real, expected.global_real);
  EXPECT_EQ(got.step, expected.step);
  ASSERT_EQ(got.tensors.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i)
    EXPECT_TRUE(full_tensor(got.tensors[i]).equal(expected.tensors[i])) << "tensor " << i;
  EXPECT_EQ(got.mask.defined(), expected.mask.defined());
  if (expected.mask.defined()) {
    EXPECT_TRUE(full_tensor(got.mask).equal(expected.mask));
  }
}

struct ShardBatchCase {
  Mesh mesh;
  std::vector<std::string> batch_axes;
  std::uint64_t batch;
};

// Meshes with the batch on one axis, on two, on none; batches below the number of ranks too.
std::vector<ShardBatchCase> shard_batch_cases() {
  std::vector<ShardBatchCase> all;
  for (const std::uint64_t batch : {1u, 3u, 5u}) {
    all.push_back({Mesh({{"data", 2}, {"domain", 2}}), {"data"}, batch});
    all.push_back({Mesh({{"domain", 2}, {"data", 2}}), {"data"}, batch});
    all.push_back({Mesh({{"data", 2}, {"fsdp", 2}, {"domain", 1}}), {"data", "fsdp"}, batch});
    all.push_back({Mesh({{"data", 3}, {"domain", 1}}), {"data"}, batch});
    all.push_back({Mesh({{"domain", 3}}), {}, batch});
    // Ranks in an order of their own.
    all.push_back({Mesh({{"data", 2}, {"domain", 2}}, {2, 0, 3, 1}), {"data"}, batch});
    all.push_back({Mesh({{"domain", 3}}, {1, 2, 0}), {}, batch});
  }
  return all;
}

TEST(ShardBatch, IsTheGlobalBatchOnEveryMesh) {
  for (const ShardBatchCase& c : shard_batch_cases()) {
    const auto expected = alone(c.batch, 6);
    test::on_ranks(c.mesh.size(), [&](DistributedManager& manager) {
      const DeviceMesh mesh = manager.mesh(c.mesh);
      const auto mapping = batch_mapping(mesh.mesh(), c.batch_axes);
      const int domain = mesh.mesh().size("domain");
      const int at = mesh.coordinate()[mesh.mesh().index("domain")];
      const auto rows = Partition::even(5, domain).interval(at);
      // Each rank has read its rows of the field alone, or all of them.
      for (const bool whole : {false, true}) {
        const at::Tensor mine =
            whole ? fields_of_samples() : fields_of_samples().slice(1, rows.begin, rows.end);
        Loader loader(
            {std::make_shared<TensorDataset>(std::vector<at::Tensor>{mine, labels_of_samples()})},
            shuffled(c.batch), mapping, manager.rank());
        const std::vector<FieldSharding> fields = {{.dims = {{"domain", 1}}, .whole = whole}, {}};
        for (const LoadedBatch& one : expected) {
          const ShardedBatch got = shard_batch(loader.next(), mesh, c.batch_axes, fields);
          expect_whole(got, one);
          EXPECT_EQ(spec(got.tensors[0]).local_shape()[1], rows.size());
          EXPECT_EQ(spec(got.tensors[0]).placements()[mesh.mesh().index("domain")], Shard(1));
        }
      }
    });
  }
}

TEST(ShardBatch, OneRankReadsForThoseThatShareItsRows) {
  for (const ShardBatchCase& c : shard_batch_cases()) {
    const auto expected = alone(c.batch, 4);
    test::on_ranks(c.mesh.size(), [&](DistributedManager& manager) {
      const DeviceMesh mesh = manager.mesh(c.mesh);
      std::unique_ptr<Loader> loader;
      if (reads_for_others(mesh, c.batch_axes))
        loader = std::make_unique<Loader>(
            std::vector<std::shared_ptr<const Dataset>>{std::make_shared<TensorDataset>(
                std::vector<at::Tensor>{fields_of_samples(), labels_of_samples()})},
            shuffled(c.batch), batch_mapping(mesh.mesh(), c.batch_axes), manager.rank());
      for (const LoadedBatch& one : expected) {
        const ShardedBatch got =
            scatter_batch(loader ? std::optional(loader->next()) : std::nullopt, mesh, c.batch_axes,
                          {{.dims = {{"domain", 2}}}, {}});
        expect_whole(got, one);
        EXPECT_EQ(spec(got.tensors[0]).placements()[mesh.mesh().index("domain")], Shard(2));
      }
    });
  }
}

// Complete samples that are taken for shards would lie one over the other, and nobody would notice.
TEST(ShardBatch, AsksWhetherRanksHaveReadCompleteTensorsOrTheirShards) {
  test::on_ranks(2, [&](DistributedManager& manager) {
    const DeviceMesh mesh = manager.mesh({{"data", 1}, {"domain", 2}});
    Loader loader({std::make_shared<TensorDataset>(
                      std::vector<at::Tensor>{fields_of_samples(), labels_of_samples()})},
                  shuffled(4), batch_mapping(mesh.mesh(), {"data"}), manager.rank());
    const LoadedBatch batch = loader.next();
    try {
      shard_batch(batch, mesh, {"data"}, {{.dims = {{"domain", 2}}}, {}});
      ADD_FAILURE() << "a batch was sharded by a guess";
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find("whole = true"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("whole = false"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("'domain'"), std::string::npos) << e.what();
    }
    const auto kept =
        shard_batch(batch, mesh, {"data"}, {{.dims = {{"domain", 2}}, .whole = true}, {}});
    EXPECT_EQ(kept.tensors[0].sizes(), batch.tensors[0].sizes());
    const auto joined =
        shard_batch(batch, mesh, {"data"}, {{.dims = {{"domain", 2}}, .whole = false}, {}});
    EXPECT_EQ(joined.tensors[0].size(2), 2 * batch.tensors[0].size(2));
  });
}

TEST(ShardBatch, RefusesWhatDoesNotFit) {
  test::on_ranks(4, [&](DistributedManager& manager) {
    const DeviceMesh mesh = manager.mesh({{"data", 2}, {"domain", 2}});
    Loader loader({std::make_shared<TensorDataset>(
                      std::vector<at::Tensor>{fields_of_samples(), labels_of_samples()})},
                  shuffled(4), batch_mapping(mesh.mesh(), {"data"}), manager.rank());
    const LoadedBatch batch = loader.next();
    const std::vector<FieldSharding> of_batch_axis = {{.dims = {{"data", 1}}, .whole = true}, {}};
    const std::vector<FieldSharding> batch_dim = {{.dims = {{"domain", 0}}, .whole = true}, {}};
    const std::vector<FieldSharding> beyond = {{.dims = {{"domain", 3}}, .whole = true}, {}};
    const std::vector<FieldSharding> too_many(3);
    const auto both = std::vector<std::string>{"domain", "data"};
    EXPECT_THROW(shard_batch(batch, mesh, {"data"}, of_batch_axis), InvalidArgument);
    EXPECT_THROW(shard_batch(batch, mesh, {"data"}, batch_dim), InvalidArgument);
    EXPECT_THROW(shard_batch(batch, mesh, {"data"}, beyond), InvalidArgument);
    EXPECT_THROW(shard_batch(batch, mesh, {"data"}, too_many), InvalidArgument);
    EXPECT_THROW(shard_batch(batch, mesh, {"rows"}), InvalidArgument);
    EXPECT_THROW(shard_batch(batch, mesh, both), InvalidArgument);
    EXPECT_THROW(shard_batch(batch, mesh, {"data", "domain"}), InvalidArgument);
    manager.world().barrier();
    // What the reading rank finds wrong, the waiting ones are told.
    EXPECT_THROW(scatter_batch(std::nullopt, mesh, {"data"}), InvalidArgument);
    manager.world().barrier();
    EXPECT_THROW(scatter_batch(batch, mesh, {"data"}, too_many), InvalidArgument);
    manager.world().barrier();
    EXPECT_TRUE(full_tensor(shard_batch(batch, mesh, {"data"}).tensors[1]).defined());
  });
}

}  // namespace
}  // namespace tessera
