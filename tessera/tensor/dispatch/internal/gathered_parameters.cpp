#include "tessera/tensor/dispatch/internal/gathered_parameters.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "tessera/tensor/dispatch/internal/parameter_source.h"
#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {
namespace {

std::shared_ptr<GatheredParameters>& of_thread() {
  static thread_local std::shared_ptr<GatheredParameters> current;
  return current;
}

}  // namespace

GatheredParameters::GatheredParameters(at::TensorList parameters, std::size_t most)
    : most_(most), task_(torch::autograd::get_current_graph_task_id()) {
  for (const at::Tensor& p : parameters) {
    const ShardMeta* meta = p.defined() ? meta_of(p) : nullptr;
    if (meta && meta->layout->parameter && meta->spec().has_shard())
      storages_.push_back(meta->local.storage().unsafeGetStorageImpl());
  }
}

bool GatheredParameters::is_current_task() const {
  return task_ == torch::autograd::get_current_graph_task_id();
}

GatheredParameters* GatheredParameters::current() {
  GatheredParameters* now = of_thread().get();
  return now && now->is_current_task() ? now : nullptr;
}

void GatheredParameters::set_current(std::shared_ptr<GatheredParameters> kept) {
  auto& now = of_thread();
  if (now && now != kept) now->clear();
  now = std::move(kept);
}

void GatheredParameters::end(const GatheredParameters* kept) {
  if (auto& now = of_thread(); now.get() == kept) now.reset();
}

bool GatheredParameters::watched(const at::Tensor& parameter) const {
  const ShardMeta& meta = *meta_of(parameter);
  return meta.layout->parameter && !meta.copy &&
         parameter.unsafeGetTensorImpl()->version_counter().enabled() &&
         std::ranges::find(storages_, meta.local.storage().unsafeGetStorageImpl()) !=
             storages_.end();
}

at::Tensor GatheredParameters::find(const at::Tensor& parameter, const ShardSpec& to) {
  if (!watched(parameter)) return {};
  const ShardMeta& meta = *meta_of(parameter);
  const auto version = parameter.unsafeGetTensorImpl()->version_counter().current_version();
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    const bool same =
        it->layout == meta.layout && it->to == to && it->part.is_alias_of(meta.local) &&
        it->part.storage_offset() == meta.local.storage_offset() && it->version == version;
    if (!same) continue;
    std::rotate(it, it + 1, entries_.end());
    return entries_.back().local;
  }
  return {};
}

void GatheredParameters::add(const at::Tensor& parameter, const ShardSpec& to,
                             const at::Tensor& local) {
  if (!watched(parameter)) return;
  const ShardMeta& meta = *meta_of(parameter);
  if (entries_.size() == most_) entries_.erase(entries_.begin());
  entries_.push_back({meta.local, meta.layout, to,
                      parameter.unsafeGetTensorImpl()->version_counter().current_version(), local});
}

at::Tensor gathered_by_source(const at::Tensor& parameter, const ShardSpec& to) {
  const ShardMeta& meta = *meta_of(parameter);
  if (!meta.layout->parameter || meta.copy) return {};
  const auto [source, index] = context_of(to)->state->sources.find(meta.local);
  return source ? source->gathered(index, meta, to) : at::Tensor();
}

}  // namespace tessera::detail
