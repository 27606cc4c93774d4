#include "library.h"

#include "tessera/version.h"

// In this order, whatever order the linker gives to files: an operator that takes a class needs the
// class to be there.
TORCH_LIBRARY_FRAGMENT(tessera, torch_library) {
  tessera::python::Library library(torch_library);
  tessera::python::register_mesh(library);
  tessera::python::register_groups(library);
  tessera::python::register_trees(library);
  tessera::python::register_tensor(library);
  tessera::python::register_nn(library);
  tessera::python::register_ghosts(library);
  tessera::python::register_callbacks(library);
  tessera::python::register_data(library);
  tessera::python::register_checkpoint(library);
  tessera::python::register_progress(library);
  tessera::python::register_session(library);
  tessera::python::register_rules(library);
  tessera::python::register_deferred(library);
  tessera::python::register_schedules(library);
  tessera::python::register_pipeline(library);
  tessera::python::register_backend(library);
  library.def("error_names", &tessera::python::error_names);
  library.def("set_error_classes", &tessera::python::set_error_classes);
  library.def("version", [] { return std::string(TESSERA_VERSION); });
}
