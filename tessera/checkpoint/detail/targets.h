#pragma once
// Where what a rank reads goes: straight into the memory of a tensor, or first into memory of its
// own.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/storage/detail/manifest.h"

namespace tessera::detail {

/// A box of an entry that a rank wants, and where it goes; undefined: into memory of its own.
struct Want {
  const Entry* entry;
  Box box;
  at::Tensor into;
  /// Of the entry.
  at::ScalarType dtype;
};

/// Why copy_() would refuse to write to the target; empty if it does not.
std::string write_fault(const at::Tensor& target);
/// Memory of the box's shape and the entry's dtype.
at::Tensor staging_for(const Want& want);
/// Of each want, whether it is read straight into its target, whose memory is its own from then on.
/// Of tensors that share memory the later one counts, so they are written one after the other.
std::vector<bool> read_straight(const std::vector<Want>& wants, const LoadOptions& options);

}  // namespace tessera::detail
