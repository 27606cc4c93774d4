#pragma once
// Where what a rank reads goes: straight into the memory of a tensor, or first into memory of its
// own.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
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

// Independent pieces of work, spread over a few threads for the length of one call.

/// How many threads one of `ranks` ranks takes where the user asks for `asked`; 0: its share of the
/// cores that this process may use, at most 4. Throws InvalidArgument for a negative number.
int threads_of_rank(int asked, int ranks);

/// Calls work(i, worker) for each i below `count` on up to `threads` threads, the caller's among
/// them: `worker` numbers the thread, from 0 on. Where the system starts no thread, those that are
/// there do the work. After an exception no further calls begin; one of them is thrown.
void spread(int threads, std::size_t count,
            const std::function<void(std::size_t i, std::size_t worker)>& work);

}  // namespace tessera::detail
