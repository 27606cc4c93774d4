#pragma once
// Datasets and transforms of torch::data, read by Tessera's loaders. Header-only: it includes
// torch::data, which the library's other headers do not.
//
//   auto mnist =
//     torch::data::datasets::MNIST("data").map(torch::data::transforms::Normalize<>(0.13, 0.31));
//   Loader loader({from_torch_data(std::move(mnist))}, order, mapping, rank);

#include <torch/data/datasets/base.h>
#include <torch/data/datasets/map.h>
#include <torch/data/example.h>
#include <torch/data/transforms.h>

#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include "tessera/data/dataset.h"

namespace tessera {
namespace detail {

inline Sample sample_of(const at::Tensor& t) { return {t}; }
inline Sample sample_of(const torch::data::Example<at::Tensor, at::Tensor>& e) {
  return {e.data, e.target};
}
inline Sample sample_of(const torch::data::Example<at::Tensor, torch::data::example::NoTarget>& e) {
  return {e.data};
}

/// The sample in a batch of one: a list of examples, or what a collation (Stack) made of them.
template <class Batch>
Sample only_sample(Batch&& batch) {
  if constexpr (requires { batch.front(); }) {
    return sample_of(batch.front());
  } else {
    Sample sample = sample_of(batch);
    for (at::Tensor& t : sample) t = t.squeeze(0);
    return sample;
  }
}

}  // namespace detail

/// A dataset of torch::data with random access, including its transforms (`map`), also those that
/// stack. Its examples are tensors, with or without a target. torch::data does not promise that a
/// dataset can be called from several threads at once, so calls are serialised.
template <class D>
class TorchDataset : public Dataset {
 public:
  /// Throws InvalidArgument for a dataset that does not know its size.
  explicit TorchDataset(D dataset) : dataset_(std::move(dataset)) {
    const auto size = dataset_.size();
    if (!size)
      throw InvalidArgument(
          "a dataset of torch::data that does not know its size cannot be read by index");
    size_ = *size;
  }
  std::uint64_t size() const override { return size_; }
  Sample get(std::uint64_t index) const override {
    if (index >= size_) throw RangeError("sample ", index, " of a dataset with ", size_);
    const std::lock_guard lock(mutex_);
    const std::size_t one = index;
    return detail::only_sample(dataset_.get_batch(at::ArrayRef<std::size_t>(&one, 1)));
  }

 private:
  mutable std::mutex mutex_;
  mutable D dataset_;
  std::uint64_t size_ = 0;
};

/// A dataset of torch::data that delivers its samples in sequence
/// (torch::data::datasets::StreamDataset), for a StreamLoader.
template <class D>
class TorchStream : public IterableDataset {
 public:
  explicit TorchStream(D dataset) : dataset_(std::move(dataset)) {}
  std::optional<Sample> next() override {
    auto batch = dataset_.get_batch(1);
    if constexpr (requires { batch.has_value(); }) {
      if (!batch.has_value()) return std::nullopt;
      return one(*batch);
    } else {
      return one(batch);
    }
  }

 private:
  template <class Batch>
  static std::optional<Sample> one(const Batch& batch) {
    if constexpr (requires { batch.empty(); }) {
      if (batch.empty()) return std::nullopt;
    }
    return detail::only_sample(batch);
  }

  D dataset_;
};

template <class D>
std::shared_ptr<const Dataset> from_torch_data(D dataset) {
  return std::make_shared<TorchDataset<D>>(std::move(dataset));
}

}  // namespace tessera
