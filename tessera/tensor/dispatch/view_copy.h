#pragma once
// ViewCopy: behind a view whose base had to be gathered first. Such a view has memory of its own;
// what is written to it is written back to the base, and once the base has changed in another way
// it is not read any more.

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

struct ViewCopy {
  ViewCopy(const at::Tensor& whole, ShardSpec whole_spec, const at::Tensor& base,
           ShardSpec base_spec, std::shared_ptr<ViewCopy> parent, c10::VariableVersion version);
  ~ViewCopy();
  ViewCopy(const ViewCopy&) = delete;
  ViewCopy& operator=(const ViewCopy&) = delete;

  /// Local of the gathered base: what the view, and views of it, share memory with.
  at::Tensor whole;
  ShardSpec whole_spec;
  /// Local of the base.
  at::Tensor base;
  ShardSpec base_spec;
  /// If the base is itself behind a copy.
  std::shared_ptr<ViewCopy> parent;
  /// Of the base.
  c10::VariableVersion version;
  /// Its value when the copy was made.
  std::uint32_t seen = 0;
  /// Writes through the copy since then: each counts the version up by at most one.
  std::uint32_t written = 0;
  /// The base was written to by another way, as the rank's ViewCopies have noticed.
  std::atomic<bool> stale = false;

  /// This rank's part of `whole` into `base`, and on to the parent. No communication: every rank
  /// that holds an element has written the same to it.
  void write_back();
  /// Throws ShardingError if the base has changed since.
  void require_fresh(const std::string& op) const;
};

}  // namespace tessera::detail
