#include "tessera/tensor/dispatch/view_copy.h"

#include "tessera/base/text.h"
#include "tessera/tensor/dispatch/no_dispatch.h"
#include "tessera/tensor/dispatch/redistribute.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/mesh_context.h"
#include "tessera/tensor/spec/rank_state.h"

namespace tessera::detail {

namespace {

RankState& state_of(const ShardSpec& spec) { return *context_of(spec)->state; }

}  // namespace

void ViewCopies::add(ViewCopy* copy) {
  const std::lock_guard lock(mutex_);
  live_.push_back(copy);
  count_.fetch_add(1, std::memory_order_relaxed);
}

void ViewCopies::remove(ViewCopy* copy) {
  const std::lock_guard lock(mutex_);
  count_.fetch_sub(static_cast<int>(std::erase(live_, copy)), std::memory_order_relaxed);
}

void ViewCopies::wrote(const at::TensorBase& local, const ViewCopy* own) {
  const std::lock_guard lock(mutex_);
  for (ViewCopy* copy : live_) {
    if (copy != own && copy->base.is_alias_of(local)) copy->stale = true;
  }
}

ViewCopy::ViewCopy(const at::Tensor& whole, ShardSpec whole_spec, const at::Tensor& base,
                   ShardSpec base_spec, std::shared_ptr<ViewCopy> parent,
                   c10::VariableVersion version)
    : whole(whole),
      whole_spec(std::move(whole_spec)),
      base(base),
      base_spec(std::move(base_spec)),
      parent(std::move(parent)),
      version(std::move(version)) {
  if (this->version.enabled()) seen = this->version.current_version();
  state_of(this->base_spec).copies.add(this);
}

ViewCopy::~ViewCopy() { state_of(base_spec).copies.remove(this); }

void ViewCopy::write_back() {
  const LocalCallGuard guard;
  at::Tensor part = whole;
  if (base_spec.has_partial() && !whole_spec.has_partial()) {
    part = redistribute_local(whole, whole_spec, base_spec);  // parts of the value again
  } else {
    for (int d = 0; d < base_spec.dims(); ++d) {
      part = part.narrow(d, base_spec.local_offset()[d] - whole_spec.local_offset()[d],
                         base_spec.local_shape()[d]);
    }
  }
  base.copy_(part);
  ++written;
  state_of(base_spec).copies.wrote(base, this);
  if (parent) parent->write_back();
}

void ViewCopy::require_fresh(const std::string& op) const {
  if (stale || (version.enabled() && version.current_version() - seen > written)) {
    throw ShardingError(
        concat(op, " is given a view of ", base_spec,
               " that had to be copied, and the base has changed since. Take the view again."));
  }
  if (parent) parent->require_fresh(op);
}

}  // namespace tessera::detail
