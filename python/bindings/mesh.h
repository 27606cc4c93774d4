#pragma once
// The classes that Python holds: a mesh, ranks as threads, a trace.

#include <torch/custom_class.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group/trace.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/comm/job/threads.h"

namespace tessera::python {

/// Of the current manager of the thread that makes it.
struct PyMesh : torch::CustomClassHolder {
  PyMesh(const std::vector<std::string>& names, const std::vector<std::int64_t>& sizes);
  explicit PyMesh(DeviceMesh m) : mesh(std::move(m)) {}
  DeviceMesh mesh;
};
using MeshPtr = c10::intrusive_ptr<PyMesh>;

/// Outermost first. Throws InvalidArgument where names and sizes differ in number.
std::vector<Axis> mesh_axes(const std::vector<std::string>& names,
                            const std::vector<std::int64_t>& sizes);

/// "data-model": how Python writes several axes.
std::string joined_axes(const std::vector<std::string>& axes);

/// The current manager; throws ConfigurationError where there is none.
DistributedManager here();

}  // namespace tessera::python
