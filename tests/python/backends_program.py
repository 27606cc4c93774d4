"""Run by `tessera run` on 4 ranks: each node of a tree has the backend and the time limit that it names, on real processes."""

import torch

import tessera as ts

TREE = """
name: world
children:
  - {name: inner, size: 2, backend: gloo, timeout: 40s}
  - {name: outer, timeout: 50s}
"""

torch.set_num_threads(1)
ts.init(timeout=120)
ts.create_process_groups(ts.parse_group_config(TREE))
asked = {"inner": ("gloo", 40.0), "outer": ("shm", 50.0), "world": ("shm", 120.0)}
for name, (backend, timeout) in asked.items():
    group = ts.group(name)
    assert (group.backend, group.timeout) == (backend, timeout), (name, group.backend, group.timeout)
    total = group.all_reduce(torch.tensor([float(ts.rank())])).item()
    assert total == sum(group.ranks), (name, total)
mesh = ts.Mesh.of("world")
assert mesh.group("inner") == ts.group("inner") and mesh.axes == {"outer": 2, "inner": 2}
table = ts.Mesh({"x": 4}, ranks=[2, 3, 1, 0])
t = ts.from_local(torch.tensor([float(ts.rank())]), table, [ts.Shard(0)])
assert ts.full_tensor(t).tolist() == [2, 3, 1, 0]
memory = ts.SharedMemory(ts.world(), 1 << 20)
shared = memory.empty(100, 300, dtype=torch.float64).fill_(ts.rank())
assert ts.world().all_reduce(shared).eq(6).all() and memory.used == shared.nbytes
assert memory.empty((5,)).dtype == torch.float32 and memory.nbytes == 1 << 20
for wrong in (lambda: ts.SharedMemory(ts.group("inner"), 4096), lambda: ts.SharedMemory(ts.world(), 0), lambda: memory.empty(1 << 20)):
    try:
        wrong()
    except (RuntimeError, ValueError):
        continue
    raise AssertionError("taken")
print(f"rank {ts.rank()}: {ts.group('inner').backend} and {ts.group('outer').backend}", flush=True)
