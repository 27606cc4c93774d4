"""Ranks whose loaders have worker processes; of the last one a worker `dies`, or it is `killed`. `unguarded`: a script without a main."""

import os
import signal
import sys
import time

import torch

import tessera as ts

HOW = sys.argv[1]


class Samples:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor([index, os.getpid()])


def main():
    ts.init(timeout=80)
    torch.set_num_threads(1)
    loader = ts.Loader(Samples(), ts.FixedOrder(64, 4), ts.Mesh({"data": ts.world_size()}), ["data"], processes=2, prefetch=2)
    seen, told, killed = set(), set(), 0
    for step in range(1000):
        if len(seen) == 2 and ts.rank() == ts.world_size() - 1:
            if HOW == "dies":
                killed = time.monotonic()
                os.kill(seen.pop(), signal.SIGKILL)
            if HOW == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            found = set(loader.next().tensors[0][:, 1].tolist())
        except ts.SampleError:
            if killed:
                print("told after", time.monotonic() - killed, "s", flush=True)
            raise
        if not found <= told:
            print("workers:", *found, flush=True)
            seen.update(found)
            told.update(found)
        try:
            ts.world().all_reduce(torch.ones(3))
        except ts.CommError:
            time.sleep(100)  # told that the other rank fails, which is to be the first that ends: then this one is ended
            raise


if __name__ == "__main__" or HOW == "unguarded":
    main()
