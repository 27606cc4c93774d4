#include "library.h"

// In this order, whatever order the linker gives to files: an operator that takes a class needs the
// class to be there.
TORCH_LIBRARY_FRAGMENT(tessera, library) {
  tessera::python::register_mesh(library);
  tessera::python::register_groups(library);
  tessera::python::register_trees(library);
  tessera::python::register_tensor(library);
  tessera::python::register_nn(library);
  tessera::python::register_data(library);
  tessera::python::register_backend(library);
}
