#pragma once
// A graph network that learns, while the solver runs, what the solver will have made of its cells
// some steps later: encoder, layers of messages along the faces, decoder, in plain torch. Cells and
// faces lie where the solver has them; a layer exchanges ghosts once in each direction.
// (T. Pfaff et al., Learning Mesh-Based Simulation with Graph Networks, 2021.)

#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

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

struct Training {
  /// Pairs of states to learn from.
  std::int64_t windows = 60;
  /// Solver steps between the two states of a pair.
  std::int64_t steps_a_window = 4;
  /// Of the weights, for each pair.
  std::int64_t updates = 4;
  double learning_rate = 3e-3;
  /// The folder to save in and to log into (metrics.jsonl, which `tessera report` draws), and to go
  /// on from, on any number of ranks and in any partition of the same mesh; empty: neither.
  std::string folder = {};
  /// Windows between checkpoints.
  std::int64_t save_every = 20;
};

/// After training, over windows that were not trained on: root mean square errors of h against the
/// solver's.
struct Score {
  double surrogate = 0;
  /// Of "nothing changes".
  double persistence = 0;
  /// Of each update.
  std::vector<double> losses;
  double mass_before = 0, mass_after = 0;
};

/// Runs the solver and trains on it, then judges on `judged` more windows. Collective; every rank
/// gets the same score. Throws tessera::Error on every rank for a checkpoint of another mesh.
Score train_online(Waves& solver, const SolverMesh& on, const Training& training,
                   std::int64_t judged = 5,
                   const std::function<void(std::int64_t window, double loss)>& watch = {});

}  // namespace pillar
