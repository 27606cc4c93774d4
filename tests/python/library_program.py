"""Run by torchrun: the backend "tessera" of torch.distributed, of the library alone, without the package."""

import sys

import torch

torch.ops.load_library(sys.argv[1])

import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)
dist.init_process_group("tessera")
t = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(t)
assert t.tolist() == [3.0] * 3, t
assert dist.get_backend() == "tessera" and "tessera" not in sys.modules
sys.stdout.write(f"rank {dist.get_rank()}: without the package\n")
dist.destroy_process_group()
