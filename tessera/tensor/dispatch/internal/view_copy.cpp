#include "tessera/tensor/dispatch/internal/view_copy.h"

#include "tessera/tensor/dispatch/internal/kernels.h"
#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/dispatch/internal/redistribute.h"
#include "tessera/tensor/errors.h"
#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {
namespace {

RankState& state_of(const ShardSpec& spec) { return *context_of(spec)->state; }

at::Tensor another_handle(const at::Tensor& t) {
  const c10::TensorImpl& impl = *t.unsafeGetTensorImpl();
  return at::Tensor(impl.shallow_copy_and_detach(impl.version_counter(), false));
}

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
  for (ViewCopy* copy : live_)
    if (copy != own && copy->base_local().is_alias_of(local)) copy->stale = true;
}

ViewCopy::ViewCopy(const at::Tensor& whole, ShardSpec whole_spec, const at::Tensor& base)
    : whole(whole),
      whole_spec(std::move(whole_spec)),
      base(another_handle(base)),
      version(base.unsafeGetTensorImpl()->version_counter()) {
  if (version.enabled()) seen = version.current_version();
  state_of(this->whole_spec).copies.add(this);
}

ViewCopy::~ViewCopy() { state_of(whole_spec).copies.remove(this); }

const at::Tensor& ViewCopy::base_local() const { return meta_of(base)->local; }
ViewCopy* ViewCopy::parent() const { return meta_of(base)->copy.get(); }

void ViewCopy::write_back() {
  const LocalCallGuard guard;
  const ShardMeta& to = *meta_of(base);
  to.local.copy_(redistribute_local(whole, whole_spec, to.spec()));
  ++written;
  state_of(whole_spec).copies.wrote(to.local, this);
  if (to.copy) to.copy->write_back();
}

bool ViewCopy::fresh() const {
  if (stale || (version.enabled() && version.current_version() - seen > written)) return false;
  const ViewCopy* of_base = parent();
  return !of_base || of_base->fresh();
}

void ViewCopy::require_fresh(const std::string& op) const {
  if (!fresh())
    throw ShardingError(
        op, " is given a view of ", meta_of(base)->spec(),
        " that had to be copied, and the base has changed since. Take the view again.");
}

void ViewCopy::refresh() {
  if (ViewCopy* of_base = parent()) of_base->refresh();
  const LocalCallGuard guard;
  const ShardMeta& from = *meta_of(base);
  whole.copy_(redistribute_local(from.local, from.spec(), whole_spec));
  if (version.enabled()) seen = version.current_version();
  written = 0;
  stale = false;
}

}  // namespace tessera::detail
