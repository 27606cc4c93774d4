#pragma once
// A graph network that learns, while the solver runs, what the solver will have made of its cells
// some steps later: encoder, layers of messages along the faces, decoder, in plain torch. Cells and
// faces lie where the solver has them; a layer exchanges ghosts once in each direction.
// (T. Pfaff et al., Learning Mesh-Based Simulation with Graph Networks, 2021.)

#include <torch/torch.h>

#include <functional>
#include <vector>

#include "../online.h"
#include "tessera/comm/job/device_mesh.h"
#include "tessera/ops/ghosts/owned_rows.h"
#include "waves.h"

namespace pillar {

/// The solver's ranks as a mesh, its cells as sharded rows and its faces as edges.
struct SolverMesh {
  SolverMesh(const Waves& solver, const Cells& cells);
  /// The solver's memory as a tensor [all cells, 3]: no copy, it changes as the solver steps.
  at::Tensor view(Waves& solver) const;

  tessera::DistributedManager manager;
  tessera::DeviceMesh mesh;
  tessera::OwnedRows cells;
  /// 2 x edges, one in each direction of a face; each with its target.
  at::Tensor edges;
  /// Of each edge: the way from source to target and its length, in mean ones. Of each cell: its
  /// area in mean ones, and the normals of its walls.
  at::Tensor edge_features, cell_features;
  /// Of the mesh of all ranks; a checkpoint is of one mesh.
  std::int64_t hash = 0;
};

struct SurrogateImpl : torch::nn::Module {
  explicit SurrogateImpl(std::int64_t width = 16, int layers = 3);
  /// [cells, 3] -> the same, later. What moves is seen in units of its root mean square, so that
  /// waves that calm down stay alike.
  at::Tensor forward(const at::Tensor& state, const SolverMesh& on);

 private:
  torch::nn::Sequential cell_in_, edge_in_, out_;
  std::vector<torch::nn::Sequential> cell_, edge_;
};
TORCH_MODULE(Surrogate);

using online::Score;
using online::Training;

/// Runs the solver and trains on it, then judges on `judged` more windows. Collective; every rank
/// gets the same score. Its folder has the log too (metrics.jsonl, which `tessera report` draws),
/// and goes on in any partition of the mesh. Throws tessera::Error on every rank for a checkpoint
/// of another mesh.
Score train_online(Waves& solver, const SolverMesh& on, const Training& training,
                   std::int64_t judged = 5,
                   const std::function<void(std::int64_t window, double loss)>& watch = {});

}  // namespace pillar
