#include "tessera/data/torch_data.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/comm/group/group.h"
#include "tessera/data/loader.h"
#include "tessera/data/stream_loader.h"

namespace tessera::torch_data_test {
namespace {

struct Squares : torch::data::datasets::Dataset<Squares> {
  torch::data::Example<> get(std::size_t i) override {
    return {torch::full({2}, static_cast<double>(i), torch::kDouble),
            torch::tensor(static_cast<std::int64_t>(i * i))};
  }
  std::optional<std::size_t> size() const override { return 12; }
};

struct Unsized : Squares {
  std::optional<std::size_t> size() const override { return std::nullopt; }
};

struct Countdown
    : torch::data::datasets::StreamDataset<Countdown, std::vector<torch::data::Example<>>> {
  std::vector<torch::data::Example<>> get_batch(std::size_t n) override {
    std::vector<torch::data::Example<>> batch;
    for (; n > 0 && left > 0; --n, --left)
      batch.push_back({torch::tensor(static_cast<double>(left)), torch::tensor(left)});
    return batch;
  }
  std::optional<std::size_t> size() const override { return std::nullopt; }
  std::int64_t left = 5;
};

void expect_squares(const std::shared_ptr<const Dataset>& data, double scale) {
  ASSERT_EQ(data->size(), 12u);
  auto order =
      std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 12, .seed = 3}, BatchSchedule(5));
  Loader loader({data}, order, BatchMapping({1}, {0}, {}), 0, {.workers = 2});
  std::int64_t rows = 0;
  for (auto& batch : loader.epoch()) {
    rows += batch.rows;
    ASSERT_EQ(batch.tensors[0].sizes(), (std::vector<std::int64_t>{batch.rows, 2}));
    for (std::int64_t i = 0; i < batch.rows; ++i) {
      const auto index = static_cast<double>(batch.samples[static_cast<std::size_t>(i)].index);
      EXPECT_NEAR(batch.tensors[0][i][1].item<double>(), index * scale, 1e-12);
      EXPECT_EQ(batch.tensors[1][i].item<double>(), index * index);
    }
  }
  EXPECT_EQ(rows, 12);
}

TEST(TorchData, DatasetsAndTransformsAreReadByTheLoader) {
  expect_squares(from_torch_data(Squares()), 1);
  expect_squares(from_torch_data(Squares().map(
                     torch::data::transforms::TensorLambda<>([](at::Tensor t) { return t / 4; }))),
                 0.25);
  expect_squares(from_torch_data(Squares().map(torch::data::transforms::Stack<>())), 1);
  expect_squares(from_torch_data(Squares()
                                     .map(torch::data::transforms::TensorLambda<>(
                                         [](at::Tensor t) { return t / 4; }))
                                     .map(torch::data::transforms::Stack<>())),
                 0.25);
  EXPECT_THROW(from_torch_data(Unsized()), InvalidArgument);
  EXPECT_THROW(from_torch_data(Squares())->get(12), RangeError);
}

TEST(TorchData, StreamsAreReadByTheStreamLoader) {
  StreamLoader loader(std::make_shared<TorchStream<Countdown>>(Countdown()), 2, Group(),
                      {.uneven = UnevenData::weight_zero});
  std::vector<std::int64_t> seen;
  while (auto batch = loader.next())
    for (std::int64_t i = 0; i < batch->rows; ++i)
      seen.push_back(batch->tensors[1][i].item<std::int64_t>());
  EXPECT_EQ(seen, (std::vector<std::int64_t>{5, 4, 3, 2, 1}));
}

}  // namespace
}  // namespace tessera::torch_data_test
