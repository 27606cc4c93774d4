#pragma once
// ViewCopy: the memory of a view whose base had to be redistributed first. What is written to such
// a view is written back to the base; once the base has changed in another way an operator that
// reads the view redistributes the base again.

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "tessera/base/pinned.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera::detail {

struct ViewCopy : Pinned {
  /// `base` is a sharded tensor; `whole` is its local under `whole_spec`.
  ViewCopy(const at::Tensor& whole, ShardSpec whole_spec, const at::Tensor& base);
  ~ViewCopy();

  /// Local of the redistributed base; the view, and views of it, share its memory.
  at::Tensor whole;
  ShardSpec whole_spec;
  /// Another handle of the base: it follows when the base is reduced.
  at::Tensor base;
  /// Version counter of the base.
  c10::VariableVersion version;
  /// Its value when the copy was made.
  std::uint32_t seen = 0;
  /// Number of writes through the copy since then: each counts the version up by at most one.
  std::uint32_t written = 0;
  /// True if the base was written to in another way, as the rank's ViewCopies have noticed.
  std::atomic<bool> stale = false;

  /// The local of the base.
  const at::Tensor& base_local() const;
  /// The ViewCopy of the base, if the base is itself a view of a copy; else nullptr.
  ViewCopy* parent() const;
  /// Writes `whole` to the base, and on to the parent. Where the base was gathered every rank has
  /// what belongs to its shard, and nothing is sent unless a partial base has been reduced since;
  /// where shards were moved they are moved back. Collective.
  void write_back();
  /// False if the base has changed since. The same on all ranks, since it follows from their calls.
  bool fresh() const;
  /// Throws ShardingError unless fresh().
  void require_fresh(const std::string& op) const;
  /// Redistributes the base again. Collective.
  void refresh();
};

}  // namespace tessera::detail
