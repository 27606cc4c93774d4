#pragma once
// What the tests of training share: a small task, and ragged batches that one process can have as
// well as several.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "../support/folder.h"
#include "../tensor/support.h"
#include "tessera/train/callbacks.h"
#include "tessera/train/strategies.h"
#include "tessera/train/trainer.h"

namespace tessera::test {

using ::tessera::testing::Folder;

inline torch::nn::Sequential small_net(std::uint64_t with = 11) {
  torch::nn::Sequential net(torch::nn::Linear(3, 5), torch::nn::Tanh(), torch::nn::Linear(5, 2));
  net->to(at::kDouble);
  fill(*net, with);
  return net;
}

/// What data leave behind in a module, and what forward makes of it: running statistics, a counter,
/// a mask; beside them a complex parameter. A run that goes on with other ones is another run.
struct RemembersImpl : torch::nn::Module {
  explicit RemembersImpl(std::int64_t width)
      : wave(register_parameter("wave", at::ones({width}, at::kComplexFloat))),
        mean(register_buffer("mean", at::zeros({width}, at::kDouble))),
        variance(register_buffer("variance", at::ones({width}, at::kDouble))),
        seen(register_buffer("seen", at::zeros({}, at::kLong))),
        high(register_buffer("high", at::zeros({width}, at::kBool))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor two = at::view_as_real(wave).to(at::kDouble);
    at::Tensor y = x * two.select(1, 0) + two.select(1, 1);
    y = y + mean.masked_fill(high, 0.5) / (seen + 1);
    if (x.size(0) < 2) return y;  // of one row there is no variance
    if (is_training()) {
      const at::NoGradGuard no_grad;
      seen.add_(x.size(0));
      high.copy_(mean.gt(0));
    }
    return at::batch_norm(y, {}, {}, mean, variance, is_training(), 0.2, 1e-5, false);
  }
  at::Tensor wave, mean, variance, seen, high;
};
TORCH_MODULE(Remembers);

/// Layer by layer, since to(dtype) of a module converts integers and masks as well.
inline torch::nn::Sequential remembering_net(std::uint64_t with = 11) {
  torch::nn::Linear first(3, 5), last(5, 2);
  first->to(at::kDouble);
  last->to(at::kDouble);
  torch::nn::Sequential net(first, Remembers(5), torch::nn::Tanh(), last);
  fill(*net, with);
  return net;
}

/// Rows of a micro-batch of a rank: ragged, with empty ones among them, but never all ranks'.
inline std::int64_t ragged_rows(int rank, std::int64_t index) {
  return (rank * 3 + index * 2 + 1) % 5 + (rank == 0 ? 1 : 0);
}

/// The same data whoever asks: inputs [rows, 3] and targets [rows, 2].
inline std::vector<at::Tensor> ragged_data(int rank, std::int64_t index) {
  at::Generator own = at::detail::createCPUGenerator(1000 * (rank + 1) + static_cast<int>(index));
  const std::int64_t rows = ragged_rows(rank, index);
  return {at::randn({rows, 3}, own, at::kDouble), at::randn({rows, 2}, own, at::kDouble)};
}

/// `micro` micro-batches of this rank in an epoch.
inline std::shared_ptr<BatchSource> ragged_batches(int rank, std::int64_t micro) {
  return batches_of([=](std::uint64_t epoch, std::uint64_t index) -> std::optional<MicroBatch> {
    if (static_cast<std::int64_t>(index) >= micro) return std::nullopt;
    return make_batch(ragged_data(
        rank, static_cast<std::int64_t>(epoch) * micro + static_cast<std::int64_t>(index)));
  });
}

/// The same for one process: each batch has the rows of `ranks` ranks and `join` micro-batches.
inline std::shared_ptr<BatchSource> joined_batches(int ranks, std::int64_t micro,
                                                   std::int64_t join) {
  return batches_of([=](std::uint64_t epoch, std::uint64_t index) -> std::optional<MicroBatch> {
    std::vector<at::Tensor> x, y;
    for (std::int64_t k = static_cast<std::int64_t>(index) * join;
         k < std::min<std::int64_t>(micro, (static_cast<std::int64_t>(index) + 1) * join); ++k) {
      for (int r = 0; r < ranks; ++r) {
        const auto one = ragged_data(r, static_cast<std::int64_t>(epoch) * micro + k);
        x.push_back(one[0]), y.push_back(one[1]);
      }
    }
    if (x.empty()) return std::nullopt;
    return make_batch({at::cat(x), at::cat(y)});
  });
}

/// Regression, whose loss is a mean over rows.
class Regression : public Task {
 public:
  explicit Regression(torch::nn::Sequential given = small_net()) : net(std::move(given)) {}
  NamedModules modules() override { return {{"net", net.ptr()}}; }
  Optimizers optimizers() override {
    return {
        std::make_shared<torch::optim::Adam>(net->parameters(), torch::optim::AdamOptions(0.05))};
  }
  at::Tensor training_step(const MicroBatch& batch, Step& step) override {
    const at::Tensor loss = torch::mse_loss(net->forward(batch.tensors[0]), batch.tensors[1]);
    step.log("mse", loss.detach());  // NaN of weight 0 on a rank without rows
    return loss;
  }
  void validation_step(const MicroBatch& batch, Step& step) override {
    const at::Tensor off = (net->forward(batch.tensors[0]) - batch.tensors[1]).square();
    step.log("loss", off.mean());
    step.log("rows", static_cast<double>(batch.real), Metrics::Kind::sum);
  }
  std::vector<at::Tensor> predict_step(const MicroBatch& batch, Step&) override {
    return {net->forward(batch.tensors[0])};
  }
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> all;
    for (const auto& p : net->parameters()) all.push_back(whole(p).clone());
    for (const auto& b : net->buffers()) all.push_back(whole(b).clone());
    return all;
  }

  torch::nn::Sequential net;
};

inline void expect_near(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected,
                        const std::string& what, double limit = 1e-10) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_LT(difference(got[i], expected[i]), limit) << what << ", parameter " << i;
}

inline void expect_equal(const std::vector<at::Tensor>& got,
                         const std::vector<at::Tensor>& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_TRUE(got[i].equal(expected[i])) << what << ", parameter " << i << ": bit by bit";
}

/// The run of one process on all data.
inline std::vector<at::Tensor> alone(int ranks, std::int64_t micro, int accumulate,
                                     TrainerOptions options = {}) {
  Regression task;
  options.strategy = nullptr;
  options.accumulate = 1;
  Trainer(options).fit(task, joined_batches(ranks, micro, accumulate));
  return task.values();
}

}  // namespace tessera::test
