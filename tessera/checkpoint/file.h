#pragma once
// One safetensors file, whatever mesh the tensors lie on; what one mesh saved loads on any other.
//
//   save(*net, mesh, "net.safetensors");  // every parameter and buffer, by its full name
//   load(*other, other_mesh, "net.safetensors");  // into the placements that its parameters have
//
// The file is written and read by the mesh's first rank alone, one tensor at a time, so that it
// need not be on a shared file system and no rank holds more than its shards and one full tensor.
// It is written beside its place, synced to the disk and moved there when it is complete. Files of
// other programs in this format load as well, and so do folders of several files with the index of
// Hugging Face's tools, wherever `path` is one; nothing in them is executed. For checkpoints of
// many ranks, see checkpointer.h.
//
// All calls are collective over the mesh. An error on the first rank is thrown on all: FileError
// for a file that cannot be opened, read or written, is damaged, or holds what libtorch cannot. The
// other ranks wait for the first one for an hour, or for the time limit of the mesh's groups if
// that is longer.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/files/json.h"
#include "tessera/mesh/mesh.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/spec/spec.h"

namespace tessera {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Sharded tensors of this mesh, and plain ones, of which the first rank's are saved. Partial
/// values are reduced. Placements and sizes are kept in the metadata, which other readers ignore.
/// Throws InvalidArgument for duplicate names and for dtypes that the format does not have (complex
/// double), MismatchError where ranks differ in names, dtypes, shapes or placements.
void save(const NamedTensors& tensors, const DeviceMesh& mesh, const std::string& path);
/// One sharded tensor, under the name "tensor".
void save(const at::Tensor& tensor, const std::string& path);
/// Parameters and buffers, plain or sharded.
void save(const torch::nn::Module& module, const DeviceMesh& mesh, const std::string& path);

/// Writes a folder of files of at most `max_bytes` bytes of data, or of one tensor, with the index
/// that Hugging Face's tools write and read (model.safetensors.index.json), which comes last.
/// Tensors as above; the folder is made if it is absent.
void save_folder(const NamedTensors& tensors, const DeviceMesh& mesh, const std::string& folder,
                 std::uint64_t max_bytes);

/// All tensors of the file, in its order, distributed over the mesh as `rule` says (default:
/// replicated). On the manager's device. Throws MismatchError where the ranks' rules differ.
NamedTensors load(
    const DeviceMesh& mesh, const std::string& path,
    const std::function<std::optional<ParameterPlacement>(const std::string&)>& rule = {});
/// All tensors of the file, sharded as they were saved, as far as they fit the mesh (see
/// fit_layout(), which says what `misfits` gets); those without a saved layout are replicated.
/// Throws InvalidArgument for what does not fit if `misfits` is null.
NamedTensors load_as_saved(const DeviceMesh& mesh, const std::string& path,
                           std::vector<std::string>* misfits = nullptr);
/// The only tensor of a file, sharded by `spec`. Throws InvalidArgument if there are more, or its
/// shape is another one.
at::Tensor load(const std::string& path, const ShardSpec& spec);
/// Fills the parameters and buffers, wherever they lie; dtypes are converted. Throws
/// InvalidArgument, before anything is changed, with the names that are missing, left over or of
/// another shape.
void load(torch::nn::Module& module, const DeviceMesh& mesh, const std::string& path);
/// These tensors are filled, in the same way.
void load_into(const NamedTensors& tensors, const DeviceMesh& mesh, const std::string& path);

// SavedLayout: how a tensor lay on the mesh that saved it, kept beside it in files, and restored on
// wish.
//
//   saved on data 2, domain 3:   [4, 7] Shard(0){3, 1}, Shard(1){4, 0, 3}
//   fit_layout on domain 3:      [4, 7] Shard(1){4, 0, 3}; misfits: "axis 'data', which sharded
//                                dim 0, is not in the mesh"

struct SavedLayout {
  /// The axes are those of the mesh that saved it, outermost first.
  std::vector<Axis> axes;
  /// One an axis; never Partial: what is saved has been reduced.
  std::vector<Placement> placements;
  ShardSizes sizes;
  bool operator==(const SavedLayout&) const = default;
};

SavedLayout saved_layout(const ShardSpec& spec);
/// Returns JSON: {"axes":[["data",2]],"placements":[0],"sizes":{"0":[3,1]}}; a placement is the dim
/// that is sharded, or null.
std::string to_json(const SavedLayout& layout);
/// Throws InvalidArgument for anything else.
SavedLayout layout_from_json(const Json& json);

/// The layout on `mesh`: each axis places the tensor as the axis of the same name did, axes that
/// the layout does not know replicate it. Where the axes that shard a dim have the sizes they had,
/// its shards have the saved sizes, else they are even. What does not fit is listed in `misfits`, a
/// sentence each; without it the first misfit throws InvalidArgument. `whose` stands before each
/// sentence, for a layout that a file says.
ShardSpec fit_layout(const SavedLayout& layout, const DeviceMesh& mesh,
                     const std::vector<std::int64_t>& shape,
                     std::vector<std::string>* misfits = nullptr, const std::string& whose = {});

}  // namespace tessera
