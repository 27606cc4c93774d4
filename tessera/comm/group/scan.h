#pragma once
// inclusive_scan: every rank gets the reduction of the tensors of the ranks up to itself.
//
//   auto end = at::tensor({rows});    // ranks 0, 1, 2 have 3, 0 and 2 rows
//   inclusive_scan(group, end);       // 3, 3, 5: where each rank's rows end among all

#include <ATen/core/Tensor.h>

#include "tessera/comm/group/group.h"

namespace tessera {

/// Reduces in place, in rank order: on group rank r it becomes x_0 op ... op x_r. Collective
/// over the group; takes and throws what Group's calls do. Moves what an all-gather moves. Throws
/// InvalidArgument for an average, whose number of summands would differ between ranks.
void inclusive_scan(const Group& group, const at::Tensor& tensor, ReduceOp op = ReduceOp::sum,
                    const CallOptions& options = {});
Request start_inclusive_scan(const Group& group, const at::Tensor& tensor,
                             ReduceOp op = ReduceOp::sum, const CallOptions& options = {});

}  // namespace tessera
