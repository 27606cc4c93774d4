#include "tessera/data/detail/read_batch.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "tessera/base/text.h"

namespace tessera::detail {
namespace {

constexpr auto kIndex = "edges/index";

// The number of nodes; of all tensors under "nodes" the same.
std::int64_t nodes_of(const std::vector<std::string>& names, const Sample& sample) {
  for (std::size_t t = 0; t < sample.size(); ++t)
    if (names_field("nodes", names[t]) && sample[t].dim() > 0) return sample[t].size(0);
  return 0;
}

const at::Tensor& index_of(const std::vector<std::string>& names, const Sample& sample) {
  return sample[static_cast<std::size_t>(std::ranges::find(names, kIndex) - names.begin())];
}

}  // namespace

void require_graph_names(const std::vector<std::string>& names) {
  if (std::ranges::find(names, kIndex) == names.end() ||
      std::ranges::none_of(names, [](const auto& name) { return names_field("nodes", name); }))
    throw InvalidArgument("LoaderOptions::graphs of samples with the fields ", list(names),
                          "; graphs have 'edges/index' (2 x edges) and fields under 'nodes'");
}

void require_graph(const std::vector<std::string>& names, const Sample& sample,
                   const Sample& first) {
  if (sample.size() + 1 != names.size())
    throw InvalidArgument("it has ", sample.size(), " tensors, and ", names.size() - 1, " names");
  const at::Tensor& index = index_of(names, sample);
  if (index.dim() != 2 || index.size(0) != 2 || index.scalar_type() != at::kLong)
    throw InvalidArgument("'edges/index' is ", index.scalar_type(), ' ', index.sizes(),
                          "; give int64, 2 x edges");
  const std::int64_t nodes = nodes_of(names, sample), edges = index.size(1);
  if (edges > 0 &&
      (index.min().item<std::int64_t>() < 0 || index.max().item<std::int64_t>() >= nodes))
    throw InvalidArgument("an edge names a node that there is not: of ", nodes, ", nodes ",
                          index.min().item<std::int64_t>(), " to ",
                          index.max().item<std::int64_t>(), " are named");
  for (std::size_t t = 0; t < sample.size(); ++t) {
    const at::Tensor &it = sample[t], &other = first[t];
    if (names[t] == kIndex) continue;
    const bool node = names_field("nodes", names[t]), edge = names_field("edges", names[t]);
    if ((node || edge) && (it.dim() == 0 || it.size(0) != (node ? nodes : edges)))
      throw InvalidArgument('\'', names[t], "' is ", it.sizes(), "; of ", nodes, " nodes and ",
                            edges, " edges it has a row for each ", node ? "node" : "edge");
    const auto row = [&](const at::Tensor& of) { return of.sizes().slice(node || edge ? 1 : 0); };
    if (it.dim() != other.dim() || it.scalar_type() != other.scalar_type() ||
        it.device() != other.device() || row(it) != row(other))
      throw InvalidArgument('\'', names[t], "' is ", it.scalar_type(), ' ', it.sizes(), " on ",
                            it.device(), ", that of the first sample ", other.scalar_type(), ' ',
                            other.sizes(), " on ", other.device());
  }
}

std::vector<at::Tensor> graph_batch(const std::vector<std::string>& names,
                                    const std::vector<Sample>& samples, bool empty) {
  std::vector<std::int64_t> first{0};
  for (const Sample& sample : samples) first.push_back(first.back() + nodes_of(names, sample));
  std::vector<at::Tensor> batch;
  for (std::size_t t = 0; t + 1 < names.size(); ++t) {
    const bool index = names[t] == kIndex;
    std::vector<at::Tensor> all;
    for (std::size_t s = 0; s < samples.size(); ++s)
      all.push_back(index ? samples[s][t] + first[s] : samples[s][t]);
    batch.push_back(index || names_field("nodes", names[t]) || names_field("edges", names[t])
                        ? at::cat(all, index ? 1 : 0)
                        : at::stack(all));
    if (empty) batch.back() = batch.back().narrow(index ? 1 : 0, 0, 0);
  }
  const at::Tensor sizes = at::tensor(first, at::kLong).diff();
  batch.push_back(at::arange(sizes.size(0), at::kLong).repeat_interleave(sizes));
  if (empty) batch.back() = batch.back().narrow(0, 0, 0);
  return batch;
}

}  // namespace tessera::detail
