#pragma once
// GatheredParameters: the sharded parameters of a layer whose operators use them again and again (a
// recurrent one, in every step), gathered once and kept while the layer is at work.

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "tessera/tensor/dispatch/layout.h"

namespace tessera::detail {

class GatheredParameters {
 public:
  /// Of `parameters` alone, those that are sharded; at most `most` of them at a time, the ones used
  /// last.
  GatheredParameters(at::TensorList parameters, std::size_t most);

  /// Of what is at work on this thread; nullptr: nothing is kept.
  static GatheredParameters* current();
  /// What was at work before keeps nothing any more. Null ends it.
  static void set_current(std::shared_ptr<GatheredParameters> kept);

  bool empty() const { return storages_.empty(); }
  /// What `parameter`, or a view of it, was laid out as `to`, unless it has been written to since;
  /// undefined if it is not kept.
  at::Tensor find(const at::Tensor& parameter, const ShardSpec& to);
  void add(const at::Tensor& parameter, const ShardSpec& to, const at::Tensor& local);
  void clear() { entries_.clear(); }

 private:
  struct Entry {
    at::Tensor part;  // keeps its address from becoming another one's
    LayoutPtr layout;
    ShardSpec to;
    std::uint32_t version;
    at::Tensor local;
  };
  bool watched(const at::Tensor& parameter) const;

  std::vector<const void*> storages_;
  const std::size_t most_;
  std::vector<Entry> entries_;  // the one used last at the end
};

}  // namespace tessera::detail
