// Deferred construction of modules.

#include "tessera/nn/deferred.h"

#include <memory>
#include <string>
#include <vector>

#include "library.h"
#include "mesh.h"
#include "tessera/base/error.h"
#include "tessera/nn/detail/deferral.h"

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

std::vector<NamedTensor> named(const Names& names, const Tensors& tensors) {
  std::vector<NamedTensor> all;
  for (std::size_t i = 0; i < names.size(); ++i) all.push_back({names[i], tensors.at(i), true});
  return all;
}

/// What was on the meta device, and is recorded module by module.
struct PyDeferral : torch::CustomClassHolder {
  PyDeferral(const Names& names, const Tensors& tensors)
      : deferral(named(names, tensors), /*host_too=*/true) {}
  detail::Deferral deferral;
};
using DeferralPtr = c10::intrusive_ptr<PyDeferral>;

}  // namespace

void register_deferred(Library& library) {
  library.class_<PyDeferred>("Deferred")
      .def(torch::detail::types<void>())
      .def("begin", &PyDeferred::begin)
      .def("end", &PyDeferred::end);
  library.class_<PyDeferral>("Deferral")
      .def(torch::init<const Names&, const Tensors&>())
      .def("begin",
           [](const DeferralPtr& self, const Tensors& parameters, const Tensors& buffers,
              const Tensors& own) { return self->deferral.begin(parameters, buffers, own); })
      .def("end", [](const DeferralPtr& self) { self->deferral.end(); })
      .def("undo", [](const DeferralPtr& self) { self->deferral.undo(); });
  library.def("is_deferred", [](const at::Tensor& tensor) { return is_deferred(tensor); });
  library.def("materialize", [](const Tensors& tensors, const std::string& device) {
    materialize(tensors, c10::Device(device));
  });
  library.def("materialize_on",
              [](const Names& names, const Tensors& tensors, const MeshPtr& mesh) {
                materialize(named(names, tensors), mesh->mesh);
              });
}

}  // namespace tessera::python
