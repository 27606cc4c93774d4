// Deferred construction of modules.

#include "tessera/nn/deferred.h"

#include <memory>
#include <string>
#include <vector>

#include "library.h"
#include "tessera/base/error.h"

namespace tessera::python {

namespace {

struct HostScope : DeferredScope {
  HostScope() : DeferredScope(true) {}
};

/// A scope that the thread which began it ends.
struct PyDeferred : torch::CustomClassHolder {
  void begin() {
    if (scope) throw InvalidArgument("deferred: this scope has been entered already");
    scope = std::make_unique<HostScope>();
  }
  void end() { scope.reset(); }
  std::unique_ptr<HostScope> scope;
};

}  // namespace

void register_deferred(Library& library) {
  library.class_<PyDeferred>("Deferred")
      .def(torch::detail::types<void>())
      .def("begin", &PyDeferred::begin)
      .def("end", &PyDeferred::end);
  library.def("is_deferred", [](const at::Tensor& tensor) { return is_deferred(tensor); });
  library.def("materialize", [](const std::vector<at::Tensor>& tensors, const std::string& device) {
    materialize(tensors, c10::Device(device));
  });
}

}  // namespace tessera::python
