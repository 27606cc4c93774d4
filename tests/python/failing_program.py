"""Run by torchrun: rank 1 raises; the others must learn it long before their time limit."""

import tessera as ts

ts.init(timeout=300)
mesh = ts.Mesh({"data": ts.world_size()})
if ts.rank() == 1:
    raise ValueError("rank 1 has had enough")
mesh.barrier()
