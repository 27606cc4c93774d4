#pragma once
// A network that learns, while the solver runs, what the solver will have made of its state some
// steps later. It sees the solver's own memory as one sharded tensor; nothing is gathered, and each
// rank convolves its own block.

#include <torch/torch.h>

#include <functional>

#include "../online.h"
#include "shallow_water.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/tensor/spec/spec.h"

namespace insitu {

/// [n, 3, rows, columns] -> the same, circular. Predicts the change of the state: a linear stencil,
/// which is all that small waves need, and a small correction of two convolutions. Both see the
/// deviation from still water divided by its root mean square, so that waves that calm down stay
/// alike.
struct SurrogateImpl : torch::nn::Module {
  explicit SurrogateImpl(std::int64_t width = 12);
  at::Tensor forward(const at::Tensor& state);

 private:
  torch::nn::Conv2d linear_{nullptr}, first_{nullptr}, last_{nullptr};
};
TORCH_MODULE(Surrogate);

/// The mesh of the solver's ranks, and where its cells lie on it.
struct SolverMesh {
  explicit SolverMesh(const ShallowWater& solver);
  /// The solver's memory as a tensor [1, 3, rows, columns] of the whole torus: no copy, it changes
  /// as the solver steps.
  at::Tensor view(ShallowWater& solver) const;

  tessera::DistributedManager manager;
  tessera::DeviceMesh mesh;
  tessera::ShardSpec spec;
};

using online::Score;
using online::Training;

/// Runs the solver and trains on it, then judges on `judged` more windows. Collective; every rank
/// gets the same score.
Score train_online(ShallowWater& solver, const SolverMesh& on, const Training& training,
                   std::int64_t judged = 5,
                   const std::function<void(std::int64_t window, double loss)>& watch = {});

}  // namespace insitu
