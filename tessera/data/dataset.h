#pragma once
// Datasets: the sources of samples. A sample is a list of tensors (input, target, ...), the same
// number for every sample of a dataset.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/data/fields.h"
#include "tessera/data/sources/source.h"

namespace tessera {

class RandomAccessFile;

namespace detail {
class BufferPool;
}  // namespace detail

using Sample = std::vector<at::Tensor>;

/// Samples by index. Members are called from several worker threads at once: an implementation must
/// allow that.
class Dataset {
 public:
  virtual ~Dataset();
  virtual std::uint64_t size() const = 0;
  virtual Sample get(std::uint64_t index) const = 0;
  /// The tensors of several samples, with a batch dim of length indices.size() in front. The
  /// default stacks what get() returns, and reports which index failed. Without indices: tensors
  /// without rows, or an empty list if the shapes are not known without reading (as by default). If
  /// an implementation throws something other than SampleError, the loader finds the index by
  /// reading one by one.
  virtual std::vector<at::Tensor> get_batch(std::span<const std::uint64_t> indices) const;
  /// The names of a sample's tensors, in their order, nested by '/' (see Fields): a batch has them
  /// too. The same on every rank. Empty, as by default: they have none.
  virtual std::vector<std::string> field_names() const { return {}; }
};

/// Samples in sequence, without positions: a stream, a generator, a socket. Called from one thread
/// at a time.
class IterableDataset {
 public:
  virtual ~IterableDataset();
  /// The next sample; nullopt at the end.
  virtual std::optional<Sample> next() = 0;
};

/// Thrown for a worker's exception, with the index of the sample that it was reading (or the
/// position, for a stream). What the dataset threw is nested (std::rethrow_if_nested).
class SampleError : public Error {
 public:
  SampleError(const std::string& what, std::uint64_t index) : Error(what), index_(index) {}
  std::uint64_t index() const { return index_; }

 private:
  std::uint64_t index_;
};

/// Tensors in memory that agree in dim 0; sample i is row i of each. The constructor throws
/// InvalidArgument for an empty list, 0-dim tensors, or ones that differ in dim 0.
class TensorDataset : public Dataset {
 public:
  explicit TensorDataset(std::vector<at::Tensor> tensors);
  /// Takes tensors with names: TensorDataset(Fields{{"image", x}, {"about/label", y}}).
  explicit TensorDataset(const Fields& fields);
  std::uint64_t size() const override { return static_cast<std::uint64_t>(tensors_[0].size(0)); }
  Sample get(std::uint64_t index) const override;
  std::vector<at::Tensor> get_batch(std::span<const std::uint64_t> indices) const override;
  std::vector<std::string> field_names() const override { return names_; }

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<std::string> names_;
};

/// A dataset from a size and a function.
class FunctionDataset : public Dataset {
 public:
  FunctionDataset(std::uint64_t size, std::function<Sample(std::uint64_t)> get)
      : size_(size), get_(std::move(get)) {}
  /// Samples with names, which `get` may give in any order. Throws InvalidArgument for names that
  /// cannot stand side by side; get() does for a sample whose names are not these.
  FunctionDataset(std::uint64_t size, std::vector<std::string> names,
                  std::function<Fields(std::uint64_t)> get);
  std::uint64_t size() const override { return size_; }
  Sample get(std::uint64_t index) const override { return get_(index); }
  std::vector<std::string> field_names() const override { return names_; }

 private:
  std::uint64_t size_;
  std::function<Sample(std::uint64_t)> get_;
  std::vector<std::string> names_;
};

/// A file of tokens: rows of `row` tokens, starting every `stride` tokens (0: every `row`, without
/// overlap). A sample is one 1-d tensor of length `row` and the file's dtype. Tokens at the end
/// that do not fill a row are left out. Throws FileError if the file cannot be opened, is no
/// regular file, or its size is no multiple of the dtype's, and while reading if it was truncated
/// since; InvalidArgument for row < 1 or a file shorter than one row.
class TokenFileDataset : public Dataset {
 public:
  TokenFileDataset(const std::string& path, at::ScalarType dtype, std::uint64_t row,
                   std::uint64_t stride = 0);
  ~TokenFileDataset() override;
  std::uint64_t size() const override { return rows_; }
  /// Number of tokens in the file.
  std::uint64_t tokens() const;
  Sample get(std::uint64_t index) const override;
  /// One tensor [indices.size(), row], filled by one read for each run of consecutive rows.
  std::vector<at::Tensor> get_batch(std::span<const std::uint64_t> indices) const override;

 private:
  std::unique_ptr<RandomAccessFile> file_;
  std::shared_ptr<detail::BufferPool> buffers_;
  at::ScalarType dtype_;
  std::uint64_t row_, stride_, rows_;
};

/// A sample of one of several datasets: the number of the dataset and the index in it.
struct SampleRef {
  int dataset = 0;
  std::uint64_t index = 0;
  bool operator==(const SampleRef&) const = default;
};

// Augmentation: flips, crops, noise; what a user's function makes of complete samples, drawn alike
// whatever the ranks are.
//
//   const Augmentation flips{
//       .function =
//           [](Sample sample, const at::Generator& draws) {
//             if (at::rand({1}, draws).item<float>() < 0.5F) sample[0] = sample[0].flip(-1);
//             return sample;
//           },
//       .seed = 7};
//   Loader loader({data}, order, mapping, rank, {.workers = 2, .augment = flips});
//
// A loader whose ranks read complete samples augments them before they are sharded. Where each rank
// reads its own shard of every sample, augment_batch() of shard_batch.h brings each sample to one
// rank and its shards back.

struct Augmentation {
  /// Returns what is trained on in place of a sample: as many tensors, of one shape and dtype for
  /// all samples of a batch, on the same device. The sample is a copy, which it may write to. It
  /// draws from `draws` alone, a generator of the CPU, and is called by several threads at once.
  /// Empty: samples stay as they are.
  std::function<Sample(Sample sample, const at::Generator& draws)> function = {};
  /// With the epoch, the step and the sample's number all that the draws depend on: they are the
  /// same on any number of ranks and workers, and in a run that is resumed. A sample that a batch
  /// holds twice is drawn for once.
  std::uint64_t seed = 0;
};

}  // namespace tessera
