#pragma once
// Unboxed kernels for the operators that training calls most: they use the same plans, found
// without building a stack of boxed values.

#include <memory>

#include "tessera/tensor/dispatch/internal/dispatch.h"

namespace torch {
class Library;
class CppFunction;
}  // namespace torch

namespace tessera::detail {

/// Registers the unboxed kernels of `name` ("aten::add.Tensor"). Returns false if it has none.
/// `info` must outlive the registration.
bool register_fast_kernels(const std::string& name, const std::shared_ptr<const OpInfo>& info,
                           torch::Library& below, torch::Library& above);

}  // namespace tessera::detail
