"""Ranks of a communicator that mpi4py gave: mpirun -n 3 mpi_program.py"""

import sys

import torch
from mpi4py import MPI

import tessera as ts

world = MPI.COMM_WORLD
# The last rank takes no part, and the others come in the other order.
mine = world.Split(world.rank == world.size - 1, -world.rank)
for wrong, word in ((3, "give one of mpi4py's"), (MPI.COMM_NULL, "MPI_COMM_NULL")):
    try:
        ts.init(communicator=wrong)
        sys.exit("nothing was refused")
    except ts.InvalidArgument as error:
        assert word in str(error), error
ts.init(communicator=mine, timeout=60)
assert (ts.rank(), ts.world_size()) == (mine.rank, mine.size)
assert ts.group(range(ts.world_size())).backend == ("mpi" if mine.size > 1 else "self"), ts.group("world").backend
mesh = ts.Mesh({"x": ts.world_size()})
x = ts.from_local(torch.full((ts.rank() + 1, 2), float(world.rank)), mesh, [ts.Shard(0)])
expected = mine.allreduce(2.0 * (mine.rank + 1) * world.rank)
assert x.sum().item() == expected
if mine.size > 1:
    # What one rank does wrong, the others learn, and go on.
    try:
        ts.from_local(torch.ones(2, 2 + (ts.rank() == 1)), mesh, [ts.Shard(0)])
        sys.exit("shards of other widths")
    except ts.InvalidArgument as error:
        assert "local shapes" in str(error), error
    assert x.sum().item() == expected
ts.shutdown()
# MPI is the program's own still.
assert not MPI.Is_finalized() and world.allreduce(1) == world.size
sys.stdout.write(f"rank {world.rank} is right\n")
