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
  /// `base` is a sharded tensor, of which `whole` is the local under `whole_spec`.
  ViewCopy(const at::Tensor& whole, ShardSpec whole_spec, const at::Tensor& base);
  ~ViewCopy();
  ViewCopy(const ViewCopy&) = delete;
  ViewCopy& operator=(const ViewCopy&) = delete;

  /// Local of the gathered base: what the view, and views of it, share memory with.
  at::Tensor whole;
  ShardSpec whole_spec;
  /// Another handle on the base: follows what becomes of it.
  at::Tensor base;
  /// Of the base.
  c10::VariableVersion version;
  /// Its value when the copy was made.
  std::uint32_t seen = 0;
  /// Writes through the copy since then: each counts the version up by at most one.
  std::uint32_t written = 0;
  /// The base was written to by another way, as the rank's ViewCopies have noticed.
  std::atomic<bool> stale = false;

  /// Of the base.
  const at::Tensor& base_local() const;
  /// If the base is itself behind a copy; else nullptr.
  ViewCopy* parent() const;
  /// This rank's part of `whole` into the base, and on to the parent. Every rank that holds an
  /// element has written the same to it, so that nothing is sent, but where a partial base has been
  /// reduced since.
  void write_back();
  /// Throws ShardingError if the base has changed since.
  void require_fresh(const std::string& op) const;
  /// Takes over what the base has become. Collective.
  void refresh();
};

}  // namespace tessera::detail
