#include "tessera/data/dataset.h"

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <vector>

#include "tessera/base/internal/file.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/text.h"
#include "tessera/data/detail/read_batch.h"

namespace tessera {

namespace detail {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20, kMostFreeBlocks = 16;

std::align_val_t alignment_of(std::size_t bytes) {
  return std::align_val_t{bytes >= kHugePage ? kHugePage : 64};
}

}  // namespace

// Memory of batches, reused: the system pages in a fresh large block bit by bit, which costs as
// much as copying a batch into it. A tensor's memory returns to the pool when its last handle is
// gone, from any thread, and keeps the pool alive until then.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // An uninitialised CPU tensor, aligned to 64 bytes; from 2 MiB on, on huge pages if the system
  // provides them.
  at::Tensor empty(std::span<const std::int64_t> shape, at::ScalarType dtype) {
    std::size_t bytes = c10::elementSize(dtype);
    for (const std::int64_t n : shape) bytes *= static_cast<std::size_t>(n);
    Block block = take(bytes);
    if (!block) block = allocate(bytes);
    void* data = block.get();
    auto release = [pool = shared_from_this(), bytes](void* memory) {
      pool->give_back(bytes, Block(memory, Free{bytes}));
    };
    at::Tensor tensor = at::from_blob(data, c10::IntArrayRef(shape.data(), shape.size()),
                                      std::move(release), at::TensorOptions(dtype));
    block.release();  // the tensor owns it from here on
    return tensor;
  }

 private:
  struct Free {
    std::size_t bytes = 0;
    void operator()(void* block) const { ::operator delete(block, alignment_of(bytes)); }
  };
  using Block = std::unique_ptr<void, Free>;

  Block take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    // The last one that was returned is most likely still in the cache.
    const auto found =
        std::find_if(free_.rbegin(), free_.rend(), [&](const auto& f) { return f.first == bytes; });
    if (found == free_.rend()) return nullptr;
    Block block = std::move(found->second);
    free_.erase(std::next(found).base());
    return block;
  }

  static Block allocate(std::size_t bytes) {
    Block block(::operator new(std::max<std::size_t>(bytes, 1), alignment_of(bytes)), Free{bytes});
#ifdef MADV_HUGEPAGE
    // Only advice: if the system does not follow it, the block works all the same.
    if (bytes >= kHugePage) ::madvise(block.get(), bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
    return block;
  }

  void give_back(std::size_t bytes, Block block) {
    const std::lock_guard lock(mutex_);
    free_.emplace_back(bytes, std::move(block));
    if (free_.size() > kMostFreeBlocks) free_.erase(free_.begin());
  }

  std::mutex mutex_;
  std::vector<std::pair<std::size_t, Block>> free_;  // bytes, oldest first
};

}  // namespace detail

Dataset::~Dataset() = default;
IterableDataset::~IterableDataset() = default;

std::vector<at::Tensor> Dataset::get_batch(std::span<const std::uint64_t> indices) const {
  std::vector<Sample> samples;
  for (const std::uint64_t index : indices) {
    detail::of_sample(index, [&] {
      samples.push_back(get(index));
      detail::require_alike(samples.back(), samples.front(), concat("sample ", indices[0]));
    });
  }
  return detail::stacked(samples);
}

TensorDataset::TensorDataset(const Fields& fields) : TensorDataset(fields.tensors()) {
  names_ = fields.names();
}

TensorDataset::TensorDataset(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
  if (tensors_.empty()) throw InvalidArgument("a TensorDataset of no tensors");
  for (const at::Tensor& t : tensors_)
    if (!t.defined() || t.dim() == 0 || t.size(0) != tensors_[0].size(0))
      throw InvalidArgument("the tensors of a TensorDataset have one dim 0, of the same length");
  detail::require_plain(tensors_);
}

Sample TensorDataset::get(std::uint64_t index) const {
  if (index >= size()) throw RangeError("sample ", index, " of a dataset with ", size());
  const auto row = static_cast<std::int64_t>(index);
  return mapped(tensors_, [&](const at::Tensor& t) { return t.select(0, row); });
}

std::vector<at::Tensor> TensorDataset::get_batch(std::span<const std::uint64_t> indices) const {
  const at::Tensor rows = at::empty({static_cast<std::int64_t>(indices.size())}, at::kLong);
  auto* row = rows.mutable_data_ptr<std::int64_t>();
  for (std::uint64_t index : indices) {
    if (index >= size())
      throw SampleError(concat("sample ", index, " of a dataset with ", size()), index);
    *row++ = static_cast<std::int64_t>(index);
  }
  return mapped(tensors_, [&](const auto& t) { return t.index_select(0, rows.to(t.device())); });
}

FunctionDataset::FunctionDataset(std::uint64_t size, std::vector<std::string> names,
                                 std::function<Fields(std::uint64_t)> get)
    : size_(size), names_(std::move(names)) {
  require_field_names(names_);
  get_ = [names = names_, get = std::move(get)](std::uint64_t index) {
    const Fields fields = get(index);
    if (fields.names().size() != names.size())
      throw InvalidArgument("sample ", index, " has the fields ", list(fields.names()),
                            ", the dataset was given ", list(names));
    return mapped(names, [&](const std::string& name) { return fields.at(name); });
  };
}

TokenFileDataset::TokenFileDataset(const std::string& path, at::ScalarType dtype, std::uint64_t row,
                                   std::uint64_t stride)
    : buffers_(std::make_shared<detail::BufferPool>()),
      dtype_(dtype),
      row_(row),
      stride_(stride == 0 ? row : stride) {
  if (row == 0) throw InvalidArgument("a token row of length 0; give at least 1");
  file_ = std::make_unique<RandomAccessFile>(path);
  const std::size_t item = c10::elementSize(dtype);
  if (file_->size() % item != 0)
    throw FileError("'", path, "' has ", file_->size(), " bytes, no multiple of the ", item, " of ",
                    dtype);
  if (tokens() < row)
    throw InvalidArgument("'", path, "' has ", tokens(), " tokens, fewer than one row of ", row);
  rows_ = (tokens() - row) / stride_ + 1;
}

TokenFileDataset::~TokenFileDataset() = default;

std::uint64_t TokenFileDataset::tokens() const { return file_->size() / c10::elementSize(dtype_); }

Sample TokenFileDataset::get(std::uint64_t index) const {
  const std::uint64_t one[] = {index};
  return {get_batch(one)[0].squeeze(0)};
}

std::vector<at::Tensor> TokenFileDataset::get_batch(std::span<const std::uint64_t> indices) const {
  const std::int64_t shape[] = {static_cast<std::int64_t>(indices.size()),
                                static_cast<std::int64_t>(row_)};
  const at::Tensor batch = buffers_->empty(shape, dtype_);
  const std::size_t item = c10::elementSize(dtype_), bytes = row_ * item;
  auto* out = static_cast<char*>(batch.mutable_data_ptr());
  for (std::size_t i = 0; i < indices.size();) {
    if (indices[i] >= rows_)
      throw SampleError(concat("row ", indices[i], " of a token file with ", rows_), indices[i]);
    // Consecutive rows of the file are read at once.
    std::size_t n = 1;
    while (stride_ == row_ && i + n < indices.size() && indices[i + n] == indices[i] + n &&
           indices[i + n] < rows_)
      ++n;
    file_->read(indices[i] * stride_ * item, out, n * bytes);
    out += n * bytes;
    i += n;
  }
  return {batch};
}

}  // namespace tessera
