#include "tessera/data/sources/source_dataset.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/data/loader.h"
#include "tessera/partition/partition.h"

namespace tessera::source_dataset_test {
namespace {

// One array in memory, which counts the numbers that are read of it.
class Memory : public Source {
 public:
  explicit Memory(at::Tensor data)
      : data_(std::move(data)),
        about_{"u", {"t", "y", "x"}, data_.sizes().vec(), at::kDouble, {}} {}
  std::string name() const override { return "memory"; }
  std::vector<std::string> variables() const override { return {"u"}; }
  const VariableInfo& info(const std::string& variable) const override {
    if (variable != "u") throw VariableError("there is only u");
    return about_;
  }
  mutable std::int64_t numbers = 0, reads = 0;

 protected:
  at::Tensor read_box(const VariableInfo&, const Hyperslab& slab,
                      const ReadOptions& options) const override {
    at::Tensor box = data_;
    for (std::int64_t d = 0; d < 3; ++d)
      box = box.slice(d, slab.start[d], slab.start[d] + (slab.count[d] - 1) * slab.stride[d] + 1,
                      slab.stride[d]);
    numbers += box.numel();
    ++reads;
    return box.to(options.dtype).contiguous();
  }

 private:
  at::Tensor data_;
  VariableInfo about_;
};

// Samples over the data axis, rows over the domain axis: each rank reads its rows of its samples
// and nothing else, and together it is everything once.
TEST(SourceDataset, ARankReadsOnlyItsRowsOfItsSamples) {
  const auto all = torch::arange(9 * 7 * 4, torch::kDouble).view({9, 7, 4});
  const int data = 2, domain = 3;
  const Mesh mesh({{"data", data}, {"domain", domain}});
  auto order =
      std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 9, .seed = 2}, BatchSchedule(4));
  const auto rows = Partition::even(7, domain);
  auto seen = torch::zeros_like(all);
  for (int rank = 0; rank < mesh.size(); ++rank) {
    auto source = std::make_shared<Memory>(all);
    const auto mine = rows.interval(rank % domain);
    auto part = std::make_shared<SourceDataset>(
        source,
        std::vector<SourceField>{
            {"u", {.start = {0, mine.begin}, .count = {9, mine.size()}}, {.dtype = at::kDouble}}});
    Loader loader({part}, order, batch_mapping(mesh, {"data"}), rank, {.workers = 1});
    for (auto& batch : loader.epoch()) {
      ASSERT_EQ(batch.tensors[0].sizes(), (std::vector<std::int64_t>{batch.rows, mine.size(), 4}));
      for (std::int64_t i = 0; i < batch.rows; ++i) {
        const auto index =
            static_cast<std::int64_t>(batch.samples[static_cast<std::size_t>(i)].index);
        EXPECT_TRUE(at::equal(batch.tensors[0][i], all[index].narrow(0, mine.begin, mine.size())));
        seen[index].narrow(0, mine.begin, mine.size()) += 1;
      }
      if (batch.step == 2) break;  // what is read ahead belongs to the next epoch
    }
  }
  EXPECT_TRUE(at::equal(seen, torch::ones_like(all)));
}

TEST(SourceDataset, RunsOfIndicesAreReadAtOnceAndStridesCount) {
  const auto all = torch::arange(9 * 7 * 4, torch::kDouble).view({9, 7, 4});
  auto source = std::make_shared<Memory>(all);
  const SourceDataset odd(
      source,
      {{"u", {.start = {1, 2}, .count = {4, 3}, .stride = {2, 1}}, {.dtype = at::kDouble}}});
  EXPECT_EQ(odd.size(), 4u);
  const std::uint64_t some[] = {2, 3, 0, 1};
  EXPECT_TRUE(at::equal(odd.get_batch(some)[0],
                        all.index_select(0, torch::tensor({5, 7, 1, 3})).narrow(1, 2, 3)));
  EXPECT_EQ(source->reads, 2);
  EXPECT_EQ(source->numbers, 4 * 3 * 4);
  EXPECT_TRUE(at::equal(odd.get(3)[0], all[7].narrow(0, 2, 3)));
  EXPECT_EQ(odd.get_batch({})[0].sizes(), (std::vector<std::int64_t>{0, 3, 4}));
  EXPECT_THROW(odd.get(4), SampleError);
  EXPECT_THROW(SourceDataset(source, {}), InvalidArgument);
  EXPECT_THROW(SourceDataset(source, {{"v"}}), VariableError);
  EXPECT_THROW(SourceDataset(source, {{"u"}, {"u", {.start = {0}, .count = {3}}}}),
               InvalidArgument);
  EXPECT_THROW(SourceDataset(source, {{"u", {.start = {0}, .count = {10}}}}), RangeError);
}

}  // namespace
}  // namespace tessera::source_dataset_test
