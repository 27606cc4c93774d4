"""torch.distributed.checkpoint for bench_checkpoint: dcp.py FOLDER MEGABYTES. Says "ready", then for
each line "save", "load" or "async" on its input the seconds that took; of "async" the pause."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def main():
    folder, megabytes = sys.argv[1], int(sys.argv[2])
    os.makedirs(folder, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    state = {f"t{i}": torch.rand(megabytes * 1024 // 16, 256) for i in range(16)}
    target = {name: torch.zeros_like(t) for name, t in state.items()}
    dcp.save(state, checkpoint_id=f"{folder}/s0")
    print("ready", flush=True)
    for n, line in enumerate(sys.stdin):
        what, place = line.strip(), f"{folder}/s{n % 2}"
        begin = time.perf_counter()
        if what == "save":
            dcp.save(state, checkpoint_id=place)
            seconds = time.perf_counter() - begin
        elif what == "async":
            pending = dcp.async_save(state, checkpoint_id=place)
            seconds = time.perf_counter() - begin
            pending.result()
        elif what == "load":
            begin = time.perf_counter()
            dcp.load(target, checkpoint_id=f"{folder}/s0")
            seconds = time.perf_counter() - begin
        else:
            raise ValueError(f"what is '{what}'?")
        print(seconds, flush=True)
    dist.destroy_process_group()


main()
