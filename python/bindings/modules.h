#pragma once
// Modules of Python's as those of C++, for what takes a torch::nn::Module.

#include <torch/custom_class.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace tessera::python {

class Library;

/// The same tree of names over the same tensors. It holds them, not the module of Python's.
struct PyModuleTree : torch::CustomClassHolder {
  /// `modules`: names as in named_modules(), "" among them, each behind that of the module that
  /// holds it. `lists`: those of them of which each child is a unit by default. The first
  /// `parameters` of the tensors are parameters, the others buffers. Throws InvalidArgument where
  /// names and tensors differ in number, or a tensor's module is not among `modules`.
  PyModuleTree(const std::vector<std::string>& modules, const std::vector<std::string>& lists,
               const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors,
               std::int64_t parameters);
  std::shared_ptr<torch::nn::Module> module;
};
using ModuleTreePtr = c10::intrusive_ptr<PyModuleTree>;

/// Sharded training of such trees: before what takes one.
void register_modules(Library& library);

}  // namespace tessera::python
