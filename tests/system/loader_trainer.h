#pragma once
// The data that the trainer under test and the test itself read.

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/data/loader.h"

namespace tessera::test {

/// Sample i: {i + 1000 * which, three numbers that follow from it}.
inline std::shared_ptr<const Dataset> trainer_data(std::uint64_t samples, std::uint64_t which) {
  return std::make_shared<FunctionDataset>(samples, [which](std::uint64_t i) {
    return Sample{at::scalar_tensor(static_cast<std::int64_t>(i + 1000 * which), at::kLong),
                  at::tensor({keyed_uniform(1, which, 3 * i), keyed_uniform(1, which, 3 * i + 1),
                              keyed_uniform(1, which, 3 * i + 2)},
                             at::kDouble)};
  });
}

struct TrainerInput {
  std::vector<std::shared_ptr<const Dataset>> datasets;
  std::shared_ptr<const Order> order;
};

/// "schedule", "tokens" or "mixture".
inline TrainerInput trainer_input(const std::string& kind) {
  if (kind == "schedule")
    return {{trainer_data(101, 0)},
            std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 101, .seed = 5},
                                         BatchSchedule({{0, 6}, {20, 11}, {45, 3}}))};
  if (kind == "tokens") {
    std::vector<std::uint64_t> lengths;
    for (std::uint64_t i = 0; i < 101; ++i) lengths.push_back(1 + keyed_random(7, 7, i) % 9);
    return {{trainer_data(101, 0)},
            std::make_shared<TokenBudgetOrder>(lengths, TokenBudget{40, 0, true}, 5)};
  }
  return {{trainer_data(31, 0), trainer_data(17, 1)},
          std::make_shared<MixtureOrder>(
              Mixture({{"a", 31}, {"b", 17}}, {{0, {2, 1}}, {100, {1, 4}}}, 5),
              BatchSchedule({{0, 7}, {30, 5}}))};
}

}  // namespace tessera::test
