#pragma once
// ParameterCopy: a copy of a fully sharded parameter in another dtype, as autocast makes it. It is
// a tensor like any other, with memory of its own; where an operator needs it gathered, it is taken
// from what the parameter's unit has gathered, ahead of its use and in one message, for as long as
// neither has been written to. Otherwise it is gathered by itself, from its own memory.

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "tessera/tensor/dispatch/internal/parameter_source.h"

namespace tessera::detail {

class GatherUnits;

class ParameterCopy final : public ParameterSource {
 public:
  /// `writes`: how often the unit of parameter `index` had been written to when the copy was made.
  /// `output`: of operators that take the copy; none: as they make it.
  ParameterCopy(std::shared_ptr<GatherUnits> units, std::size_t index, std::uint64_t writes,
                at::ScalarType dtype, std::optional<at::ScalarType> output);

  /// A tensor over the memory of `local` that `copy` is found by and lives as long as.
  static at::Tensor make(ParameterSources& sources, const at::Tensor& local,
                         const std::shared_ptr<ParameterCopy>& copy);

  ParameterPrecision precision(std::size_t index) const override;
  /// The copy as operators take it, without an output dtype: backward uses it too.
  at::Tensor computed(std::size_t index, const ShardMeta& meta) override;
  at::Tensor gathered(std::size_t index, const ShardMeta& meta, const ShardSpec& to) override;
  at::Tensor copied(std::size_t index, const Layout& from, const Layout& made,
                    at::Tensor local) override;
  void written(std::size_t index) override;

 private:
  const std::shared_ptr<GatherUnits> units_;
  const std::size_t index_;
  const std::uint64_t writes_;
  const at::ScalarType dtype_;
  const std::optional<at::ScalarType> output_;
  std::atomic<bool> written_ = false;
};

}  // namespace tessera::detail
