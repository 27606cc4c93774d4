#include "tessera/train/task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tessera/tensor/shard_tensor.h"

namespace tessera {

std::function<double(std::int64_t, std::int64_t)> warmup_cosine(std::int64_t warmup,
                                                                std::int64_t total, double floor) {
  if (warmup < 0 || total <= warmup)
    throw InvalidArgument("warmup_cosine: ", warmup, " steps of ", total,
                          " are warm-up: give 0 <= warmup < total");
  return [=](std::int64_t step, std::int64_t) {
    if (step < warmup) return static_cast<double>(step + 1) / static_cast<double>(warmup);
    const double part =
        std::min(1.0, static_cast<double>(step - warmup) / static_cast<double>(total - warmup));
    return floor + (1 - floor) * 0.5 * (1 + std::cos(std::numbers::pi * part));
  };
}

std::function<double(std::int64_t, std::int64_t)> step_decay(std::int64_t every, double gamma) {
  if (every < 1) throw InvalidArgument("step_decay: every ", every, " epochs; give 1 or more");
  return [=](std::int64_t, std::int64_t epoch) {
    return std::pow(gamma, static_cast<double>(epoch / every));
  };
}

void Step::log(const std::string& name, double value, Metrics::Kind kind) {
  metrics_.add(name, value, kind == Metrics::Kind::mean ? weight_ : 1.0, kind);
}

void Step::log(const std::string& name, const at::Tensor& value, Metrics::Kind kind) {
  double number = value.item<double>();
  // All ranks have the value of a sharded tensor: one share each.
  if (kind == Metrics::Kind::sum && is_sharded(value))
    number *= static_cast<double>(strategy().sharing()) / strategy().size();
  log(name, number, kind);
}

void Step::log(const std::string& name, double value, double weight) {
  metrics_.add(name, value, weight);
}

Task::~Task() = default;

void Task::validation_step(const MicroBatch&, Step&) {
  throw NotAvailable("this task has no validation_step()");
}

void Task::test_step(const MicroBatch& batch, Step& step) { validation_step(batch, step); }

std::vector<at::Tensor> Task::predict_step(const MicroBatch&, Step&) {
  throw NotAvailable("this task has no predict_step()");
}

}  // namespace tessera
