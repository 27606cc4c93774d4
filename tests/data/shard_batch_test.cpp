#include "tessera/data/shard_batch.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "../support/folder.h"
#include "../support/ranks.h"
#include "tessera/tensor/shard_tensor.h"

namespace tessera::shard_batch_test {
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

// Rows that no loader has dealt: the rank at `row` of the batch has as many as this of each step.
std::int64_t rows_at(int row, int step) { return (row * 3 + step * 2) % 4; }

TensorBatch rows_of(int first, int last, int step, bool masked) {
  TensorBatch batch{.step = 7, .epoch = 1, .names = {"field", "label"}};
  std::vector<at::Tensor> fields, labels, masks;
  for (int row = first; row < last; ++row) {
    at::Generator own = at::detail::createCPUGenerator(100 * row + step);
    const std::int64_t rows = rows_at(row, step);
    fields.push_back(at::randn({rows, 5, 3}, own, at::kDouble));
    labels.push_back(at::randint(100, {rows}, own, at::kLong));
    masks.push_back(at::arange(rows).ne(0));
    batch.rows += rows;
    batch.real += masked ? std::max<std::int64_t>(rows - 1, 0) : rows;
  }
  batch.tensors = {at::cat(fields), at::cat(labels)};
  if (masked) batch.mask = at::cat(masks);
  return batch;
}

TEST(ShardRows, AnyNumbersOfRowsAreOneBatch) {
  const std::vector<FieldSharding> named = {
      {.field = "field", .dims = {{"domain", 1}}, .whole = true}};
  for (const ShardBatchCase& c : shard_batch_cases()) {
    if (c.batch != 1) continue;
    test::on_ranks(c.mesh.size(), [&](DistributedManager& manager) {
      const DeviceMesh mesh = manager.mesh(c.mesh);
      int row = 0, rows = 1;
      for (const std::string& axis : c.batch_axes) {
        const int at = mesh.mesh().index(axis);
        row = row * mesh.mesh().size(at) + mesh.coordinate()[at];
        rows *= mesh.mesh().size(at);
      }
      const bool reads = reads_for_others(mesh, c.batch_axes);
      for (int step = 0; step < 6; ++step) {
        // A mask that some rows alone have is one of all.
        const bool masked = step % 3 == 1, mine = masked && (row == 0 || step % 2 == 0);
        TensorBatch all;
        std::vector<TensorBatch> parts;
        for (int r = 0; r < rows; ++r)
          parts.push_back(rows_of(r, r + 1, step, masked && (r == 0 || step % 2 == 0)));
        TensorBatch given = rows_of(row, row + 1, step, mine);
        all = rows_of(0, rows, step, false);
        std::int64_t real = 0;
        std::vector<at::Tensor> masks;
        for (const TensorBatch& part : parts) {
          real += part.real;
          masks.push_back(part.mask.defined() ? part.mask : at::ones({part.rows}, at::kBool));
        }
        TensorBatch nothing{.rows = given.rows, .real = given.real};
        for (const ShardedBatch& got :
             {shard_rows(given, mesh, c.batch_axes, named),
              scatter_rows(reads ? given : nothing, mesh, c.batch_axes, named),
              scatter_rows(reads ? std::optional(given) : std::nullopt, mesh, c.batch_axes,
                           named)}) {
          EXPECT_EQ(got.rows, all.rows);
          EXPECT_EQ(got.real, real);
          EXPECT_TRUE(full_tensor(got.field("field")).equal(all.tensors[0]));
          EXPECT_TRUE(full_tensor(got.field("label")).equal(all.tensors[1]));
          EXPECT_EQ(placements(got.field("field"))[mesh.mesh().index("domain")], Shard(1));
          ASSERT_EQ(got.mask.defined(), masked);
          if (masked) {
            EXPECT_TRUE(full_tensor(got.mask).equal(at::cat(masks)));
          }
        }
      }
    });
  }
}

// A loader that does not read is at the same place, and its rank gets its shards.
TEST(ShardRows, ALoaderThatDoesNotReadKnowsItsRows) {
  const auto expected = alone(5, 6);
  test::on_ranks(4, [&](DistributedManager& manager) {
    const DeviceMesh mesh = manager.mesh({{"data", 2}, {"domain", 2}});
    const bool reads = reads_for_others(mesh, {"data"});
    const auto size_alone = std::make_shared<FunctionDataset>(7, [](std::uint64_t) -> Sample {
      throw Error("a rank that does not read was asked for a sample");
    });
    const std::shared_ptr<const Dataset> data =
        reads ? std::static_pointer_cast<const Dataset>(std::make_shared<TensorDataset>(
                    std::vector<at::Tensor>{fields_of_samples(), labels_of_samples()}))
              : size_alone;
    Loader loader({data}, shuffled(5), batch_mapping(mesh.mesh(), {"data"}), manager.rank(),
                  {.workers = 1, .reads = reads});
    loader.require_agreement(manager.world());
    for (const LoadedBatch& one : expected) {
      const LoadedBatch loaded = loader.next();
      EXPECT_EQ(loaded.tensors.empty(), !reads);
      EXPECT_EQ(static_cast<std::int64_t>(loaded.samples.size()), loaded.rows);
      expect_whole(scatter_batch(loaded, mesh, {"data"}, {{.dims = {{"domain", 1}}}, {}}), one);
    }
  });
}

TEST(ShardRows, WhatOneRankHasWrongAllAreTold) {
  test::on_ranks(4, [&](DistributedManager& manager) {
    const DeviceMesh mesh = manager.mesh({{"data", 2}, {"domain", 2}});
    const int row = mesh.coordinate()[0];
    const bool reads = reads_for_others(mesh, {"data"}), last = manager.rank() == 3;
    const TensorBatch right = rows_of(row, row + 1, 1, false);
    const auto refused = [&](const TensorBatch& batch, const std::string& why) {
      for (const bool scatters : {false, true}) {
        // Of a rank that does not read nothing but its rows is looked at.
        const bool mine = last || (scatters && manager.rank() == 2);
        const TensorBatch& given = mine ? batch : right;
        const auto call = [&] {
          if (scatters)
            scatter_rows(given, mesh, {"data"});
          else
            shard_rows(given, mesh, {"data"});
        };
        const auto said = testing::thrown<InvalidArgument>(call);
        EXPECT_NE(said.find(why), std::string::npos) << said;
      }
    };
    TensorBatch other = right;
    other.tensors[0] = other.tensors[0].narrow(0, 0, right.rows - 1);
    refused(other, "dim 0 has the rows");
    other = right;
    other.real = right.rows + 1;
    refused(other, "count");
    other = right;
    other.names = {"field", "field"};
    refused(other, "two fields have the name");
    other = right;
    other.tensors[1] = at::Tensor();
    refused(other, "undefined");
    other = right;
    other.mask = at::ones({right.rows + 2}, at::kBool);
    refused(other, "a mask of shape");
    // Ranks that share their samples, and count differently.
    other = right;
    if (last) other.real -= 1;
    EXPECT_NE(testing::thrown<InvalidArgument>([&] {
                shard_rows(other, mesh, {"data"});
              }).find("which has the same samples"),
              std::string::npos);
    EXPECT_NE(testing::thrown<InvalidArgument>([&] {
                scatter_rows(other, mesh, {"data"});
              }).find("which has the same samples"),
              std::string::npos);
    EXPECT_NE(testing::thrown<InvalidArgument>([&] {
                shard_rows(right, mesh, {"data"}, {{.field = "fields"}});
              }).find("a sharding of 'fields'"),
              std::string::npos);
    // A reader that gives nothing, on one coordinate alone.
    EXPECT_THROW(
        scatter_rows(manager.rank() == 2 ? std::nullopt : std::optional(right), mesh, {"data"}),
        InvalidArgument);
    EXPECT_EQ(scatter_rows(reads ? std::optional(right) : std::nullopt, mesh, {"data"}).rows,
              rows_at(0, 1) + rows_at(1, 1));
    // Every rank reads, and one gives nothing, or a batch of another loader.
    const DeviceMesh line = manager.mesh({{"data", 4}});
    EXPECT_NE(testing::thrown<InvalidArgument>([&] {
                scatter_rows(last ? std::nullopt : std::optional(right), line, {"data"});
              }).find("gave no batch"),
              std::string::npos);
    const auto data = std::make_shared<TensorDataset>(std::vector<at::Tensor>{fields_of_samples()});
    Loader loader({data}, shuffled(5), batch_mapping(line.mesh(), {"data"}), manager.rank());
    LoadedBatch loaded = loader.next();
    EXPECT_EQ(scatter_batch(loaded, line, {"data"}).rows, loaded.global_rows);
    if (last) loaded.slices.clear();
    EXPECT_NE(testing::thrown<InvalidArgument>([&] {
                scatter_batch(loaded, line, {"data"});
              }).find("its loader has read for another mesh"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace tessera::shard_batch_test
