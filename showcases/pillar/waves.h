#pragma once
// A small solver as one finds them: plain MPI, cells by a table of owners (METIS's, any), its own
// exchange of ghost cells. It knows nothing of libtorch.
//
// Shallow water between walls: height h and momentum (hu, hv), conserved; first-order finite
// volumes with the Rusanov flux, explicit Euler, g = 1; at a wall the state is mirrored.
// (R. J. LeVeque, Finite Volume Methods for Hyperbolic Problems, 2002, chapters 12, 18 and 23.)

#include <mpi.h>

#include <cstdint>
#include <vector>

#include "cells.h"

namespace pillar {

inline constexpr int fields = 3;  // h, hu, hv

class Waves {
 public:
  /// `owner`: the rank of `comm` that has each cell, the same on all ranks. `comm` stays the
  /// caller's. Still water with two hills.
  Waves(MPI_Comm comm, const Cells& cells, const std::vector<int>& owner);

  MPI_Comm comm() const { return comm_; }
  /// The numbers of this rank's cells, in the order of its memory.
  const std::vector<std::int64_t>& owned() const { return owned_; }
  /// This rank's cells: [owned][fields], row-major. The address stays.
  double* state() { return state_.data(); }
  void step();
  /// The water, which never changes. Collective.
  double mass() const;

 private:
  struct Peer {
    int rank;
    /// Local cells; those of the other rank are ghosts here. In ascending order of their numbers.
    std::vector<std::int64_t> sent, received;
  };
  void exchange();

  MPI_Comm comm_;
  std::vector<std::int64_t> owned_;
  /// In local cells, of which ghosts are behind the owned ones.
  std::vector<Face> faces_;
  std::vector<double> area_, state_, all_;
  std::vector<Peer> peers_;
  double time_step_ = 0;
};

}  // namespace pillar
