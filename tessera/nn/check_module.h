#pragma once
// check_module: is this module safe on this mesh? Runs it sharded beside the same module on one
// process, and says what differs, what moves, and what is refused.
//
//   auto report = tessera::check_module(net, {x}, mesh);   // a ModuleHolder; x on every rank
//   if (!report.safe() && manager.rank() == 0) std::cout << report.to_string();

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/nn/distribute_module.h"
#include "tessera/tensor/policy.h"

namespace tessera {

/// One output, or one gradient, beside that of one process.
struct CheckedValue {
  std::string name;
  /// Largest, relative to the largest value; infinite where shapes, dtypes or NaNs differ.
  double difference = 0;
  double tolerance = 0;
  /// Its placements; nothing for what is no sharded tensor.
  std::optional<std::vector<Placement>> placements;
  /// The difference in the module's own dtype, where float64 decided.
  std::optional<double> rounding = {};

  bool equal() const { return difference <= tolerance; }
};

struct CheckReport {
  std::vector<CheckedValue> values, gradients;
  /// Operators that refuse these placements; the check went on with gathered values.
  std::vector<Refusal> refused;
  /// What this rank sends.
  std::int64_t forward_bytes = 0, backward_bytes = 0;

  /// Everything is equal to one process, and nothing is refused.
  bool safe() const;
  /// The verdict in a line, then the worst `most` of each kind, for a person.
  std::string to_string(std::size_t most = 10) const;
};

struct CheckOptions {
  /// The placements of every input, or one list for each; none: dim 0 over the mesh's first axis.
  std::vector<std::vector<Placement>> placements = {};
  /// Gradients of inputs and parameters too.
  bool gradients = true;
  /// Relative to the largest value; nothing: 1e-10 in float64, 1e-4 in float32, 2e-2 in half, 0.12
  /// in bfloat16, and what differs by more in one of the latter is judged in float64: rounding
  /// flips decisions of ReLU or max-pooling, on one process too.
  std::optional<double> tolerance = {};
};

/// Runs a module on inputs and returns its outputs.
using ModuleCall = std::function<std::vector<at::Tensor>(torch::nn::Module& module,
                                                         const std::vector<at::Tensor>& inputs)>;

/// Compares two copies of `module` (its clone()), one distributed by `rule`; itself stays as it is.
/// Dropout is switched off in both, since sharded tensors draw other numbers than plain ones.
/// `inputs` are plain; they and the module are the same on all ranks. Collective over the mesh; all
/// ranks get the same report but for the bytes. Throws what the plain run throws, MismatchError on
/// every rank with the first input, parameter or buffer that differs between ranks, and
/// InvalidArgument where placements and inputs differ in number.
CheckReport check_module(const torch::nn::Module& module, const ModuleCall& call,
                         const std::vector<at::Tensor>& inputs, const DeviceMesh& mesh,
                         const ModuleRule& rule = {}, const CheckOptions& options = {});

/// Checks a module whose forward() takes one to three tensors and returns one.
template <class Impl>
CheckReport check_module(const torch::nn::ModuleHolder<Impl>& net,
                         const std::vector<at::Tensor>& inputs, const DeviceMesh& mesh,
                         const ModuleRule& rule = {}, const CheckOptions& options = {}) {
  const ModuleCall call = [](torch::nn::Module& module, const std::vector<at::Tensor>& t) {
    auto& typed = dynamic_cast<Impl&>(module);
    if constexpr (requires { at::Tensor(typed.forward(t[0])); }) {
      if (t.size() == 1) return std::vector<at::Tensor>{typed.forward(t[0])};
    }
    if constexpr (requires { at::Tensor(typed.forward(t[0], t[1])); }) {
      if (t.size() == 2) return std::vector<at::Tensor>{typed.forward(t[0], t[1])};
    }
    if constexpr (requires { at::Tensor(typed.forward(t[0], t[1], t[2])); }) {
      if (t.size() == 3) return std::vector<at::Tensor>{typed.forward(t[0], t[1], t[2])};
    }
    throw InvalidArgument("check_module: forward() does not take that many tensors; give a call");
  };
  return check_module(*net, call, inputs, mesh, rule, options);
}

}  // namespace tessera
