#pragma once
// Decompositions: operators that libtorch implements in one kernel, or composes of others in a way
// that does not suit shards, written with operators that have rules; for sharded tensors alone.

#include <torch/library.h>

#include <type_traits>

namespace tessera::detail {

/// Zeros of `sizes` that are sharded as `like`, whose dims are the same except for `dim`, which is
/// not sharded.
at::Tensor zeros_along(const at::Tensor& like, std::int64_t dim, c10::SymIntArrayRef sizes);

torch::Library& decompositions_above_autograd();
/// For inference mode, in which no kernels above autograd run.
torch::Library& decompositions_below_autograd();

/// Registers `function` (or, for a boxed kernel, a factory that returns a torch::CppFunction) to
/// run in place of aten::`name` on sharded tensors, above autograd, so that its gradient is that of
/// what it calls.
template <class Function>
void register_decomposition(const char* name, Function function) {
  for (torch::Library* library :
       {&decompositions_above_autograd(), &decompositions_below_autograd()}) {
    if constexpr (std::is_invocable_r_v<torch::CppFunction, Function>) {
      library->impl(name, function());
    } else {
      library->impl(name, function);
    }
  }
}

}  // namespace tessera::detail
