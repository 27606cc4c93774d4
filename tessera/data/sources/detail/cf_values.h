#pragma once
// What stored numbers stand for by the CF conventions: scale, offset and missing values.

#include <c10/core/Scalar.h>

#include <optional>
#include <string>

#include "tessera/data/sources/source.h"

namespace tessera::detail {

/// The values of `stored` in options.dtype. `fill`: the stored number of an element without a
/// value; missing_value and the valid range are attributes of `about`. Throws VariableError for
/// attributes of another kind, and for missing values that the dtype cannot hold.
at::Tensor cf_values(const at::Tensor& stored, const VariableInfo& about,
                     const std::optional<at::Scalar>& fill, const ReadOptions& options,
                     const std::string& source);

}  // namespace tessera::detail
