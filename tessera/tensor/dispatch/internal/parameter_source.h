#pragma once
// ParameterSource: what gathers sharded parameters in another way than one by one where an operator
// uses them: many in one message, ahead of their use (fully_shard).

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace tessera {
class ShardSpec;
}  // namespace tessera

namespace tessera::detail {

struct Layout;
struct ShardMeta;

/// In which dtypes operators work that take a parameter.
struct ParameterPrecision {
  /// Of the parameter, as the operator sees it, and of what it is combined with; none: its own.
  std::optional<at::ScalarType> compute = {};
  /// Of the operator's result; none: as the operator makes it.
  std::optional<at::ScalarType> output = {};
};

class ParameterSource {
 public:
  virtual ~ParameterSource() = default;
  /// Of parameter `index`; empty for what computed() has made.
  virtual ParameterPrecision precision(std::size_t index) const = 0;
  /// The local of parameter `index`, or of a view of it, both by `meta`, in the dtype that
  /// operators compute in: memory that belongs to the source, and that the source finds again.
  /// Undefined: there is none of this view.
  virtual at::Tensor computed(std::size_t index, const ShardMeta& meta) = 0;
  /// The local under `to` of parameter `index`, or of a view of it, both by `meta`; undefined: this
  /// one is gathered by itself. Called by all ranks for the same uses in the same order.
  virtual at::Tensor gathered(std::size_t index, const ShardMeta& meta, const ShardSpec& to) = 0;
  /// An operator has copied parameter `index`, or a view of it, with the layout `from`, to another
  /// dtype, as autocast does: `local`, under the layout `made`. Returns `local`, or a tensor over
  /// its memory by which a source finds the copy. Called by all ranks for the same copies.
  virtual at::Tensor copied(std::size_t index, const Layout& from, const Layout& made,
                            at::Tensor local) = 0;
  /// An operator has written to parameter `index`.
  virtual void written(std::size_t index) = 0;
};

/// Finds the source of a parameter by the storage of its local, which the views of it share.
class ParameterSources {
 public:
  using Found = std::pair<std::shared_ptr<ParameterSource>, std::size_t>;

  void add(const at::Tensor& local, const std::shared_ptr<ParameterSource>& source,
           std::size_t index);
  /// One load: whether any parameter has a source.
  bool any() const { return count_.load(std::memory_order_relaxed) > 0; }
  /// One load: whether operators may compute with any parameter in another dtype than its own.
  bool casts() const { return casts_.load(std::memory_order_relaxed); }
  /// Null: the local is no parameter's that has a source.
  Found find(const at::TensorBase& local);
  /// The memory of `local` was written to.
  void wrote(const at::TensorBase& local);

 private:
  struct Entry {
    std::weak_ptr<ParameterSource> source;
    std::size_t index;
    // keeps the address from becoming another storage's
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };
  std::atomic<std::size_t> count_ = 0;
  std::atomic<bool> casts_ = false;
  std::mutex mutex_;
  std::unordered_map<const void*, Entry> entries_;
  // Entries of what is gone are removed when there are as many as this.
  std::size_t most_ = 64;
};

/// The memory of a tensor's local was written to by other means than an operator on the tensor:
/// what was gathered of it is no longer its value. Does nothing for plain tensors. All ranks of its
/// mesh call it alike.
void wrote_shard(const at::Tensor& tensor);

}  // namespace tessera::detail
