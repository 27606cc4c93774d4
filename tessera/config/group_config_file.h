#pragma once
// ProcessGroupConfig as JSON or YAML, so that one file configures a job.
//
//   name: world                      # the root; its other fields are those of any node
//   order: first-adjacent            # the first leaf has adjacent ranks (default)
//   children:
//     - {name: mp, size: 2, backend: nccl, timeout: 30s}
//     - name: dp
//       children:
//         - {name: shard, size: 4, orthogonal_group: across, scope: parent}
//         - {name: replicate}        # open: follows from the world
//   orthogonal:
//     - {name: not_dp, of: [dp], scope: world}
//
// or flat, with names of children and the leaves' sizes, and options by node:
//
//   tree: {world: [mp, dp], dp: [shard, replicate]}
//   leaf_sizes: {mp: 2, shard: 4, replicate: 2}
//   nodes: {shard: {orthogonal_group: across}}

#include <string>

#include "tessera/config/errors.h"
#include "tessera/mesh/groups/group_config.h"

namespace tessera {

/// Reads a tree of process groups; the format follows from the ending .json, .yaml or .yml. Throws
/// ConfigFileError (syntax, unknown or mistyped fields) and what ProcessGroupConfig throws.
ProcessGroupConfig read_group_config(const std::string& path);
ProcessGroupConfig parse_group_config(const std::string& text, FileFormat format,
                                      const std::string& source = "group configuration");

/// Writes the nested form; reading it back gives an equal configuration. Throws InvalidArgument for
/// a name that the format cannot hold.
std::string format_group_config(const ProcessGroupConfig& config, FileFormat format);
void write_group_config(const ProcessGroupConfig& config, const std::string& path);

}  // namespace tessera
