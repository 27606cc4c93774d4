#pragma once
// fill_deferred: the values of a deferred module come from a checkpoint, or from files of another
// program, shard by shard.
//
//   auto net = tessera::deferred([] { return Gpt(options); });       // no parameter has memory
//   const auto saved = std::make_shared<tessera::CheckpointReader>(mesh.all(), "llama-8b");
//   tessera::fill_deferred(*net, saved, {{"blocks.*.query.weight",
//                                         "model.layers.*.self_attn.q_proj.weight"}, ...});
//   tessera::fully_shard(*net, mesh);                                // each rank reads its ranges
//
// Nothing is drawn, and nothing is read before the module is placed. Each rank then reads the bytes
// of its shards alone, parameter by parameter, and holds no more than those and one parameter.

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/file.h"

namespace tessera {

/// Pairs of a pattern of a module's names and the name that the files have: a "*" matches any
/// characters, dots included, as few as possible, and stands in the second for what it matched, in
/// order. The first pattern that matches counts; a name that none matches is the same in the files.
using NameTable = std::vector<std::pair<std::string, std::string>>;

/// The name in the files. Throws InvalidArgument for a pair with more "*" in the second than in the
/// first.
std::string name_in_files(const std::string& name, const NameTable& table);

/// Says that deferred parameters and buffers of `module` get their values from `saved` when they
/// are placed (fully_shard(), tensor_parallel(), distribute_module(), over the ranks of the
/// reader's group) or materialized; those that have values get theirs now. What is done to the
/// module before it is placed, say net->to(dtype), is done to what is read. Collective over the
/// reader's group, all of which give the same; the reader is kept as long as it is needed. Of
/// `options`, `convert`, `allow_missing` (what is missing keeps what its constructor draws),
/// `allow_extra`, `verify`, `threads`, `max_over_read` and `timeout` count. A tensor that has
/// several names is read under the first that is there.
///
/// Throws InvalidArgument, before anything is changed, with all names that are missing, left over,
/// of another shape or dtype, and for a pattern that matches nothing. When values are read, errors
/// are those of CheckpointReader::read(), on all ranks, and everything stays deferred;
/// InvalidArgument where the mesh has other ranks than the reader's group.
void fill_deferred(torch::nn::Module& module, const std::shared_ptr<const CheckpointReader>& saved,
                   const NameTable& names = {}, const LoadOptions& options = {});
/// The same for the tensors of a module that is not C++'s own.
void fill_deferred(const NamedTensors& tensors,
                   const std::shared_ptr<const CheckpointReader>& saved,
                   const NameTable& names = {}, const LoadOptions& options = {});

}  // namespace tessera
