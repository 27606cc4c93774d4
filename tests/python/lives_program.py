"""Run by torchrun with restarts: ranks that end after they have met, before they meet, and that meet twice in one life."""

import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

import tessera  # noqa: F401

folder = pathlib.Path(sys.argv[1])
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def ways():
    for _ in range(2):
        dist.init_process_group("tessera")
        t = torch.ones(3)
        dist.all_reduce(t)
        assert t.tolist() == [2, 2, 2]
        yield dist.group.WORLD._get_backend(torch.device("cpu")).name()
        dist.destroy_process_group()


def wait_for(name):
    for _ in range(9000):
        if (folder / name).exists():
            return
        time.sleep(0.01)
    raise SystemExit(f"nobody wrote {name}")


if life == 1 and rank == 1:
    wait_for("rank 0 comes")
    raise SystemExit("life 1 ends before the ranks have met")
if life == 1:
    (folder / "rank 0 comes").touch()
print(f"life {life} of rank {rank}: {', '.join(ways())}", flush=True)
if life == 0:
    (folder / f"{rank} is through").touch()
    wait_for(f"{1 - rank} is through")
    raise SystemExit("life 0 ends")
