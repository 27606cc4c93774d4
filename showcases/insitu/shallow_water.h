#pragma once
// A small solver as one finds them: plain MPI, its own decomposition into uneven blocks, its own
// halo exchange. It knows nothing of libtorch.
//
// Shallow water on a torus: height h and momentum (hu, hv), conserved; first-order finite volumes
// with the Rusanov flux, explicit Euler.
//   dh/dt + d(hu)/dx + d(hv)/dy = 0,  d(hu)/dt + d(hu u + g h^2 / 2)/dx + d(hu v)/dy = 0,  likewise
//     for hv; g = 1, cells of size 1.
// (R. J. LeVeque, Finite Volume Methods for Hyperbolic Problems, 2002, chapters 12 and 18.)

#include <mpi.h>

#include <array>
#include <cstdint>
#include <vector>

namespace insitu {

inline constexpr int fields = 3;  // h, hu, hv

class ShallowWater {
 public:
  /// Cells of the whole torus. The ranks of `comm` stand on a grid (MPI_Dims_create), row-major;
  /// earlier rows and columns of it get larger blocks, as if their cores were faster. `comm` stays
  /// the caller's.
  ShallowWater(MPI_Comm comm, std::int64_t rows, std::int64_t columns);
  ~ShallowWater();
  ShallowWater(const ShallowWater&) = delete;
  ShallowWater& operator=(const ShallowWater&) = delete;

  MPI_Comm comm() const { return comm_; }
  /// Ranks down and across.
  std::array<int, 2> grid() const { return grid_; }
  /// Rows of each block, down.
  const std::vector<std::int64_t>& block_rows() const { return block_rows_; }
  /// Columns of each block, across.
  const std::vector<std::int64_t>& block_columns() const { return block_columns_; }
  /// Of this rank's block.
  std::int64_t rows() const { return block_rows_[where_[0]]; }
  std::int64_t columns() const { return block_columns_[where_[1]]; }

  /// This rank's cells: [fields][rows()][columns()], row-major. The address stays.
  double* state() { return state_.data(); }
  void step();
  std::int64_t steps() const { return steps_; }
  /// The sum of h over the torus, which never changes. Collective.
  double mass() const;

 private:
  double& padded(int f, std::int64_t r, std::int64_t c) {
    return padded_[(f * (rows() + 2) + r + 1) * (columns() + 2) + c + 1];
  }
  void exchange_halos();

  MPI_Comm comm_ = MPI_COMM_NULL;
  std::array<int, 2> grid_{}, where_{};
  std::vector<std::int64_t> block_rows_, block_columns_;
  std::vector<double> state_, padded_;
  double time_step_ = 0.2;
  std::int64_t steps_ = 0;
};

}  // namespace insitu
