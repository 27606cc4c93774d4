#pragma once
// A slice of a plain tensor that a sharded value is written to, as models write it: out =
// zeros(...); out[..., :m] = value. All of `out` becomes sharded, and the slice a view of it.
//
// ViewReplay: views of sharded tensors are replayed in backward, not rebuilt with as_strided.

#include <ATen/core/Tensor.h>
#include <c10/core/AutogradState.h>

#include <memory>

#include "tessera/base/pinned.h"
#include "tessera/tensor/spec/internal/mesh_context.h"

namespace tessera::detail {

/// Makes `base` sharded, and `target`, a view of it, a view of that, both in place. Dims that the
/// slice takes completely are sharded as `like` shards them (undefined: none), the others
/// replicated: nothing is sent, since plain tensors are the same on all ranks. `above`: autograd
/// has not run yet. Returns false, with nothing changed, if the view does not consist of slices and
/// selects.
bool promote_view(const at::Tensor& target, const at::Tensor& base, const at::Tensor& like,
                  const std::shared_ptr<MeshContext>& context, bool above);

class ViewReplay : Pinned {
 public:
  explicit ViewReplay(bool on)
      : state_(c10::AutogradState::get_tls_state()), before_(state_.get_view_replay_enabled()) {
    if (on) state_.set_view_replay_enabled(true);
  }
  ~ViewReplay() { state_.set_view_replay_enabled(before_); }

 private:
  c10::AutogradState& state_;
  bool before_;
};

}  // namespace tessera::detail
