#pragma once
// Graphs of different sizes as one: the batches of LoaderOptions::graphs.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/data/dataset.h"

namespace tessera::detail {

/// Throws InvalidArgument unless these are names of graphs: "edges/index" and one under "nodes".
void require_graph_names(const std::vector<std::string>& names);
/// Throws InvalidArgument unless the sample is a graph whose fields have these names, and can stand
/// in one batch with the first one.
void require_graph(const std::vector<std::string>& names, const Sample& sample,
                   const Sample& first);
/// One graph of samples that have been checked, with the row of each node's graph behind. `empty`:
/// without any, in the shapes of these.
std::vector<at::Tensor> graph_batch(const std::vector<std::string>& names,
                                    const std::vector<Sample>& samples, bool empty);

}  // namespace tessera::detail
