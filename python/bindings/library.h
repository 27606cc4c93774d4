#pragma once
// What the files here add to the library `tessera` of operators and classes.

#include <torch/library.h>

namespace tessera::python {

void register_backend(torch::Library& library);
void register_data(torch::Library& library);
void register_groups(torch::Library& library);
void register_mesh(torch::Library& library);
void register_nn(torch::Library& library);
void register_tensor(torch::Library& library);
void register_trees(torch::Library& library);

}  // namespace tessera::python
