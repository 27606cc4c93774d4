"""A solver's own loop: the heat equation on rows that are spread unevenly, in the solver's memory, one halo exchange a step. Beside one process.

    tessera run -n 3 -- python examples/python/07_solver_halo.py         # any number of ranks
"""

import array

import torch

import tessera as ts

COLUMNS, STEPS = 9, 10


def step(with_halo: torch.Tensor) -> torch.Tensor:
    """One explicit step on rows that have one more row on either side; columns are periodic."""
    inside, above, below = with_halo[1:-1], with_halo[:-2], with_halo[2:]
    sides = inside.roll(1, 1) + inside.roll(-1, 1)
    return inside + 0.2 * (above + below + sides - 4 * inside)


def main() -> None:
    torch.set_num_threads(1)
    ts.init(timeout=60)
    rank, ranks = ts.rank(), ts.world_size()
    mesh = ts.Mesh({"rows": ranks})
    torch.manual_seed(0)
    start = torch.randn(ranks * ranks + 3, COLUMNS, dtype=torch.float64)
    rows = [2 * r + 1 for r in range(ranks - 1)] + [2 * ranks + 2]  # rank r owns 2 r + 1 rows, the last one three more

    # What the solver has, and a tensor over the same memory: nothing is copied, so that both see each step.
    memory = array.array("d", start.split(rows)[rank].flatten().tolist())
    mine = torch.frombuffer(memory, dtype=torch.float64).view(-1, COLUMNS)
    field = ts.from_local(mine, mesh, [ts.Shard(0)], {0: rows})
    whole = start
    for _ in range(STEPS):
        mine.copy_(step(ts.halo_exchange(field, {0: (1, 1, "zero")})))  # one row of each neighbour; the outermost ones meet zeros
        whole = step(torch.nn.functional.pad(whole, (0, 0, 1, 1)))
    assert torch.allclose(torch.tensor(memory.tolist(), dtype=torch.float64), whole.split(rows)[rank].flatten(), rtol=0, atol=1e-12)
    assert torch.allclose(ts.full_tensor(field), whole, rtol=0, atol=1e-12)

    # The exchange is differentiable: what the last step's energy says of the rows before it.
    u = ts.from_local(mine.clone(), mesh, [ts.Shard(0)], {0: rows}).requires_grad_(True)
    v = whole.clone().requires_grad_(True)
    step(ts.halo_exchange(u, {0: (1, 1, "zero")})).square().sum().backward()
    step(torch.nn.functional.pad(v, (0, 0, 1, 1))).square().sum().backward()
    assert u.grad is not None and v.grad is not None
    assert torch.allclose(ts.full_tensor(u.grad), v.grad, rtol=0, atol=1e-12)
    if rank == 0:
        print(f"solver_halo: rows {rows}, {STEPS} steps, as on one process", flush=True)


main()
