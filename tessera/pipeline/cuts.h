#pragma once
// A torch::nn::Sequential cut into stages, which share its children.
//
//   split_sequential(net, {3, 5})                     // children 0-2, 3-4, 5 and on
//   split_sequential(net, {"decoder"})                // up to the child of that name, and from it
//   split_sequential(net, balanced_cuts(parameter_costs(net), 4))

#include <torch/nn/modules/container/sequential.h>

#include <string>
#include <vector>

namespace tessera {

/// Stage i holds the children from cuts[i - 1] to cuts[i] - 1. Throws InvalidArgument where the
/// cuts do not ascend within the children, or a stage would be empty.
std::vector<torch::nn::Sequential> split_sequential(const torch::nn::Sequential& net,
                                                    const std::vector<int>& cuts);
/// Each name is that of the child that begins a stage. Throws InvalidArgument for an unknown name.
std::vector<torch::nn::Sequential> split_sequential(const torch::nn::Sequential& net,
                                                    const std::vector<std::string>& names);

/// Cuts for `stages` stages of consecutive children, so that the largest sum of costs is as small
/// as can be; of equal ones, with the earlier stages as full as that allows. No stage is empty.
/// Throws InvalidArgument for fewer children than stages, and costs that are negative or not
/// finite.
///
///   balanced_cuts({1, 1, 4, 1, 1}, 3) -> {2, 3}
std::vector<int> balanced_cuts(const std::vector<double>& costs, int stages);

/// The number of elements of each child's parameters, plus 1.
std::vector<double> parameter_costs(const torch::nn::Sequential& net);

}  // namespace tessera
