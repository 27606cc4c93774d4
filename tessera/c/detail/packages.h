#pragma once
// Networks that AOTInductor has compiled. A package is machine code that takes the sizes, strides
// and dtypes of its inputs as given and looks at none of them: a wrong one is read beyond its end.
// So each input is compared first with the record that save_package() of Python put beside it.

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera::c {

/// A package that was opened.
struct Package {
  /// Differs between packages of other contents.
  std::string identity;
  /// Throws Misuse for inputs that the package was not compiled for, and where grad mode is on.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> forward;
};

/// True for an archive of torch.export's format, whatever is in it.
bool is_package(const std::string& file);
/// Reads the whole file before any of its code runs. Throws FileError for one that is damaged, or
/// holds no compiled network or no record; NotAvailable where libtorch or this CPU cannot run it.
Package load_package(const std::string& file);

}  // namespace tessera::c
