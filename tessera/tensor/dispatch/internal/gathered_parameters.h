#pragma once
// What is gathered of sharded parameters. GatheredParameters: those of a layer whose operators use
// them repeatedly (a recurrent layer, in every step), gathered once and kept while the layer runs.

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "tessera/tensor/dispatch/internal/layout.h"

namespace tessera::detail {

class GatheredParameters {
 public:
  /// Keeps those of `parameters` that are sharded; at most `most` of them at a time, the ones used
  /// last.
  GatheredParameters(at::TensorList parameters, std::size_t most);

  /// The object of the layer that runs on this thread; nullptr: nothing is kept. An exception may
  /// end a backward before the layer ends: what it has left does not count for another one.
  static GatheredParameters* current();
  /// Replaces the current object, which keeps nothing any more. Null ends it.
  static void set_current(std::shared_ptr<GatheredParameters> kept);
  /// The current object no longer counts if it is `kept`.
  static void end(const GatheredParameters* kept);

  /// True if the backward in which it was made, if any, is the one that runs.
  bool is_current_task() const;
  bool empty() const { return storages_.empty(); }
  /// `parameter`, or a view of it, as it was redistributed to `to`, unless it has been written to
  /// since; undefined if it is not kept.
  at::Tensor find(const at::Tensor& parameter, const ShardSpec& to);
  void add(const at::Tensor& parameter, const ShardSpec& to, const at::Tensor& local);
  void clear() { entries_.clear(); }

 private:
  struct Entry {
    at::Tensor part;  // held so that its address is not reused
    LayoutPtr layout;
    ShardSpec to;
    std::uint32_t version;
    at::Tensor local;
  };
  bool watched(const at::Tensor& parameter) const;

  std::vector<const void*> storages_;
  const std::size_t most_;
  const int task_;
  std::vector<Entry> entries_;  // the one used last at the end
};

/// What its source (fully_shard) has gathered of a parameter, or of a view of it, under `to`.
/// Undefined: it has no source, or that does not gather this. All ranks call it alike.
at::Tensor gathered_by_source(const at::Tensor& parameter, const ShardSpec& to);

}  // namespace tessera::detail
