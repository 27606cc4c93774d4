#pragma once
// Saving and loading: one safetensors file, whatever mesh the tensors lie on; what one mesh saved
// loads on any other.
//
//   save(*net, mesh, "net.safetensors");  // every parameter and buffer, by its full name
//   load(*other, other_mesh, "net.safetensors");  // into the placements that its parameters have
//
// The file is written and read by the mesh's first rank alone, one tensor at a time, so that it
// need not be on a shared file system and no rank holds more than its parts and one whole tensor.
// It is written beside its place and moved there when it is complete. Files of other programs in
// this format load as well; nothing in them is executed.
//
// All calls are collective over the mesh. An error on the first rank (no such file, disk full, a
// broken header) is thrown on all.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/distribute_module.h"

namespace tessera {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Sharded tensors of this mesh, and plain ones, of which the first rank's are saved. Throws
/// InvalidArgument for names that stand twice and for dtypes that the format does not have (complex
/// double).
void save(const NamedTensors& tensors, const DeviceMesh& mesh, const std::string& path);
/// One sharded tensor, under the name "tensor".
void save(const at::Tensor& tensor, const std::string& path);
/// Parameters and buffers, plain or sharded.
void save(const torch::nn::Module& module, const DeviceMesh& mesh, const std::string& path);

/// All tensors of the file, in its order, distributed over the mesh as `rule` says (default:
/// replicated). On the manager's device.
NamedTensors load(
    const DeviceMesh& mesh, const std::string& path,
    const std::function<std::optional<ParameterPlacement>(const std::string&)>& rule = {});
/// The only tensor of a file, laid out by `spec`. Throws InvalidArgument if there are more, or its
/// shape is another one.
at::Tensor load(const std::string& path, const ShardSpec& spec);
/// Into the parameters and buffers that are there, wherever they lie; dtypes are converted. Throws
/// InvalidArgument, before anything is changed, with the names that are missing, left over or of
/// another shape.
void load(torch::nn::Module& module, const DeviceMesh& mesh, const std::string& path);
/// As above, into these tensors.
void load_into(const NamedTensors& tensors, const DeviceMesh& mesh, const std::string& path);

}  // namespace tessera
