#pragma once
// ViewReplay: views of sharded tensors are replayed in backward, not rebuilt with as_strided.

#include <c10/core/AutogradState.h>

namespace tessera::detail {

class ViewReplay {
 public:
  explicit ViewReplay(bool on)
      : state_(c10::AutogradState::get_tls_state()), before_(state_.get_view_replay_enabled()) {
    if (on) state_.set_view_replay_enabled(true);
  }
  ~ViewReplay() { state_.set_view_replay_enabled(before_); }
  ViewReplay(const ViewReplay&) = delete;
  ViewReplay& operator=(const ViewReplay&) = delete;

 private:
  c10::AutogradState& state_;
  bool before_;
};

}  // namespace tessera::detail
