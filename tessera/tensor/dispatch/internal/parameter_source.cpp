#include "tessera/tensor/dispatch/internal/parameter_source.h"

#include "tessera/tensor/dispatch/internal/layout.h"
#include "tessera/tensor/spec/internal/mesh_context.h"
#include "tessera/tensor/spec/internal/rank_state.h"

namespace tessera::detail {

void ParameterSources::add(const at::Tensor& local, const std::shared_ptr<ParameterSource>& source,
                           std::size_t index) {
  const std::lock_guard lock(mutex_);
  if (entries_.size() >= most_) {
    std::erase_if(entries_, [](const auto& entry) {
      return entry.second.source.expired() || entry.second.storage.expired();
    });
    most_ = 2 * entries_.size() + 64;
  }
  entries_.insert_or_assign(local.storage().unsafeGetStorageImpl(),
                            Entry{source, index, local.storage().getWeakStorageImpl()});
  count_ = entries_.size();
  const ParameterPrecision precision = source->precision(index);
  if (precision.compute && *precision.compute != local.scalar_type()) casts_ = true;
}

ParameterSources::Found ParameterSources::find(const at::TensorBase& local) {
  if (!any() || !local.has_storage()) return {};
  const std::lock_guard lock(mutex_);
  const auto at = entries_.find(local.storage().unsafeGetStorageImpl());
  if (at == entries_.end()) return {};
  return {at->second.source.lock(), at->second.index};
}

void ParameterSources::wrote(const at::TensorBase& local) {
  if (const auto [source, index] = find(local); source) source->written(index);
}

void wrote_shard(const at::Tensor& tensor) {
  if (const ShardMeta* meta = tensor.defined() ? meta_of(tensor) : nullptr)
    context_of(meta->spec())->state->sources.wrote(meta->local);
}

}  // namespace tessera::detail
