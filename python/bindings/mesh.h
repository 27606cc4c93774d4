#pragma once
// The classes that Python holds: a mesh, ranks as threads, a trace.

#include <torch/custom_class.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/device_mesh.h"
#include "tessera/comm/thread_ranks.h"
#include "tessera/comm/trace.h"

namespace tessera::python {

/// Of the current manager of the thread that makes it.
struct PyMesh : torch::CustomClassHolder {
  PyMesh(const std::vector<std::string>& names, const std::vector<std::int64_t>& sizes);
  explicit PyMesh(DeviceMesh m) : mesh(std::move(m)) {}
  DeviceMesh mesh;
};

/// The current manager; throws ConfigurationError where there is none.
DistributedManager here();

}  // namespace tessera::python
